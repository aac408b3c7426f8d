"""Types of requests and results: an annotation's parser, writer, JSON schema and tensors.

PIL and torch are not imported here: a class that annotates with their types has imported them.
"""

from __future__ import annotations

import dataclasses
import io
import json
import typing
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
import pydantic
from typing_extensions import is_typeddict

from handlers import json_text
from handlers.errors import PredictionException

Json = dict[str, Any]
Arrays = Mapping[str, np.ndarray]
_SCALARS: Mapping[Any, tuple[str, Any]] = {
    bool: ("BOOL", np.bool_),
    int: ("INT64", np.int64),
    float: ("FP64", np.float64),
    str: ("BYTES", np.object_),
}
_DATATYPES = {"b": "BOOL", "i": "INT", "u": "UINT", "f": "FP"}
_MAX_SHOWN_ERRORS = 5


@dataclasses.dataclass(frozen=True)
class Port:
    """A tensor of the Open Inference Protocol; ``scalar`` is a tensor of one element that is read as it."""

    name: str
    datatype: str
    dtype: Any
    shape: tuple[int, ...] | None = None
    scalar: bool = False

    def describe(self) -> Json:
        """Return the entry of a signature."""
        shape = {} if self.shape is None else {"shape": list(self.shape)}
        return {"name": self.name, "datatype": self.datatype, **shape}

    def to_array(self, value: Any) -> np.ndarray:
        return np.asarray([value] if self.scalar else value, self.dtype)


class ValueType(ABC):
    """A type of requests or results; ``name`` is the parameter's, ``media_type`` a request's."""

    media_type = ""

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def parse(self, value: Any) -> Any:
        """Return the request in a row's value. Raises PredictionException (400)."""

    def parse_tensors(self, arrays: Arrays) -> Any:
        """Return the request in named arrays. Raises PredictionException (400)."""
        values = {name: _to_python(array) for name, array in arrays.items()}
        return self.parse(values if len(values) > 1 else next(iter(values.values())))

    def write(self, value: Any) -> Any:
        """Return a result as bytes, text, an array or JSON values. Raises ValueError for another type."""
        return to_plain(value)

    def write_tensors(self, value: Any) -> Any:
        """Return a result as an array, named arrays, text or bytes."""
        return to_tensors(self.write(value))

    def schema(self, is_input: bool) -> Json:
        """Return the JSON schema; an empty one accepts everything."""
        return {}

    @property
    def ports(self) -> tuple[Port, ...]:
        """The tensors of the type; none where they are unknown."""
        return ()


class AnyValue(ValueType):
    """A value without annotation: JSON's values, text, bytes, or all fields of a form."""

    def parse(self, value: Any) -> Any:
        return bytes(value) if isinstance(value, bytearray) else value

    def parse_tensors(self, arrays: Arrays) -> Any:
        return dict(arrays)


class TextValue(ValueType):
    """A text."""

    media_type = "text/plain"

    def parse(self, value: Any) -> Any:
        if isinstance(value, (bytes, bytearray)):
            try:
                return value.decode()
            except UnicodeDecodeError as error:
                raise PredictionException(
                    f"{self.name} is text, and this is not UTF-8: {error}", 400
                ) from None
        if not isinstance(value, str):
            raise PredictionException(f"{self.name} is text, and {_name_json_type(value)} was sent.", 400)
        return value

    def parse_tensors(self, arrays: Arrays) -> Any:
        return self.parse(_only_element(self.name, arrays))

    def schema(self, is_input: bool) -> Json:
        return {"type": "string"}

    @property
    def ports(self) -> tuple[Port, ...]:
        return (Port(self.name, "BYTES", np.object_, (1,), scalar=True),)


class BytesValue(ValueType):
    """Bytes as they were sent; a text is encoded as UTF-8."""

    media_type = "application/octet-stream"

    def parse(self, value: Any) -> Any:
        if isinstance(value, str):
            return value.encode()
        if not isinstance(value, (bytes, bytearray)):
            problem = f"{self.name} is bytes, and {_name_json_type(value)} was sent."
            raise PredictionException(f"{problem} Send it as application/octet-stream.", 400)
        return bytes(value)

    def parse_tensors(self, arrays: Arrays) -> Any:
        element = _only_element(self.name, arrays)
        return element if isinstance(element, bytes) else self.parse(element)

    def schema(self, is_input: bool) -> Json:
        return {"type": "string", "format": "binary"}

    @property
    def ports(self) -> tuple[Port, ...]:
        return (Port(self.name, "BYTES", np.object_, (1,), scalar=True),)


class ImageValue(BytesValue):
    """A PIL image: the file's bytes, or a text in base64; a result is written as PNG."""

    media_type = "image/*"

    def parse(self, value: Any) -> Any:
        from handlers import images  # late: Pillow is of the extra `server`

        if isinstance(value, str):
            value = images.decode_base64(value)
        if not isinstance(value, (bytes, bytearray)) or not value:
            raise PredictionException(f"{self.name} is an image: send the file as the body, or as data.", 400)
        return images.open_image(value)

    def parse_tensors(self, arrays: Arrays) -> Any:
        return self.parse(_only_element(self.name, arrays))

    @property
    def ports(self) -> tuple[Port, ...]:
        return ()


class ArrayValue(ValueType):
    """A numpy array or a tensor: JSON's nested lists, or a tensor of the Open Inference Protocol."""

    media_type = "application/json"

    def __init__(self, name: str, dtype: np.dtype[Any] | None, as_tensor: bool = False) -> None:
        super().__init__(name)
        self._dtype = dtype
        self._as_tensor = as_tensor

    def parse(self, value: Any) -> Any:
        try:
            value = json_text.loads(value) if isinstance(value, (str, bytes, bytearray)) else value
            array = np.asarray(value, self._dtype)
        except (ValueError, TypeError, OverflowError) as error:
            raise PredictionException(f"{self.name} is not a JSON list of numbers: {error}", 400) from None
        if array.dtype.kind not in "biuf":
            raise PredictionException(f"{self.name} is not a JSON list of numbers.", 400)
        return self._finish(array)

    def parse_tensors(self, arrays: Arrays) -> Any:
        if len(arrays) != 1:
            raise PredictionException(f"The model takes one tensor, {self.name}; {len(arrays)} came.", 400)
        (array,) = arrays.values()
        return self._finish(array if self._dtype is None else array.astype(self._dtype, copy=False))

    def _finish(self, array: np.ndarray) -> Any:
        if self._dtype is None and array.dtype == np.float64:
            array = array.astype(np.float32)
        if not self._as_tensor:
            return array
        import torch

        return torch.from_numpy(array if array.flags.writeable else array.copy())

    def schema(self, is_input: bool) -> Json:
        return {"type": "array", "items": {}}

    @property
    def ports(self) -> tuple[Port, ...]:
        if self._dtype is None or self._dtype.kind not in _DATATYPES:
            return ()
        kind, size = _DATATYPES[self._dtype.kind], 8 * self._dtype.itemsize
        return (Port(self.name, kind if kind == "BOOL" else f"{kind}{size}", self._dtype),)


class JsonValue(ValueType):
    """A value that pydantic validates: a model, a dataclass, a TypedDict, ``dict``, ``list[float]`` …"""

    media_type = "application/json"

    def __init__(self, name: str, annotation: Any) -> None:
        super().__init__(name)
        self._adapter: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(annotation)
        self._fields = _find_fields(annotation)
        self._ports = _find_ports(name, annotation, self._fields)

    def parse(self, value: Any) -> Any:
        if isinstance(value, (bytes, bytearray)) and not value:
            raise PredictionException(f"{self.name} is empty: send JSON as the body of a POST.", 400)
        try:
            if isinstance(value, (bytes, bytearray, str)):
                return self._adapter.validate_json(bytes(value) if isinstance(value, bytearray) else value)
            if isinstance(value, Mapping):  # fields of a form are bytes
                value = {
                    name: item.decode(errors="replace") if isinstance(item, bytearray) else item
                    for name, item in value.items()
                }
            return self._adapter.validate_python(value)
        except pydantic.ValidationError as error:
            raise PredictionException(
                f"{self.name} is invalid: {format_validation_error(error)}", 400
            ) from None

    def parse_tensors(self, arrays: Arrays) -> Any:
        ports = {port.name: port for port in self._ports}
        values = {}
        for name, array in arrays.items():
            is_scalar = name in ports and ports[name].scalar and array.size == 1
            values[name] = _to_python(array.reshape(-1)[0] if is_scalar else array)
        takes_object = self._fields is not None or not self._ports
        return self.parse(values if takes_object else next(iter(values.values())))

    def write(self, value: Any) -> Any:
        try:
            return self._adapter.dump_python(self._adapter.validate_python(value), mode="json")
        except pydantic.ValidationError as error:
            raise ValueError(
                f"the result does not match its annotation: {format_validation_error(error)}"
            ) from None

    def write_tensors(self, value: Any) -> Any:
        plain = self.write(value)
        if self._fields is None or not self._ports:
            return to_tensors(plain)
        return {port.name: port.to_array(plain[port.name]) for port in self._ports}

    def schema(self, is_input: bool) -> Json:
        try:
            return self._adapter.json_schema(mode="validation" if is_input else "serialization")
        except pydantic.errors.PydanticInvalidForJsonSchema:
            return {}

    @property
    def ports(self) -> tuple[Port, ...]:
        return self._ports


def create_type(name: str, annotation: Any) -> ValueType:
    """Return the type of an annotation. Raises TypeError where it is not supported."""
    if annotation in (None, Any, type(None)):
        return AnyValue(name)
    if annotation is str:
        return TextValue(name)
    if annotation in (bytes, bytearray):
        return BytesValue(name)
    origin = typing.get_origin(annotation) or annotation
    if origin is np.ndarray:
        return ArrayValue(name, _find_dtype(annotation))
    where = getattr(origin, "__module__", ""), getattr(origin, "__name__", "")
    if where == ("torch", "Tensor"):
        return ArrayValue(name, None, as_tensor=True)
    if where == ("PIL.Image", "Image"):
        return ImageValue(name)
    try:
        return JsonValue(name, annotation)
    except pydantic.errors.PydanticUserError as error:
        raise TypeError(str(error).splitlines()[0]) from None


def to_plain(value: Any) -> Any:
    """Return a result as bytes, text, an array, or values of JSON."""
    if isinstance(value, (str, bytes, dict, list, int, float, np.ndarray, type(None))):
        return value
    if isinstance(value, pydantic.BaseModel):
        return value.model_dump(mode="json")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    module = type(value).__module__
    if module.startswith("PIL."):
        buffer = io.BytesIO()
        value.save(buffer, "PNG")
        return buffer.getvalue()
    if hasattr(value, "detach"):
        return value.detach().cpu().numpy()
    return value


def to_tensors(value: Any) -> Any:
    """Return a plain result in a form that has tensors: an array, named arrays, or a text."""
    if isinstance(value, (str, bytes, np.ndarray)):
        return value
    if isinstance(value, dict) and value and all(isinstance(item, np.ndarray) for item in value.values()):
        return value
    if isinstance(value, (list, int, float)):
        return value
    return json.dumps(value)


def format_validation_error(error: pydantic.ValidationError) -> str:
    """Return the places and messages of the first errors on one line."""
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    shown = [
        f"{'.'.join(map(str, entry['loc']))}: {entry['msg']}" if entry["loc"] else entry["msg"]
        for entry in errors[:_MAX_SHOWN_ERRORS]
    ]
    more = [f"and {len(errors) - len(shown)} more"] if len(errors) > len(shown) else []
    return "; ".join(shown + more)


def _find_dtype(annotation: Any) -> np.dtype[Any] | None:
    """Return the dtype of ``NDArray[np.float32]``; None where the annotation has none."""
    arguments = typing.get_args(annotation)
    scalars = typing.get_args(arguments[1]) if len(arguments) == 2 else ()
    if not scalars or not isinstance(scalars[0], type) or scalars[0] in (np.generic, np.number):
        return None
    try:
        return np.dtype(scalars[0])
    except TypeError:
        return None


def _find_fields(annotation: Any) -> dict[str, Any] | None:
    """Return the fields of an object and their annotations; None for other types."""
    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        return {field.alias or name: field.annotation for name, field in annotation.model_fields.items()}
    if is_typeddict(annotation) or (isinstance(annotation, type) and dataclasses.is_dataclass(annotation)):
        return typing.get_type_hints(annotation)
    return None


def _find_ports(name: str, annotation: Any, fields: dict[str, Any] | None) -> tuple[Port, ...]:
    """Return a tensor for each field; none where one of them has no tensor."""
    found = [
        _create_port(field, kind)
        for field, kind in ({name: annotation} if fields is None else fields).items()
    ]
    return tuple(port for port in found if port is not None) if None not in found else ()


def _create_port(name: str, annotation: Any) -> Port | None:
    axes = 0
    while typing.get_origin(annotation) is list:
        (annotation,) = typing.get_args(annotation)
        axes += 1
    if annotation not in _SCALARS:
        return None
    datatype, dtype = _SCALARS[annotation]
    return Port(name, datatype, dtype, (-1,) * axes if axes else (1,), scalar=not axes)


def _only_element(name: str, arrays: Arrays) -> Any:
    """Return the element of a single tensor."""
    array = next(iter(arrays.values()))
    if len(arrays) != 1 or array.size != 1:
        raise PredictionException(f"The model takes one tensor of one element, {name}.", 400)
    return array.reshape(-1)[0]


def _to_python(value: Any) -> Any:
    """Return an array's values as JSON has them; bytes become text."""
    if isinstance(value, (np.ndarray, np.generic)):
        value = value.tolist()
    if isinstance(value, list):
        return [_to_python(item) for item in value]
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _name_json_type(value: Any) -> str:
    names = {dict: "a JSON object", list: "a JSON list", bool: "a JSON boolean", type(None): "null"}
    return names.get(type(value), "a JSON number")
