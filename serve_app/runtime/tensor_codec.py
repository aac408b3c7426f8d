"""The form in which a handler takes its rows and gives its answers, where calls carry tensors or it wants them."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from serve_app import tensors
from serve_app.errors import InvalidInput, UnsupportedOutput
from serve_app.runtime import answer_json, rows
from serve_app.signature import Signature, short
from serve_app.tensors import Tensor
from serve_app.types import Call

# What a call of tensors becomes: {name: array}; the JSON document of the protocol, for its envelope; plain values.
Form = Literal["arrays", "document", "values"]
_TENSOR = {"name", "shape", "datatype", "data"}


class RowForm:
    """``tensors_only``: a row is ``{name: array}`` and an answer too, whatever form its call has.

    ``signature`` is what is known of the model, also by its handler. Calls that carry no tensors are TorchServe's, and
    rows.py has them.
    """

    def __init__(
        self,
        form: Form = "values",
        decoded: bool = True,
        signature: Signature | None = None,
        tensors_only: bool = False,
    ) -> None:
        self._form = form
        self._decoded = decoded
        self._signature = signature
        self._outputs = {port.name: port.datatype for port in signature.outputs} if signature is not None else {}
        self._sole = next(iter(self._outputs)) if len(self._outputs) == 1 else tensors.OUTPUT
        self._tensors_only = tensors_only

    def read(self, call: Call) -> dict[str, Any]:
        """The row that a call is. Raises InvalidInput."""
        if call.kind == "tensors":
            given = [tensors.received(p.name, p.value, p.content_type or "") for p in call.inputs]
            if self._form == "document":
                return {"body": {"inputs": [_document(tensor) for tensor in given]}}
            return {t.name: t.array() for t in given} if self._form == "arrays" else _values(given)
        if self._tensors_only and call.kind == "predict":
            return self._parsed(call)
        return rows.row(call, self._decoded)

    def write(self, call: Call, value: Any) -> tuple[bytes, str | None]:
        """The bytes of an answer, and their media type where it is ours to say. Raises UnsupportedOutput."""
        if call.kind != "tensors":
            return rows.encode(_plain(value) if self._tensors_only else value), None
        try:
            return tensors.pack(self._tensors(value)), tensors.PACKED
        except ValueError as error:
            raise UnsupportedOutput(f"a handler's answer is no tensors: {error}") from None

    def rows(self, calls: Sequence[Call], array: np.ndarray) -> list[Any]:
        """The answers in an array with a row for each call, all of one kind: as JSON already, where they want it."""
        if self._tensors_only or (calls and calls[0].kind == "tensors"):
            return list(array)
        written = answer_json.dumps_rows(array)
        return array.tolist() if written is None else written

    def _parsed(self, call: Call) -> dict[str, np.ndarray]:
        """The tensors of a JSON document ``{name: nested list}``, of a form, or of a list where there is one input.

        They are what the signature says; without one, floats are FP32.
        """
        named = {part.name: _json(part.name, rows.decode(part)) for part in call.inputs}
        if len(named) == 1 and (key := next(iter(named))) in ("body", "data"):
            whole = named[key]
            if isinstance(whole, dict):
                named = whole
            elif self._signature is not None and len(self._signature.inputs) == 1:
                named = {self._signature.inputs[0].name: whole}
        datatypes = {p.name: p.datatype for p in self._signature.inputs} if self._signature is not None else {}
        made = [_tensor(name, value, datatypes.get(name)) for name, value in named.items()]
        if self._signature is not None:
            self._signature.check(made)
        return {tensor.name: tensor.array() for tensor in made}

    def _tensors(self, value: Any) -> list[Tensor]:
        """What a handler answered, as tensors. ValueError for what none can stand for."""
        if isinstance(value, (str, bytes, bytearray)):
            return [tensors.text(rows.encode(value), self._sole)]
        if isinstance(value, Mapping) and value:
            if self._form == "arrays" or all(map(_is_array, value.values())):
                return [self._output(str(name), item) for name, item in value.items()]
            outputs = value.get("outputs")
            if isinstance(outputs, list) and all(isinstance(o, dict) and o.keys() >= _TENSOR for o in outputs):
                return [_of_document(output) for output in outputs]
        if _is_array(value):
            return [self._output(self._sole, value)]
        if isinstance(value, (list, int, float)) and (array := _numbers(value)) is not None:
            return [self._output(self._sole, array)]
        return [tensors.text(rows.encode(value), self._sole)]

    def _output(self, name: str, value: Any) -> Tensor:
        datatype = self._outputs.get(name)
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.Tensor):
            value = value.detach().cpu()
            if value.dtype == torch.bfloat16:
                bits = value.contiguous().view(torch.int16).numpy().tobytes()
                return Tensor(name, "BF16", tuple(value.shape), bits)
            value = value.numpy()
        return tensors.of(name, value, datatype)


def _is_array(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return isinstance(value, (np.ndarray, np.generic)) or (torch is not None and isinstance(value, torch.Tensor))


def _numbers(value: Any) -> np.ndarray | None:
    """A list of numbers, nested evenly, as an array; one number as a list of one; None for anything else."""
    try:
        array = np.array(value if isinstance(value, list) else [value])
    except (ValueError, OverflowError):
        return None
    return array if array.size and array.dtype.kind in "biuf" else None


def _values(given: list[Tensor]) -> dict[str, Any]:
    """Numbers as nested lists, one text as its bytes; where there is one tensor, it is the row's ``data`` too."""
    row: dict[str, Any] = {}
    for tensor in given:
        lone = tensor.datatype == "BYTES" and math.prod(tensor.shape) == 1
        row[tensor.name] = bytearray(tensor.data)[4:] if lone else tensor.array().tolist()
    if len(given) == 1:
        row.setdefault("data", row[given[0].name])
    return row


def _document(tensor: Tensor) -> dict[str, Any]:
    values = tensor.values()
    if tensor.datatype == "BYTES":
        values = [_text(value) for value in values]
    return {"name": tensor.name, "shape": list(tensor.shape), "datatype": tensor.datatype, "data": values}


def _text(value: bytes) -> str | bytes:
    """Text, as it is in JSON; what is none, as it came."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value


def _of_document(output: Mapping[str, Any]) -> Tensor:
    name, datatype, shape = str(output["name"]), output["datatype"], output["shape"]
    if datatype in ("FP16", "BF16"):
        return tensors.of(name, np.array(output["data"], np.float32).reshape(shape), datatype)
    try:
        return tensors.listed(name, datatype, shape, output["data"])
    except InvalidInput as error:
        raise ValueError(str(error).replace("The input", "The output")) from None


def _json(name: str, value: Any) -> Any:
    """A field of a form, or a body of no known type: its JSON. Raises InvalidInput."""
    if not isinstance(value, (str, bytearray)):
        return value
    try:
        return rows.loads(bytes(value) if isinstance(value, bytearray) else value.encode())
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"The input {short(name)} is not JSON: {error}. Send {{name: nested list}}.") from None


def _tensor(name: str, value: Any, datatype: str | None) -> Tensor:
    try:
        array = np.array(value)
    except (ValueError, OverflowError):
        raise InvalidInput(f"The input {short(name)} is a list whose parts differ in length.") from None
    if datatype is None:
        kinds = {"b": "BOOL", "i": "INT64", "u": "UINT64", "f": "FP32", "U": "BYTES"}
        datatype = kinds.get(array.dtype.kind)
        if datatype is None:
            raise InvalidInput(f"The input {short(name)} is {short(value)}; it is a number, a text, or lists of them.")
    if datatype in ("FP16", "BF16"):
        if array.dtype.kind not in "iuf":
            raise InvalidInput(f"The input {name} is {datatype}, and {short(value)} holds other than numbers.")
        return tensors.of(name, array, datatype)
    return tensors.listed(name, datatype, array.shape, value if array.shape else [value])


def _plain(value: Any) -> Any:
    """An answer of arrays as JSON holds it."""
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if _is_array(value):
        return _plain(value.tolist())
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
