"""Named tensors as frozen values, and their three forms: raw bytes, JSON, numpy arrays.

Source: Open Inference Protocol, version 2, and its extension for binary tensors. Every size is checked before
anything of that size is made.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import orjson

from serve_app.errors import InvalidInput
from serve_app.signature import DATATYPES, short

PACKED = "application/x-tensors"  # the media type of ``pack``
OUTPUT = "output-0"  # what an output is called that has no name
_MEDIA_TYPE = "application/x-tensor"
_AXES = 32
_LARGEST = 2**63 - 1  # bytes that a shape may stand for
_NO_JSON = ("FP16", "BF16")
_FLOATS = ("FP32", "FP64")
SHORT = 512  # bytes of a header that is remembered
_PAGE = 4096  # bytes up to which a copy takes less time than a view
_HEAD = struct.Struct("<I")  # the length in front of an element of BYTES

_DTYPES = {
    "BOOL": np.dtype("?"),
    **{f"{kind}{8 * size}": np.dtype(f"<{kind[0].lower()}{size}") for kind in ("UINT", "INT") for size in (1, 2, 4, 8)},
    "FP16": np.dtype("<f2"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
# Those that JSON has, as the standard library's struct calls them: small tensors cost it a tenth of what numpy takes.
_CODES = {"BOOL": "?", "FP32": "f", "FP64": "d"}
_CODES |= {f"{kind}INT{8 << i}": codes[i] for kind, codes in (("", "bhiq"), ("U", "BHIQ")) for i in range(4)}
# What the elements of a JSON list may be.
_PLAIN = {"BOOL": {bool}, "BYTES": {str, bytes}, "FP32": {int, float}, "FP64": {int, float}}
_INTEGERS = {int}

Buffer = bytes | bytearray | memoryview


class Tensor(NamedTuple):
    """``data``: row-major little-endian elements; one of BYTES is its length in 4 bytes, and then itself.

    Made by ``raw``, ``listed`` and ``of``, which see to it that data and shape agree.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: Buffer

    @property
    def content_type(self) -> str:
        """Datatype and shape."""
        return _media_type(self.datatype, self.shape)

    def sent(self) -> tuple[str, bytes, str]:
        """Name, bytes and content type, of which an input of a call is made; ``received`` is the way back."""
        return self.name, bytes(self.data), self.content_type

    def array(self) -> np.ndarray:
        """A copy that may be written to; BF16 as float32, BYTES as objects of ``bytes``."""
        if self.datatype == "BYTES":
            array = np.empty(math.prod(self.shape), np.object_)
            array[:] = elements(self)
        elif self.datatype == "BF16":
            array = (np.frombuffer(self.data, "<u2").astype(np.uint32) << 16).view(np.float32)
        elif self.datatype == "BOOL":
            array = np.frombuffer(self.data, np.uint8) != 0
        else:
            array = np.frombuffer(bytearray(self.data), _DTYPES[self.datatype])
        return array.reshape(self.shape)

    def values(self) -> list[Any]:
        """The elements in one flat list; those of BYTES are ``bytes``."""
        return elements(self) if self.datatype == "BYTES" else self.array().reshape(-1).tolist()

    def json(self) -> bytes:
        """``values`` as a JSON list, texts for BYTES.

        NaN and the infinities are written as Python's json does. Raises InvalidInput for what has no form in JSON.
        """
        if self.datatype in _NO_JSON:
            raise InvalidInput(f"The output {self.name} is {self.datatype}, {_BINARY}")
        if self.datatype == "BYTES":
            try:
                return orjson.dumps([element.decode() for element in elements(self)])
            except UnicodeDecodeError:
                raise InvalidInput(f"The output {self.name} holds bytes that are no UTF-8, {_BINARY}") from None
        boolean = self.datatype == "BOOL"
        array = self.array().reshape(-1) if boolean else np.frombuffer(bytes(self.data), _DTYPES[self.datatype])
        said = orjson.dumps(array, option=orjson.OPT_SERIALIZE_NUMPY)
        if self.datatype in _FLOATS and b"n" in said:  # null: one that is not finite
            return json.dumps(array.tolist()).encode()
        return said


class Layout(NamedTuple):
    """A tensor whose data is still to come; ``size`` is its bytes, or the elements of one of BYTES."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    size: int
    content_type: str  # the tensor's

    def check(self, data: Buffer) -> None:
        """Raises InvalidInput where these bytes are not as many as datatype and shape say."""
        if self.datatype == "BYTES":
            _count(self.name, self.size, data)
        elif len(data) != self.size:
            raise InvalidInput(
                f"The input {self.name}, {self.datatype} {list(self.shape)}, has {self.size} bytes as it says, and "
                f"{len(data)} came."
            )


_BINARY = "which has no form in JSON; ask for it as binary data (parameters.binary_data: true)."


def layout(name: str, datatype: Any, shape: Any) -> Layout:
    """A tensor whose data is still to come. Raises InvalidInput where no tensor is so."""
    size, shape = _size(name, datatype, shape), tuple(shape)
    return Layout(name, datatype, shape, size, _media_type(datatype, shape))


def raw(name: str, datatype: str, shape: Any, data: Buffer) -> Tensor:
    """A tensor of raw bytes. Raises InvalidInput where they are not as many as datatype and shape say."""
    made = layout(name, datatype, shape)
    made.check(data)
    return Tensor(name, datatype, made.shape, data)


def listed(name: str, datatype: str, shape: Any, data: Any) -> Tensor:
    """A tensor of Python values, flat or nested as its shape is; BYTES of ``str`` or ``bytes``. Raises InvalidInput."""
    size = _size(name, datatype, shape)
    if datatype in _NO_JSON:
        raise InvalidInput(
            f"The input {name}: {datatype} has no form in JSON; send it as binary data (parameters.binary_data_size)."
        )
    flat = _flat(name, shape, data, size // max(1, DATATYPES[datatype]))
    plain = _PLAIN.get(datatype, _INTEGERS)
    if not plain.issuperset(map(type, flat)):
        wrong = next(value for value in flat if type(value) not in plain)
        raise InvalidInput(f"The input {name} is {datatype}, and {short(wrong)} in its data is none.")
    return Tensor(name, datatype, tuple(shape), _encoded(name, datatype, flat))


def of(name: str, value: Any, datatype: str | None = None) -> Tensor:
    """A tensor of a numpy array, of ``datatype`` where that is given. ValueError for what no datatype stands for."""
    array = np.asarray(value)
    known = _NAMES.get(array.dtype)
    if known is not None and datatype in (None, known):
        return Tensor(name, known, array.shape, array.tobytes())
    if datatype == "BF16" or array.dtype.name == "bfloat16":  # the latter is of a package beside numpy
        bits = _bfloat16(array.astype(np.float32, copy=False)) if array.dtype.name != "bfloat16" else array
        return Tensor(name, "BF16", array.shape, bits.tobytes())
    if array.dtype.kind in "OSU":
        if datatype not in (None, "BYTES"):
            raise ValueError(f"{name} holds no numbers, and is to be {datatype}")
        return Tensor(name, "BYTES", array.shape, joined(map(_bytes, array.reshape(-1).tolist())))
    if datatype is None:
        datatype = _NAMES.get(array.dtype.newbyteorder("<"))
        if datatype is None:
            raise ValueError(f"{name} is an array of {array.dtype}, for which the protocol has no datatype")
    elif datatype == "BYTES" or not _becomes(array, _DTYPES[datatype]):
        raise ValueError(f"{name} is an array of {array.dtype}, and is to be {datatype}")
    return Tensor(name, datatype, array.shape, array.astype(_DTYPES[datatype], copy=False).tobytes())


def text(value: bytes, name: str = OUTPUT) -> Tensor:
    """One text, or one whole body, as a tensor of BYTES."""
    return Tensor(name, "BYTES", (1,), _HEAD.pack(len(value)) + value)


def received(name: str, data: Buffer, content_type: str) -> Tensor:
    """The tensor that was sent as ``data`` under its ``content_type``."""
    return Tensor(name, *_typed(content_type), data)


@lru_cache(maxsize=1024)
def _media_type(datatype: str, shape: tuple[int, ...]) -> str:
    return f"{_MEDIA_TYPE};{datatype};{','.join(map(str, shape))}"


@lru_cache(maxsize=1024)
def _typed(content_type: str) -> tuple[str, tuple[int, ...]]:
    _, datatype, shape = content_type.split(";")
    return datatype, tuple(map(int, shape.split(","))) if shape else ()


def elements(tensor: Tensor) -> list[bytes]:
    """The elements of a tensor of BYTES."""
    found = []
    data, place = tensor.data, 0
    while place < len(data):
        (length,) = _HEAD.unpack_from(data, place)
        found.append(bytes(data[place + 4 : place + 4 + length]))
        place += 4 + length
    return found


def joined(values: Iterable[bytes]) -> bytes:
    """The data of a tensor of BYTES that has these elements."""
    return b"".join(chain.from_iterable((_HEAD.pack(len(value)), value) for value in values))


def pack(tensors: Sequence[Tensor]) -> bytes:
    """Several tensors as one body: the length of a JSON header in 4 bytes, the header, and their data."""
    header = orjson.dumps([(name, datatype, shape, len(data)) for name, datatype, shape, data in tensors])
    return b"".join([_HEAD.pack(len(header)), header, *[t.data for t in tensors]])


def unpack(body: Buffer) -> tuple[Tensor, ...]:
    """What ``pack`` made, without a copy of data that are large."""
    header, data = parted(body)
    place = 0
    tensors = []
    for name, datatype, shape, size in listing(header):
        tensors.append(Tensor(name, datatype, shape, data[place : place + size]))
        place += size
    return tuple(tensors)


def parted(body: Buffer) -> tuple[bytes, Buffer]:
    """The header of what ``pack`` made, which ``listing`` reads, and all its data, not copied where they are large."""
    place = 4 + int.from_bytes(body[:4], "little")
    view = memoryview(body) if len(body) > _PAGE else body
    return bytes(view[4:place]), view[place:]


def listing(header: bytes) -> list[tuple[str, str, tuple[int, ...], int]]:
    """Name, datatype, shape and bytes of each tensor behind a header of ``pack``."""
    return _known(header) if len(header) < SHORT else _listing(header)


def _listing(header: bytes) -> list[tuple[str, str, tuple[int, ...], int]]:
    return [(name, datatype, tuple(shape), size) for name, datatype, shape, size in orjson.loads(header)]


_known = lru_cache(maxsize=1024)(_listing)  # a model's answers begin alike


def _size(name: str, datatype: Any, shape: Any) -> int:
    """The bytes that a tensor has, or the elements of one of BYTES. Raises InvalidInput."""
    if not isinstance(datatype, str) or datatype not in DATATYPES:
        raise InvalidInput(f"The input {name}: datatype is {short(datatype)}; there are {', '.join(DATATYPES)}.")
    if not isinstance(shape, (list, tuple)) or not _INTEGERS.issuperset(map(type, shape)) or min(shape, default=0) < 0:
        raise InvalidInput(f"The input {name}: shape is {short(shape)}; it is a list of lengths from 0.")
    if len(shape) > _AXES:
        raise InvalidInput(f"The input {name} has {len(shape)} axes; a tensor has at most {_AXES}.")
    size = largest = DATATYPES[datatype] or 1
    for axis in shape:
        size *= axis
        largest *= axis or 1  # numpy multiplies so
        if largest > _LARGEST:
            raise InvalidInput(f"The input {name}: no memory holds a tensor of the shape {short(shape)}.")
    return size


def _count(name: str, wanted: int, data: Buffer) -> None:
    """Raises InvalidInput where ``data`` are not ``wanted`` elements of BYTES, each behind its length."""
    place = found = 0
    if 4 * wanted <= len(data):
        last = len(data) - 4
        while place <= last:
            place += 4 + _HEAD.unpack_from(data, place)[0]
            found += 1
    if place != len(data) or found != wanted:
        raise InvalidInput(
            f"The input {name} is {wanted} elements of BYTES as its shape says, each behind its length in 4 bytes "
            f"(little-endian), and its {len(data)} bytes are not these."
        )


def _flat(name: str, shape: Sequence[int], data: Any, count: int) -> list[Any]:
    level = data if isinstance(data, list) else [data] if not shape else None
    if level is None:
        raise InvalidInput(
            f"The input {name}: data is {short(data)}; it is a list of the shape {list(shape)}, or flat."
        )
    if level and type(level[0]) is list:
        sound = len(shape) > 1 and len(level) == shape[0]
        for axis in shape[1:] if sound else ():
            if not all(type(part) is list and len(part) == axis for part in level):
                sound = False
                break
            level = list(chain.from_iterable(level))
        if not sound:
            raise InvalidInput(f"The input {name}: its data is not nested as its shape {list(shape)} says.")
    if len(level) != count:
        raise InvalidInput(
            f"The input {name}, of the shape {list(shape)}, has {count} elements, and {len(level)} came."
        )
    return level


def _encoded(name: str, datatype: str, flat: list[Any]) -> bytes:
    if datatype == "BYTES":
        try:
            return joined(map(_bytes, flat))
        except UnicodeEncodeError:  # half of a surrogate pair
            raise InvalidInput(f"The input {name} holds text that is no Unicode.") from None
    try:
        return struct.pack(f"<{len(flat)}{_CODES[datatype]}", *flat)
    except (struct.error, OverflowError):
        raise InvalidInput(f"The input {name} holds a number that {datatype} has no room for.") from None


def _becomes(array: np.ndarray, wanted: np.dtype) -> bool:
    """Whether nothing but digits is lost when it becomes ``wanted``."""
    if wanted.kind not in "iu" or array.dtype.kind not in "iu":
        return np.can_cast(array.dtype, wanted, "same_kind")
    limits = np.iinfo(wanted)
    return array.size == 0 or bool(limits.min <= array.min() and array.max() <= limits.max)


def _bytes(element: Any) -> bytes:
    if isinstance(element, str):
        return element.encode()
    if isinstance(element, (bytes, bytearray)):
        return bytes(element)
    raise ValueError(f"an element of BYTES is text or bytes, and one is {type(element).__name__}")


def _bfloat16(array: np.ndarray) -> np.ndarray:
    """The upper halves of float32 numbers, rounded to the nearest, and to the even of two that are as near."""
    bits = np.ascontiguousarray(array).reshape(-1).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    nan = (bits & 0x7FFFFFFF) > 0x7F800000  # rounding could make it an infinity
    return np.where(nan, (bits >> 16) | 0x40, rounded).astype("<u2")
