"""The values that steps of a workflow exchange: bytes with a content type, as a list, as JSON, or as tensors.

A response of tensors is passed to a model as tensors, and to a function as plain values: the bytes of one
BYTES element, else nested lists.
"""

from __future__ import annotations

import math
from typing import Any

import orjson

from handlers.multipart import PARTS_CONTENT_TYPE, join_parts, split_parts
from serve_app.domain import exact_json, tensors
from serve_app.domain.request import InputPart
from serve_app.domain.tensors import PACKED_MEDIA_TYPE, Tensor
from serve_app.errors import BadRequest, InvalidBody

JSON = "application/json"
TEXT = "text/plain"
_TENSOR = "application/x-tensor;"  # how the content type of one tensor begins

Value = tuple[bytes, "str | None"]


def is_tensor(given: InputPart) -> bool:
    return (given.content_type or "").startswith(_TENSOR)


def unpack_inputs(value: Value, alone: str) -> tuple[InputPart, ...]:
    """Return a whole response as the inputs of a step: each of its tensors, or itself under the name
    ``alone``.
    """
    if value[1] == PACKED_MEDIA_TYPE:
        return tuple(InputPart(*tensor.to_part()) for tensor in tensors.unpack(value[0]))
    return (InputPart(alone, *value),)


def single_value(value: Value, source: str) -> Value:
    """Return a response as one value. Raises BadRequest for several tensors."""
    if value[1] != PACKED_MEDIA_TYPE:
        return value
    found = tensors.unpack(value[0])
    if len(found) != 1:
        names = ", ".join(tensor.name for tensor in found) or "none"
        raise BadRequest(
            f"{source} gave {len(found)} tensors ({names}), and one is wanted; take all: inputs: {source}"
        )
    return bytes(found[0].data), found[0].content_type


def without_tensors(given: InputPart) -> InputPart:
    """Return an input without tensors, also where it is a list that contains some."""
    if is_tensor(given):
        return InputPart(given.name, *_value(_tensor(given)))
    if given.content_type != PARTS_CONTENT_TYPE:
        return given
    return InputPart(
        given.name,
        join_parts(map(_without_tensors, split_items((given.value, PARTS_CONTENT_TYPE), given.name))),
        PARTS_CONTENT_TYPE,
    )


def split_items(value: Value, source: str) -> list[Value]:
    """Return the items of a list; those of a tensor are its slices along the first axis.

    Raises BadRequest for a value that is not a list.
    """
    body, content_type = value
    if content_type == PARTS_CONTENT_TYPE:
        try:
            return list(split_parts(body))
        except ValueError as error:
            raise InvalidBody(f"{source}: {error}.") from None
    if content_type is not None and content_type.startswith(_TENSOR):
        return _slices(tensors.from_content_type(source, body, content_type))
    found = _loaded(body)
    if not isinstance(found, list):
        raise BadRequest(f"it runs once for each item of {source}, which is no list.")
    return [
        (item.encode(), TEXT) if isinstance(item, str) else (exact_json.dumps(item), JSON) for item in found
    ]


def to_json(value: Value) -> Any:
    """Return a value as JSON data. Raises ValueError for bytes that are neither JSON nor text."""
    body, content_type = value
    if content_type == PARTS_CONTENT_TYPE:
        return [to_json(item) for item in split_parts(body)]
    if content_type == PACKED_MEDIA_TYPE:
        return {tensor.name: to_json(_value(tensor)) for tensor in tensors.unpack(body)}
    if not (content_type or "").startswith("text/"):
        try:
            return exact_json.loads(body)
        except orjson.JSONDecodeError:
            pass
    return body.decode()


def _without_tensors(value: Value) -> Value:
    """Return packed tensors as JSON, where JSON can hold them."""
    if value[1] != PACKED_MEDIA_TYPE:
        return value
    try:
        return exact_json.dumps(to_json(value)), JSON
    except ValueError:
        return value


def _tensor(given: InputPart) -> Tensor:
    return tensors.from_content_type(given.name, given.value, given.content_type or "")


def _value(tensor: Tensor) -> Value:
    if tensor.datatype != "BYTES":
        return orjson.dumps(tensor.to_array().tolist()), JSON
    found = tensors.decode_elements(tensor)
    return (
        (found[0], None)
        if len(found) == 1
        else (join_parts((element, None) for element in found), PARTS_CONTENT_TYPE)
    )


def _slices(tensor: Tensor) -> list[Value]:
    """Return the slices of a tensor, each with a first axis of length one, as in a batch of one."""
    if not tensor.shape:
        raise BadRequest(f"it runs once for each item of {tensor.name}, which is a tensor without axes.")
    count, *rest = tensor.shape
    if tensor.datatype == "BYTES":
        found, each = tensors.decode_elements(tensor), math.prod(rest)
        bodies = [tensors.encode_elements(found[i * each : (i + 1) * each]) for i in range(count)]
    else:
        size = len(tensor.data) // count if count else 0
        bodies = [bytes(tensor.data[i * size : (i + 1) * size]) for i in range(count)]
    return [(body, Tensor(tensor.name, tensor.datatype, (1, *rest), body).content_type) for body in bodies]


def _loaded(value: bytes) -> Any:
    try:
        return exact_json.loads(value)
    except orjson.JSONDecodeError:
        return None
