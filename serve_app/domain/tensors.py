"""Named tensors as frozen values, and their three forms: raw bytes, JSON, numpy arrays.

Source: Open Inference Protocol, version 2, and its extension for binary tensors. Every size is checked before
anything of that size is made.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import orjson

from serve_app.domain.request import InputPart
from serve_app.domain.signature import ANY, DATATYPES, Signature, abbreviate
from serve_app.errors import InvalidInput

PACKED_MEDIA_TYPE = "application/x-tensors"  # the media type of ``pack``
DEFAULT_OUTPUT_NAME = "output-0"  # what an output is called that has no name
_MEDIA_TYPE = "application/x-tensor"
_MAX_AXES = 32
_MAX_BYTES = 2**63 - 1  # bytes that a shape may stand for
_BINARY_ONLY = ("FP16", "BF16")
_FLOATS = ("FP32", "FP64")
MAX_CACHED_HEADER = 512  # bytes of a header that is remembered
_MAX_COPIED_BYTES = 4096  # bytes up to which a copy takes less time than a view
_LENGTH = struct.Struct("<I")  # the length in front of an element of BYTES

_DTYPES = {
    "BOOL": np.dtype("?"),
    **{
        f"{kind}{8 * size}": np.dtype(f"<{kind[0].lower()}{size}")
        for kind in ("UINT", "INT")
        for size in (1, 2, 4, 8)
    },
    "FP16": np.dtype("<f2"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
# Those that JSON has, as the standard library's struct calls them: small tensors cost it a tenth of what
# numpy takes.
_STRUCT_CODES = {"BOOL": "?", "FP32": "f", "FP64": "d"}
_STRUCT_CODES |= {
    f"{kind}INT{8 << i}": codes[i] for kind, codes in (("", "bhiq"), ("U", "BHIQ")) for i in range(4)
}
# What the elements of a JSON list may be.
_JSON_TYPES: dict[str, set[type]] = {
    "BOOL": {bool},
    "BYTES": {str, bytes},
    "FP32": {int, float},
    "FP64": {int, float},
}
_INTEGERS: set[type] = {int}
_NUMBERS: set[type] = {int, float}

Buffer = bytes | bytearray | memoryview


class Tensor(NamedTuple):
    """A tensor; ``data`` has its elements, row-major and little-endian.

    An element of BYTES is its length in 4 bytes, followed by its bytes. ``from_bytes``, ``from_list`` and
    ``from_array`` create tensors whose data and shape agree.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: Buffer

    @property
    def content_type(self) -> str:
        """Datatype and shape."""
        return _media_type(self.datatype, self.shape)

    def to_part(self) -> tuple[str, bytes, str]:
        """Return name, bytes and content type for an InputPart; ``from_content_type`` is the inverse."""
        return self.name, bytes(self.data), self.content_type

    def to_array(self) -> np.ndarray:
        """Return a writable copy; BF16 as float32, BYTES as objects of ``bytes``."""
        if self.datatype == "BYTES":
            array = np.empty(math.prod(self.shape), np.object_)
            array[:] = decode_elements(self)
        elif self.datatype == "BF16":
            array = (np.frombuffer(self.data, "<u2").astype(np.uint32) << 16).view(np.float32)
        elif self.datatype == "BOOL":
            array = np.frombuffer(self.data, np.uint8) != 0
        else:
            array = np.frombuffer(bytearray(self.data), _DTYPES[self.datatype])
        return array.reshape(self.shape)

    def to_list(self) -> list[Any]:
        """Return the elements in one flat list; those of BYTES are ``bytes``."""
        return decode_elements(self) if self.datatype == "BYTES" else self.to_array().reshape(-1).tolist()

    def to_json(self, nullify: bool = True) -> bytes:
        """Return ``to_list`` as a JSON list, with text for BYTES; null replaces NaN and the infinities.

        Raises InvalidInput for data that JSON cannot hold, which without ``nullify`` includes them.
        """
        if self.datatype in _BINARY_ONLY:
            raise InvalidInput(f"The output {self.name} is {self.datatype}, {_SEND_AS_BINARY}")
        if self.datatype == "BYTES":
            try:
                return orjson.dumps([element.decode() for element in decode_elements(self)])
            except UnicodeDecodeError:
                raise InvalidInput(
                    f"The output {self.name} holds bytes that are no UTF-8, {_SEND_AS_BINARY}"
                ) from None
        boolean = self.datatype == "BOOL"
        array = (
            self.to_array().reshape(-1)
            if boolean
            else np.frombuffer(bytes(self.data), _DTYPES[self.datatype])
        )
        encoded = orjson.dumps(array, option=orjson.OPT_SERIALIZE_NUMPY)
        if not nullify and self.datatype in _FLOATS and b"n" in encoded:  # null: one that is not finite
            raise InvalidInput(f"The output {self.name} holds NaN or an infinity, {_SEND_AS_BINARY}")
        return encoded


class TensorLayout(NamedTuple):
    """A tensor without its data yet; ``size`` is its number of bytes, or of elements of BYTES."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    size: int
    content_type: str  # the tensor's

    def check(self, data: Buffer) -> None:
        """Raise InvalidInput unless the size of ``data`` matches datatype and shape."""
        if self.datatype == "BYTES":
            _check_elements(self.name, self.size, data)
        elif len(data) != self.size:
            raise InvalidInput(
                f"The input {self.name}, {self.datatype} {list(self.shape)}, requires {self.size} bytes, "
                f"and has {len(data)}."
            )


_SEND_AS_BINARY = "which has no form in JSON; ask for it as binary data (parameters.binary_data: true)."


def make_layout(name: str, datatype: Any, shape: Any) -> TensorLayout:
    """Return the layout of a tensor. Raises InvalidInput for a datatype or shape that is invalid."""
    size, shape = _checked_size(name, datatype, shape), tuple(shape)
    return TensorLayout(name, datatype, shape, size, _media_type(datatype, shape))


def from_bytes(name: str, datatype: str, shape: Any, data: Buffer) -> Tensor:
    """Return a tensor of raw bytes. Raises InvalidInput unless their number matches datatype and shape."""
    made = make_layout(name, datatype, shape)
    made.check(data)
    return Tensor(name, datatype, made.shape, data)


def from_list(name: str, datatype: str, shape: Any, data: Any) -> Tensor:
    """Return a tensor of Python values, flat or nested as its shape is; BYTES of ``str`` or ``bytes``.

    Raises InvalidInput.
    """
    size = _checked_size(name, datatype, shape)
    if datatype in _BINARY_ONLY:
        raise InvalidInput(
            f"The input {name}: {datatype} has no form in JSON; send it as "
            "binary data (parameters.binary_data_size)."
        )
    flat = _flatten(name, shape, data, size // max(1, DATATYPES[datatype]))
    plain = _JSON_TYPES.get(datatype, _INTEGERS)
    if plain is _INTEGERS and float in (types := set(map(type, flat))) and types <= _NUMBERS:
        # JSON has one type of numbers, and generated clients send 3 as 3.0.
        flat = [int(value) if type(value) is float and value.is_integer() else value for value in flat]
    if not plain.issuperset(map(type, flat)):
        wrong = next(value for value in flat if type(value) not in plain)
        raise InvalidInput(f"The input {name} is {datatype}, and {abbreviate(wrong)} in its data is none.")
    return Tensor(name, datatype, tuple(shape), _encode(name, datatype, flat))


def from_array(name: str, value: Any, datatype: str | None = None) -> Tensor:
    """Return a tensor of a numpy array, converted to ``datatype`` where that is given.

    Raises ValueError for an array that no datatype can represent.
    """
    array = np.asarray(value)
    known = _NAMES.get(array.dtype)
    if known is not None and datatype in (None, known):
        return Tensor(name, known, array.shape, array.tobytes())
    if datatype == "BF16" or array.dtype.name == "bfloat16":  # the latter is of a package beside numpy
        bits = _to_bfloat16(array.astype(np.float32, copy=False)) if array.dtype.name != "bfloat16" else array
        return Tensor(name, "BF16", array.shape, bits.tobytes())
    if array.dtype.kind in "OSU":
        if datatype not in (None, "BYTES"):
            raise ValueError(f"{name} holds no numbers, and is to be {datatype}")
        return Tensor(name, "BYTES", array.shape, encode_elements(map(_to_bytes, array.reshape(-1).tolist())))
    if datatype is None:
        datatype = _NAMES.get(array.dtype.newbyteorder("<"))
        if datatype is None:
            raise ValueError(f"{name} is an array of {array.dtype}, for which the protocol has no datatype")
    elif datatype == "BYTES" or not _can_convert(array, _DTYPES[datatype]):
        raise ValueError(f"{name} is an array of {array.dtype}, and is to be {datatype}")
    return Tensor(name, datatype, array.shape, array.astype(_DTYPES[datatype], copy=False).tobytes())


def from_text(value: bytes, name: str = DEFAULT_OUTPUT_NAME) -> Tensor:
    """Return one text, or one whole body, as a tensor of BYTES."""
    return Tensor(name, "BYTES", (1,), _LENGTH.pack(len(value)) + value)


def from_content_type(name: str, data: Buffer, content_type: str) -> Tensor:
    """Return the tensor that was sent as ``data`` under its ``content_type``."""
    return Tensor(name, *_parse_media_type(content_type), data)


def count_rows(inputs: Sequence[InputPart], signature: Signature | None) -> int:
    """Return the length of the first axis that all tensors of a request share.

    It is 1 where an input has no batch axis: by the signature, which has ANY there, or without a signature
    where it has fewer than two axes.
    """
    ports = signature.inputs if signature is not None else ()
    batched = {port.name: port.shape[0] == ANY for port in ports if port.shape}
    lengths = set()
    for part in inputs:
        _, shape = _parse_media_type(part.content_type or "")
        if not shape or not batched.get(part.name, len(shape) > 1):
            return 1
        lengths.add(shape[0])
    return lengths.pop() if len(lengths) == 1 else 1


@lru_cache(maxsize=1024)
def _media_type(datatype: str, shape: tuple[int, ...]) -> str:
    return f"{_MEDIA_TYPE};{datatype};{','.join(map(str, shape))}"


@lru_cache(maxsize=1024)
def _parse_media_type(content_type: str) -> tuple[str, tuple[int, ...]]:
    _, datatype, shape = content_type.split(";")
    return datatype, tuple(map(int, shape.split(","))) if shape else ()


def decode_elements(tensor: Tensor) -> list[bytes]:
    """Return the elements of a tensor of BYTES."""
    found = []
    data, place = tensor.data, 0
    while place < len(data):
        (length,) = _LENGTH.unpack_from(data, place)
        found.append(bytes(data[place + 4 : place + 4 + length]))
        place += 4 + length
    return found


def encode_elements(values: Iterable[bytes]) -> bytes:
    """Return the data of a tensor of BYTES with these elements."""
    return b"".join(chain.from_iterable((_LENGTH.pack(len(value)), value) for value in values))


def pack(tensors: Sequence[Tensor]) -> bytes:
    """Encode several tensors as one body: the length of a JSON header in 4 bytes, the header, and their
    data.
    """
    header = orjson.dumps([(name, datatype, shape, len(data)) for name, datatype, shape, data in tensors])
    return b"".join([_LENGTH.pack(len(header)), header, *[t.data for t in tensors]])


def unpack(body: Buffer) -> tuple[Tensor, ...]:
    """Decode the tensors of ``pack``; large data is not copied."""
    header, data = split_header(body)
    place = 0
    tensors = []
    for name, datatype, shape, size in parse_header(header):
        tensors.append(Tensor(name, datatype, shape, data[place : place + size]))
        place += size
    return tuple(tensors)


def split_header(body: Buffer) -> tuple[bytes, Buffer]:
    """Split a body of ``pack`` into its header, for ``parse_header``, and all data; large data is not
    copied.
    """
    place = 4 + int.from_bytes(body[:4], "little")
    view = memoryview(body) if len(body) > _MAX_COPIED_BYTES else body
    return bytes(view[4:place]), view[place:]


def parse_header(header: bytes) -> list[tuple[str, str, tuple[int, ...], int]]:
    """Return name, datatype, shape and number of bytes of each tensor in a header of ``pack``."""
    return _cached_header(header) if len(header) < MAX_CACHED_HEADER else _decode_header(header)


def _decode_header(header: bytes) -> list[tuple[str, str, tuple[int, ...], int]]:
    return [(name, datatype, tuple(shape), size) for name, datatype, shape, size in orjson.loads(header)]


_cached_header = lru_cache(maxsize=1024)(_decode_header)  # a model's answers begin alike


def _checked_size(name: str, datatype: Any, shape: Any) -> int:
    """Return the number of bytes of a tensor, or of elements of BYTES. Raises InvalidInput."""
    if not isinstance(datatype, str) or datatype not in DATATYPES:
        raise InvalidInput(
            f"The input {name}: datatype is {abbreviate(datatype)}; there are {', '.join(DATATYPES)}."
        )
    if (
        not isinstance(shape, (list, tuple))
        or not _INTEGERS.issuperset(map(type, shape))
        or min(shape, default=0) < 0
    ):
        raise InvalidInput(f"The input {name}: shape is {abbreviate(shape)}; it is a list of lengths from 0.")
    if len(shape) > _MAX_AXES:
        raise InvalidInput(f"The input {name} has {len(shape)} axes; a tensor has at most {_MAX_AXES}.")
    size = largest = DATATYPES[datatype] or 1
    for axis in shape:
        size *= axis
        largest *= axis or 1  # numpy multiplies so
        if largest > _MAX_BYTES:
            raise InvalidInput(
                f"The input {name}: no memory holds a tensor of the shape {abbreviate(shape)}."
            )
    return size


def _check_elements(name: str, wanted: int, data: Buffer) -> None:
    """Raise InvalidInput unless ``data`` has ``wanted`` elements of BYTES, each behind its length."""
    place = found = 0
    if 4 * wanted <= len(data):
        last = len(data) - 4
        while place <= last:
            place += 4 + _LENGTH.unpack_from(data, place)[0]
            found += 1
    if place != len(data) or found != wanted:
        raise InvalidInput(
            f"The input {name} is {wanted} elements of BYTES by its shape, each behind its length in 4 "
            f"bytes (little-endian), and its {len(data)} bytes are not these."
        )


def _flatten(name: str, shape: Sequence[int], data: Any, count: int) -> list[Any]:
    level = data if isinstance(data, list) else [data] if not shape else None
    if level is None:
        raise InvalidInput(
            f"The input {name}: data is {abbreviate(data)}; it is a list of the shape {list(shape)}, or flat."
        )
    if level and type(level[0]) is list:
        sound = len(shape) > 1 and len(level) == shape[0]
        for axis in shape[1:] if sound else ():
            if not all(type(part) is list and len(part) == axis for part in level):
                sound = False
                break
            level = list(chain.from_iterable(level))
        if not sound:
            raise InvalidInput(
                f"The input {name}: the nesting of its data differs from its shape {list(shape)}."
            )
    if len(level) != count:
        raise InvalidInput(
            f"The input {name}, of the shape {list(shape)}, has {count} elements, and {len(level)} came."
        )
    return level


def _encode(name: str, datatype: str, flat: list[Any]) -> bytes:
    if datatype == "BYTES":
        try:
            return encode_elements(map(_to_bytes, flat))
        except UnicodeEncodeError:  # half of a surrogate pair
            raise InvalidInput(f"The input {name} holds text that is no Unicode.") from None
    try:
        return struct.pack(f"<{len(flat)}{_STRUCT_CODES[datatype]}", *flat)
    except (struct.error, OverflowError):
        raise InvalidInput(f"The input {name} holds a number that {datatype} has no room for.") from None


def _can_convert(array: np.ndarray, wanted: np.dtype) -> bool:
    """Return whether a conversion to ``wanted`` loses nothing but digits."""
    if wanted.kind not in "iu" or array.dtype.kind not in "iu":
        return np.can_cast(array.dtype, wanted, "same_kind")
    limits = np.iinfo(wanted)
    return array.size == 0 or bool(limits.min <= array.min() and array.max() <= limits.max)


def _to_bytes(element: Any) -> bytes:
    if isinstance(element, str):
        return element.encode()
    if isinstance(element, (bytes, bytearray)):
        return bytes(element)
    raise ValueError(f"an element of BYTES is text or bytes, and one is {type(element).__name__}")


def _to_bfloat16(array: np.ndarray) -> np.ndarray:
    """Return the upper halves of float32 numbers, rounded to the nearest, ties to even."""
    bits = np.ascontiguousarray(array).reshape(-1).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    nan = (bits & 0x7FFFFFFF) > 0x7F800000  # rounding could make it an infinity
    return np.where(nan, (bits >> 16) | 0x40, rounded).astype("<u2")
