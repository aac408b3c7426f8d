"""What a step of a workflow hands to the next one: bytes with a content type, as a list, as JSON, as tensors.

An answer of tensors goes on as tensors to a model, and as plain values to a function: the bytes of one BYTES element,
else nested lists.
"""

from __future__ import annotations

import math
from typing import Any

import orjson

from handlers.parts import PARTS, join, split
from serve_app import tensors
from serve_app.errors import BadRequest, InvalidBody
from serve_app.tensors import PACKED, Tensor
from serve_app.types import Input

JSON = "application/json"
TEXT = "text/plain"
_TENSOR = "application/x-tensor;"  # how the content type of one tensor begins

Value = tuple[bytes, "str | None"]


def is_tensor(given: Input) -> bool:
    return (given.content_type or "").startswith(_TENSOR)


def unpacked(value: Value, alone: str) -> tuple[Input, ...]:
    """A whole answer as the inputs of a step: each of its tensors, or itself under the name ``alone``."""
    if value[1] == PACKED:
        return tuple(Input(*tensor.sent()) for tensor in tensors.unpack(value[0]))
    return (Input(alone, *value),)


def sole(value: Value, source: str) -> Value:
    """An answer as one value. Raises BadRequest for one of several tensors."""
    if value[1] != PACKED:
        return value
    found = tensors.unpack(value[0])
    if len(found) != 1:
        names = ", ".join(tensor.name for tensor in found) or "none"
        raise BadRequest(f"{source} gave {len(found)} tensors ({names}), and one is wanted; take all: inputs: {source}")
    return bytes(found[0].data), found[0].content_type


def plain(given: Input) -> Input:
    """An input as it is without tensors, also where it is a list of answers that are some."""
    if is_tensor(given):
        return Input(given.name, *_value(_tensor(given)))
    if given.content_type != PARTS:
        return given
    return Input(given.name, join(map(_without_tensors, items((given.value, PARTS), given.name))), PARTS)


def items(value: Value, source: str) -> list[Value]:
    """The items of a list; of a tensor its slices along the first axis. Raises BadRequest for what is no list."""
    body, content_type = value
    if content_type == PARTS:
        try:
            return list(split(body))
        except ValueError as error:
            raise InvalidBody(f"{source}: {error}.") from None
    if content_type is not None and content_type.startswith(_TENSOR):
        return _slices(tensors.received(source, body, content_type))
    found = _loaded(body)
    if not isinstance(found, list):
        raise BadRequest(f"it is asked for each item of {source}, which is no list.")
    return [(item.encode(), TEXT) if isinstance(item, str) else (orjson.dumps(item), JSON) for item in found]


def as_json(value: Value) -> Any:
    """A value as JSON can hold it. Raises ValueError for bytes that are neither JSON nor text."""
    body, content_type = value
    if content_type == PARTS:
        return [as_json(item) for item in split(body)]
    if content_type == PACKED:
        return {tensor.name: as_json(_value(tensor)) for tensor in tensors.unpack(body)}
    if not (content_type or "").startswith("text/"):
        try:
            return orjson.loads(body)
        except orjson.JSONDecodeError:
            pass
    return body.decode()


def _without_tensors(value: Value) -> Value:
    """Packed tensors as JSON, as far as that can hold them."""
    if value[1] != PACKED:
        return value
    try:
        return orjson.dumps(as_json(value)), JSON
    except ValueError:
        return value


def _tensor(given: Input) -> Tensor:
    return tensors.received(given.name, given.value, given.content_type or "")


def _value(tensor: Tensor) -> Value:
    if tensor.datatype != "BYTES":
        return orjson.dumps(tensor.array().tolist()), JSON
    found = tensors.elements(tensor)
    return (found[0], None) if len(found) == 1 else (join((element, None) for element in found), PARTS)


def _slices(tensor: Tensor) -> list[Value]:
    """Each with an axis of one in front, as a batch of one has."""
    if not tensor.shape:
        raise BadRequest(f"it is asked for each item of {tensor.name}, which is a tensor without axes.")
    count, *rest = tensor.shape
    if tensor.datatype == "BYTES":
        found, each = tensors.elements(tensor), math.prod(rest)
        bodies = [tensors.joined(found[i * each : (i + 1) * each]) for i in range(count)]
    else:
        size = len(tensor.data) // count if count else 0
        bodies = [bytes(tensor.data[i * size : (i + 1) * size]) for i in range(count)]
    return [(body, Tensor(tensor.name, tensor.datatype, (1, *rest), body).content_type) for body in bodies]


def _loaded(value: bytes) -> Any:
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError:
        return None
