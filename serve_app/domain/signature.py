"""Model signatures: named inputs and outputs, each with a datatype and a shape.

A signature is written in ``model-config.yaml``, read from an ONNX graph, or returned by a handler. Datatypes
are those of the Open Inference Protocol, version 2, and BF16, which its clients support too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from serve_app.domain import validation
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


class TensorType(Protocol):
    """The metadata that a port is compared with: a tensor, however its data is stored."""

    @property
    def name(self) -> str: ...
    @property
    def datatype(self) -> str: ...
    @property
    def shape(self) -> Sequence[int]: ...


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input or output; ``ANY`` is an axis of any length, and ``shape`` None any number of axes."""

    __pydantic_config__ = validation.STRICT
    name: str
    datatype: str
    shape: tuple[int, ...] | None = None

    def __str__(self) -> str:
        shape = "[...]" if self.shape is None else list(self.shape)
        return f"{self.name}: {self.datatype} {shape}"

    def accepts(self, shape: Sequence[int]) -> bool:
        if self.shape is None:
            return True
        return len(shape) == len(self.shape) and all(w in (ANY, axis) for w, axis in zip(self.shape, shape))


@dataclass(frozen=True, slots=True)
class Signature:
    """Ports in the model's order. Without outputs the outputs are unknown."""

    __pydantic_config__ = validation.STRICT
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()

    def check(self, tensors: Iterable[TensorType]) -> None:
        """Raise InvalidInput unless ``tensors`` are exactly the inputs; the message has the expected and
        actual port.
        """
        ports = {port.name: port for port in self.inputs}
        for tensor in tensors:
            port = ports.pop(tensor.name, None)
            if port is None:
                raise InvalidInput(
                    f"There is no input {abbreviate(tensor.name)}; the model takes {self._expected}."
                )
            if tensor.datatype != port.datatype or not port.accepts(tensor.shape):
                raise InvalidInput(
                    f"The input {port.name} is {tensor.datatype} {list(tensor.shape)}, and is to be "
                    f"{str(port).partition(': ')[2]} ({ANY}: any length)."
                )
        if ports:
            raise InvalidInput(f"The input {next(iter(ports))} is missing; the model takes {self._expected}.")

    @property
    def _expected(self) -> str:
        return ", ".join(map(str, self.inputs)) or "no inputs"


def read(document: Any) -> Signature:
    """Parse ``{inputs: [{name, datatype, shape}], outputs: [...]}``; without ``shape`` any is accepted.

    Raises BadRequest.
    """
    signature = validation.read_request(Signature, document, "signature")
    if not signature.inputs:
        raise BadRequest("signature.inputs names no input; name each with its datatype and shape.")
    for side, ports in (("inputs", signature.inputs), ("outputs", signature.outputs)):
        for place, port in enumerate(ports):
            if port.datatype not in DATATYPES:
                raise BadRequest(
                    f"signature.{side}.{place}.datatype is "
                    f"{abbreviate(port.datatype)}; there are {', '.join(DATATYPES)}."
                )
            if not port.name or any(axis < ANY for axis in port.shape or ()):
                raise BadRequest(
                    f"signature.{side}.{place} is {port}; it has a name, and lengths from {ANY} (any)."
                )
            if port.name in (other.name for other in ports[:place]):
                raise BadRequest(f"signature.{side}: {port.name} is there twice; each name once.")
    return signature


def write(signature: Signature) -> dict[str, Any]:
    """Return the document that ``read`` parses, as the protocol's metadata shows it.

    An unknown number of axes becomes one axis of any length.
    """
    return {
        "inputs": list(map(_port_document, signature.inputs)),
        "outputs": list(map(_port_document, signature.outputs)),
    }


def _port_document(port: TensorSpec) -> dict[str, Any]:
    shape = (ANY,) if port.shape is None else port.shape
    return {"name": port.name, "datatype": port.datatype, "shape": list(shape)}


def abbreviate(value: Any) -> str:
    """Return a caller's value for a message, at most 80 characters long."""
    text = repr(
        value[:8] if isinstance(value, (list, tuple)) else value[:80] if isinstance(value, str) else value
    )
    return text if len(text) <= 80 else f"{text[:77]}..."
