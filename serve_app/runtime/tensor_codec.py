"""Codec of tensors: the form in which a handler gets its rows and returns its results."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from serve_app.domain import tensors
from serve_app.domain.request import InferenceRequest
from serve_app.domain.signature import Signature, abbreviate
from serve_app.domain.tensors import Tensor
from serve_app.errors import InvalidInput, UnsupportedOutput
from serve_app.runtime import codec

# What a call of tensors becomes: {name: array}; the JSON document of the protocol, for its envelope; plain
# values.
Form = Literal["arrays", "document", "values"]
_TENSOR = {"name", "shape", "datatype", "data"}


class TensorRowCodec:
    """A codec of rows. ``tensors_only``: a row and a result are ``{name: array}``, whatever form the request
    has.

    ``signature`` is that of the model, also from its handler. Requests without tensors are TorchServe's, see
    ``codec.py``.
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
        outputs = signature.outputs if signature is not None else ()
        self._outputs = {port.name: port.datatype for port in outputs}
        self._default_output = outputs[0].name if len(self._outputs) == 1 else tensors.DEFAULT_OUTPUT_NAME
        self._tensors_only = tensors_only

    def read(self, request: InferenceRequest) -> dict[str, Any]:
        """Return the row of a request. Raises InvalidInput."""
        if request.kind == "tensors":
            given = [tensors.from_content_type(p.name, p.value, p.content_type or "") for p in request.inputs]
            if self._form == "document":
                return {"body": {"inputs": [_document(tensor) for tensor in given]}}
            return {t.name: t.to_array() for t in given} if self._form == "arrays" else _plain_values(given)
        if self._tensors_only and request.kind == "predict":
            return self._parse_tensors(request)
        return codec.read_row(request, self._decoded)

    def write(self, request: InferenceRequest, value: Any) -> tuple[bytes, str | None]:
        """Return a result's bytes, and their media type where the codec decides it.

        Raises UnsupportedOutput.
        """
        if request.kind != "tensors":
            return codec.encode(_to_json_value(value) if self._tensors_only else value), None
        try:
            return tensors.pack(self._to_tensors(value)), tensors.PACKED_MEDIA_TYPE
        except ValueError as error:
            raise UnsupportedOutput(f"a handler's answer is no tensors: {error}") from None

    def rows(self, requests: Sequence[InferenceRequest], array: np.ndarray) -> list[Any]:
        """Return the results in an array with a row for each request of one kind, as JSON where needed."""
        if self._tensors_only or (requests and requests[0].kind == "tensors"):
            return list(array)
        written = codec.dumps_rows(array)
        return array.tolist() if written is None else written

    def _parse_tensors(self, request: InferenceRequest) -> dict[str, np.ndarray]:
        """Return the tensors of a JSON document ``{name: nested list}``, of a form, or of a list for a single
        input.

        Datatypes are those of the signature; without one, floats are FP32.
        """
        named = {part.name: _parse_json(part.name, codec.decode(part)) for part in request.inputs}
        if len(named) == 1 and (key := next(iter(named))) in ("body", "data"):
            whole = named[key]
            if isinstance(whole, dict):
                named = whole
            elif self._signature is not None and len(self._signature.inputs) == 1:
                named = {self._signature.inputs[0].name: whole}
        datatypes = (
            {p.name: p.datatype for p in self._signature.inputs} if self._signature is not None else {}
        )
        made = [_tensor(name, value, datatypes.get(name)) for name, value in named.items()]
        if self._signature is not None:
            self._signature.check(made)
        return {tensor.name: tensor.to_array() for tensor in made}

    def _to_tensors(self, value: Any) -> list[Tensor]:
        """Return a handler's result as tensors. Raises ValueError where it has no tensor form."""
        if isinstance(value, (str, bytes, bytearray)):
            return [tensors.from_text(codec.encode(value), self._default_output)]
        if isinstance(value, Mapping) and value:
            if self._form == "arrays" or all(map(_is_array, value.values())):
                return [self._output(str(name), item) for name, item in value.items()]
            outputs = value.get("outputs")
            if isinstance(outputs, list) and all(
                isinstance(o, dict) and o.keys() >= _TENSOR for o in outputs
            ):
                return [_tensor_from_document(output) for output in outputs]
        if _is_array(value):
            return [self._output(self._default_output, value)]
        if isinstance(value, (list, int, float)) and (array := _numbers(value)) is not None:
            return [self._output(self._default_output, array)]
        return [tensors.from_text(codec.encode(value), self._default_output)]

    def _output(self, name: str, value: Any) -> Tensor:
        datatype = self._outputs.get(name)
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.Tensor):
            value = value.detach().cpu()
            if value.dtype == torch.bfloat16:
                bits = value.contiguous().view(torch.int16).numpy().tobytes()
                return Tensor(name, "BF16", tuple(value.shape), bits)
            value = value.numpy()
        return tensors.from_array(name, value, datatype)


def _is_array(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return isinstance(value, (np.ndarray, np.generic)) or (
        torch is not None and isinstance(value, torch.Tensor)
    )


def _numbers(value: Any) -> np.ndarray | None:
    """Return evenly nested numbers as an array, one number as a list of one; None for anything else."""
    try:
        array = np.array(value if isinstance(value, list) else [value])
    except (ValueError, OverflowError):
        return None
    return array if array.size and array.dtype.kind in "biuf" else None


def _plain_values(given: list[Tensor]) -> dict[str, Any]:
    """Return numbers as nested lists and one text as its bytes; a single tensor is the row's ``data`` too."""
    row: dict[str, Any] = {}
    for tensor in given:
        lone = tensor.datatype == "BYTES" and math.prod(tensor.shape) == 1
        row[tensor.name] = bytearray(tensor.data)[4:] if lone else tensor.to_array().tolist()
    if len(given) == 1:
        row.setdefault("data", row[given[0].name])
    return row


def _document(tensor: Tensor) -> dict[str, Any]:
    values = tensor.to_list()
    if tensor.datatype == "BYTES":
        values = [_decode_text(value) for value in values]
    return {"name": tensor.name, "shape": list(tensor.shape), "datatype": tensor.datatype, "data": values}


def _decode_text(value: bytes) -> str | bytes:
    """Return text as a string; other bytes as they came."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value


def _tensor_from_document(output: Mapping[str, Any]) -> Tensor:
    name, datatype, shape = str(output["name"]), output["datatype"], output["shape"]
    if datatype in ("FP16", "BF16"):
        return tensors.from_array(name, np.array(output["data"], np.float32).reshape(shape), datatype)
    try:
        return tensors.from_list(name, datatype, shape, output["data"])
    except InvalidInput as error:
        raise ValueError(str(error).replace("The input", "The output")) from None


def _parse_json(name: str, value: Any) -> Any:
    """Return the JSON of a form field, or of a body of unknown type. Raises InvalidInput."""
    if not isinstance(value, (str, bytearray)):
        return value
    try:
        return codec.loads(bytes(value) if isinstance(value, bytearray) else value.encode())
    except (ValueError, RecursionError) as error:
        raise InvalidInput(
            f"The input {abbreviate(name)} is not JSON: {error}. Send {{name: nested list}}."
        ) from None


def _tensor(name: str, value: Any, datatype: str | None) -> Tensor:
    try:
        array = np.array(value)
    except (ValueError, OverflowError):
        raise InvalidInput(f"The input {abbreviate(name)} is a list whose parts differ in length.") from None
    if datatype is None:
        kinds = {"b": "BOOL", "i": "INT64", "u": "UINT64", "f": "FP32", "U": "BYTES"}
        datatype = kinds.get(array.dtype.kind)
        if datatype is None:
            raise InvalidInput(
                f"The input {abbreviate(name)} is {abbreviate(value)}; "
                "it is a number, a text, or lists of them."
            )
    if datatype in ("FP16", "BF16"):
        if array.dtype.kind not in "iuf":
            raise InvalidInput(
                f"The input {name} is {datatype}, and {abbreviate(value)} holds other than numbers."
            )
        return tensors.from_array(name, array, datatype)
    return tensors.from_list(name, datatype, array.shape, value if array.shape else [value])


def _to_json_value(value: Any) -> Any:
    """Return a result of arrays as JSON values."""
    if isinstance(value, Mapping):
        return {name: _to_json_value(item) for name, item in value.items()}
    if _is_array(value):
        return _to_json_value(value.tolist())
    if isinstance(value, list):
        return [_to_json_value(item) for item in value]
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
