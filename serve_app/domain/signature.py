"""What a model takes and gives: named ports, each with a datatype and a shape.

Written in ``model-config.yaml``, read off an ONNX graph, or offered by a handler. Datatypes are those of the Open
Inference Protocol, version 2; beside them BF16, which its clients know too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from serve_app import documents
from serve_app.errors import BadRequest, InvalidInput

# Bytes of an element; 0 where each has a length of its own.
DATATYPES: Mapping[str, int] = {
    "BOOL": 1,
    **{f"{kind}{8 * size}": size for kind in ("UINT", "INT") for size in (1, 2, 4, 8)},
    "FP16": 2,
    "BF16": 2,
    "FP32": 4,
    "FP64": 8,
    "BYTES": 0,
}
ANY = -1  # the length of an axis that may have any


class Typed(Protocol):
    """What a port is compared with: a tensor, whatever holds its data."""

    @property
    def name(self) -> str: ...
    @property
    def datatype(self) -> str: ...
    @property
    def shape(self) -> Sequence[int]: ...


@dataclass(frozen=True, slots=True)
class Port:
    """One input or output; ``ANY`` is an axis of any length, and ``shape`` None any number of axes."""

    __pydantic_config__ = documents.STRICT
    name: str
    datatype: str
    shape: tuple[int, ...] | None = None

    def __str__(self) -> str:
        shape = "[...]" if self.shape is None else list(self.shape)
        return f"{self.name}: {self.datatype} {shape}"

    def takes(self, shape: Sequence[int]) -> bool:
        if self.shape is None:
            return True
        return len(shape) == len(self.shape) and all(w in (ANY, axis) for w, axis in zip(self.shape, shape))


@dataclass(frozen=True, slots=True)
class Signature:
    """Ports in the model's order. One that names no outputs says nothing of them."""

    __pydantic_config__ = documents.STRICT
    inputs: tuple[Port, ...] = ()
    outputs: tuple[Port, ...] = ()

    def check(self, tensors: Iterable[Typed]) -> None:
        """Raises InvalidInput where ``tensors`` are not exactly the inputs; it names the port, wanted and given."""
        ports = {port.name: port for port in self.inputs}
        for tensor in tensors:
            port = ports.pop(tensor.name, None)
            if port is None:
                raise InvalidInput(f"There is no input {short(tensor.name)}; the model takes {self._wanted}.")
            if tensor.datatype != port.datatype or not port.takes(tensor.shape):
                raise InvalidInput(
                    f"The input {port.name} is {tensor.datatype} {list(tensor.shape)}, and is to be "
                    f"{str(port).partition(': ')[2]} ({ANY}: any length)."
                )
        if ports:
            raise InvalidInput(f"The input {next(iter(ports))} is missing; the model takes {self._wanted}.")

    @property
    def _wanted(self) -> str:
        return ", ".join(map(str, self.inputs)) or "no inputs"


def read(document: Any) -> Signature:
    """``{inputs: [{name, datatype, shape}], outputs: [...]}``; without ``shape`` any will do. Raises BadRequest."""
    try:
        signature = documents.read(Signature, document)
    except documents.Misread as error:
        raise BadRequest(f"signature: {error}") from None
    if not signature.inputs:
        raise BadRequest("signature.inputs names no input; name each with its datatype and shape.")
    for side, ports in (("inputs", signature.inputs), ("outputs", signature.outputs)):
        for place, port in enumerate(ports):
            if port.datatype not in DATATYPES:
                raise BadRequest(
                    f"signature.{side}.{place}.datatype is {short(port.datatype)}; there are {', '.join(DATATYPES)}."
                )
            if not port.name or any(axis < ANY for axis in port.shape or ()):
                raise BadRequest(f"signature.{side}.{place} is {port}; it has a name, and lengths from {ANY} (any).")
            if port.name in (other.name for other in ports[:place]):
                raise BadRequest(f"signature.{side}: {port.name} is there twice; each name once.")
    return signature


def write(signature: Signature) -> dict[str, Any]:
    """What ``read`` reads, as the protocol's metadata show it: an unknown number of axes is one of any length."""
    return {"inputs": list(map(_said, signature.inputs)), "outputs": list(map(_said, signature.outputs))}


def _said(port: Port) -> dict[str, Any]:
    shape = (ANY,) if port.shape is None else port.shape
    return {"name": port.name, "datatype": port.datatype, "shape": list(shape)}


def short(value: Any) -> str:
    """A caller's value in a message, which stays short however long that is."""
    text = repr(value[:8] if isinstance(value, (list, tuple)) else value[:80] if isinstance(value, str) else value)
    return text if len(text) <= 80 else f"{text[:77]}..."
