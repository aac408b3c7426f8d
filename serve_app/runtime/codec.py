"""Codec of rows: from a request to a handler's row, and from its return value to bytes.

Both follow TorchServe, because handlers and clients were written against it. JSON has the layout of
``json.dumps(value, indent=2)``, which TorchServe sends, written by orjson. The numbers are the same, and
their spelling may differ: 1e-7 for 1e-07. The standard library writes what orjson writes in another way: text
that is not printable ASCII. JSON has neither NaN nor infinity (RFC 8259, section 6), so null replaces them.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import orjson

from handlers import json_text
from handlers.context import Row
from serve_app.domain import exact_json, tensors
from serve_app.domain.request import InferenceRequest, InputPart
from serve_app.domain.signature import Signature, abbreviate
from serve_app.domain.tensors import Tensor
from serve_app.errors import InvalidInput, UnsupportedOutput

_KIND_HEADERS = {
    "predict": {"explain": "False"},
    "tensors": {"explain": "False"},
    "explain": {"explain": "True"},
    "describe": {"describe": "True"},
}


def decode(part: InputPart) -> Any:
    """Return a part's value: JSON's object, ``str`` for text, else ``bytearray``, also for a wrong type."""
    media_type = part.content_type
    if media_type:
        if media_type != "application/json":
            media_type = media_type.partition(";")[0].strip().lower()
        try:
            if media_type == "application/json":
                return loads(part.value)
            if media_type.startswith("text"):
                return part.value.decode()
        except (ValueError, RecursionError):
            pass
    return bytearray(part.value)


def loads(value: bytes) -> Any:
    """Return the object of a JSON text, as Python's json reads it, but faster.

    Raises ValueError and RecursionError.
    """
    try:
        return exact_json.loads(value)
    except ValueError:  # NaN, Infinity and lone surrogates are JSON to the standard library
        return json_text.loads(value.decode())


def read_row(request: InferenceRequest, decoded: bool = True) -> dict[str, Any]:
    """Return one element of a handler's ``data``: the request's inputs by name."""
    if decoded:
        return {part.name: decode(part) for part in request.inputs}
    return {part.name: bytearray(part.value) for part in request.inputs}


def prepare_row(
    request: InferenceRequest,
    read: Callable[[InferenceRequest], dict[str, Any]],
    prepare: Callable[[Row], Any] | None,
    length: Callable[[Row], int] | None = None,
) -> Row:
    """Return the row of a request, with the results of the handler's ``prepare`` and ``length``.

    An exception of ``prepare`` is kept for the batch; where ``length`` raises, the row has no length.
    """
    made = Row(read(request))
    if prepare is not None:
        try:
            made.prepared = prepare(made)
        except Exception as error:
            made.prepared = error
    if length is not None:
        with contextlib.suppress(Exception):  # the row is bad, which its batch will tell
            made.length = int(length(made))
    return made


def headers(request: InferenceRequest) -> dict[str, str]:
    """Return the request's headers, with the header that tells the kind of request to a handler."""
    return {**request.headers, **_KIND_HEADERS[request.kind]}


def parameters(request: InferenceRequest) -> dict[str, dict[str, str]]:
    """Return each input's content type for the context; "" where the request had none."""
    return {part.name: {"content-type": part.content_type or ""} for part in request.inputs}


def encode(value: Any) -> bytes:
    """Return the bytes of one returned value. Raises UnsupportedOutput.

    Bytes stay as they are, text becomes UTF-8, a tensor is written by ``torch.save``. Anything else is
    written as ``json.dumps(value, indent=2)`` does but for the spelling of floats, and arrays as their lists.
    """
    if isinstance(value, (bytes, bytearray)):
        return bytes(value)
    try:
        return value.encode() if isinstance(value, str) else _dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise UnsupportedOutput(f"a handler's {type(value).__name__} cannot be sent: {error}") from None


def _dumps(value: Any) -> bytes:
    torch = sys.modules.get("torch")  # a tensor exists only where it is imported
    if torch is None or not isinstance(value, torch.Tensor):
        return dumps(value)
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


# What json.dumps refuses must not be written either: those types go to orjson's default.
_INDENTED = orjson.OPT_INDENT_2 | orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME
_ARRAY = orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY


class NullifiedJSON(bytes):
    """JSON text in which null replaces NaN or an infinity."""


def dumps(value: Any) -> bytes:
    """Return the JSON of any value that has one; a numpy array is its list.

    The result is a NullifiedJSON where the value holds NaN or an infinity. Raises TypeError, ValueError,
    RecursionError.
    """
    try:
        text = orjson.dumps(value, _to_python, _INDENTED)
    except TypeError:  # orjson raises it for whatever it cannot write
        return _dumps_stdlib(value)
    # NaN may be behind a null. One byte is looked for at the speed of memory, and few answers of numbers
    # have an n.
    if text.isascii() and b"\x7f" not in text and not (b"n" in text and b"null" in text):
        return text
    return _dumps_stdlib(value)


def dumps_rows(array: np.ndarray) -> list[bytes] | None:
    """Return each row of an array as ``dumps`` writes its list, in half the time: no number becomes an
    object.

    Return None for arrays that must become lists first: rows of one number, NaN, and other types.
    """
    if array.ndim < 2 or not array.size or array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
        return None
    if array.dtype.kind == "f":
        array = array.astype(np.float64, order="C")  # a list would have Python's floats
        if not np.isfinite(array).all():
            return None
    else:
        array = array.astype(array.dtype.newbyteorder("="), order="C")
    return [orjson.dumps(row, option=_ARRAY) for row in array]


def _dumps_stdlib(value: Any) -> bytes:
    try:
        return json.dumps(value, indent=2, default=_to_python, allow_nan=False).encode()
    except ValueError:  # NaN, an infinity, or a cycle, which the next line refuses again
        text = json.dumps(value, default=_to_python)
    return NullifiedJSON(json.dumps(json.loads(text, parse_constant=lambda _: None), indent=2).encode())


def _to_python(value: Any) -> Any:
    """Return arrays and numbers of numpy as Python's."""
    if isinstance(value, (np.ndarray, np.generic)) and (plain := value.tolist()) is not value:
        return plain
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


# What a call of tensors becomes: {name: array}; the JSON document of the protocol, for its envelope; plain
# values.
Form = Literal["arrays", "document", "values"]
_TENSOR = {"name", "shape", "datatype", "data"}


class TensorRowCodec:
    """A codec of rows. ``tensors_only``: a row and a result are ``{name: array}``, whatever form the request
    has.

    ``signature`` is that of the model, also from its handler. Requests without tensors are TorchServe's.
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
        return read_row(request, self._decoded)

    def write(self, request: InferenceRequest, value: Any) -> tuple[bytes, str | None]:
        """Return a result's bytes, and their media type where the codec decides it.

        Raises UnsupportedOutput.
        """
        if request.kind != "tensors":
            return encode(_to_json_value(value) if self._tensors_only else value), None
        try:
            return tensors.pack(self._to_tensors(value)), tensors.PACKED_MEDIA_TYPE
        except ValueError as error:
            raise UnsupportedOutput(f"a handler's answer is no tensors: {error}") from None

    def rows(self, requests: Sequence[InferenceRequest], array: np.ndarray) -> list[Any]:
        """Return the results in an array with a row for each request of one kind, as JSON where needed."""
        if self._tensors_only or (requests and requests[0].kind == "tensors"):
            return list(array)
        written = dumps_rows(array)
        return array.tolist() if written is None else written

    def _parse_tensors(self, request: InferenceRequest) -> dict[str, np.ndarray]:
        """Return the tensors of a JSON document ``{name: nested list}``, of a form, or of a list for a single
        input.

        Datatypes are those of the signature; without one, floats are FP32.
        """
        named = {part.name: _parse_json(part.name, decode(part)) for part in request.inputs}
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
            return [tensors.from_text(encode(value), self._default_output)]
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
        return [tensors.from_text(encode(value), self._default_output)]

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
        return loads(bytes(value) if isinstance(value, bytearray) else value.encode())
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
