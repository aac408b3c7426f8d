"""An inference in the bytes of HTTP: its JSON document, and raw tensors behind it. Pure functions.

Source: the protocol's REST API, and its extension ``binary_tensor_data``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import orjson

from serve_app import tensors
from serve_app.doors.oip import convert
from serve_app.doors.oip.convert import Inference, Parameter, Wanted
from serve_app.errors import InvalidBody
from serve_app.signature import ANY, DATATYPES, Signature, short
from serve_app.tensors import Layout
from serve_app.types import Input, Reply

LENGTH = "inference-header-content-length"
_SHORT = 1024  # bytes of JSON in front of tensors that is remembered
_MOST = 1_000  # inputs, or outputs, of one request
_OBJECTS, _SCALARS = {dict}, {str, int, float, bool}


class _Head(NamedTuple):
    """The JSON of a request; an input is a layout where its data are so many bytes behind."""

    inputs: tuple[tuple[Input, None] | tuple[Layout, int], ...]
    outputs: tuple[Wanted, ...]
    id: str
    parameters: Mapping[str, Parameter]


def read(model: str, version: str | None, body: bytes, length: str | None) -> Inference:
    """The request in ``body``; ``length`` is the header of that name, the bytes of its JSON. Raises BadRequest."""
    size = len(body)
    if length is not None:
        if not length.isdecimal() or len(length) > 12 or int(length) > size:
            raise InvalidBody(
                f"Header Inference-Header-Content-Length is {short(length)}; it is the number of bytes of the JSON "
                f"in front of the tensors, and the body has {size}."
            )
        size = int(length)
    # What a client says in front of its tensors is the same from request to request.
    head = _known(body[:size]) if size < len(body) and size <= _SHORT else _read_head(body[:size])
    place = size
    inputs = []
    for given, behind in head.inputs:
        if behind is not None:
            left = len(body) - place
            if behind > left:
                raise InvalidBody(
                    f"The input {short(given.name)}: binary_data_size is {behind}, and {left} bytes are left behind "
                    "the JSON and the inputs before it."
                )
            data = body[place : place + behind]
            given.check(data)
            given = Input(given.name, data, given.content_type)
            place += behind
        inputs.append(given)
    if place != len(body):
        raise InvalidBody(f"{len(body) - place} bytes behind the JSON belong to no input: binary_data_size says whose.")
    return Inference(model, version, tuple(inputs), head.outputs, head.id, head.parameters)


def _read_head(text: bytes) -> _Head:
    said = document(text)
    inputs = tuple([_input(given) for given in _list(said, "inputs", required=True)])
    outputs = tuple([convert.wanted(_name(o, "output"), _parameters(o)) for o in _list(said, "outputs")])
    return _Head(inputs, outputs, _id(said), _parameters(said))


_known = lru_cache(maxsize=256)(_read_head)


def _input(given: dict[str, Any]) -> tuple[Input, None] | tuple[Layout, int]:
    name, datatype, shape = _name(given, "input"), given.get("datatype"), given.get("shape")
    behind = _parameters(given).get("binary_data_size")
    if behind is None:
        if "data" not in given:
            raise InvalidBody(f"The input {short(name)} has no data, and its parameters no binary_data_size.")
        return Input(*tensors.listed(name, datatype, shape, given["data"]).sent()), None
    if type(behind) is not int or behind < 0:
        raise InvalidBody(f"The input {short(name)}: binary_data_size is {short(behind)}; it is a number of bytes.")
    return tensors.layout(name, datatype, shape), behind


def raw(model: str, version: str | None, body: bytes, signature: Signature | None) -> Inference:
    """A request without JSON, whose body is the model's one input; its outputs go back raw. Raises InvalidBody."""
    if signature is None or len(signature.inputs) != 1:
        raise InvalidBody(
            "Inference-Header-Content-Length is 0, so the body is one raw tensor; that is for a model whose signature "
            "has exactly one input. Send the JSON that names the inputs."
        )
    [port] = signature.inputs
    if port.datatype == "BYTES":
        tensor = tensors.text(body, port.name)
    else:
        shape = list(port.shape or (ANY,))
        if shape.count(ANY) == 1:
            rest = DATATYPES[port.datatype]
            for axis in shape:
                rest *= 1 if axis == ANY else axis
            shape[shape.index(ANY)] = len(body) // rest if rest else 0
        tensor = tensors.raw(port.name, port.datatype, shape, body)
    return Inference(model, version, (Input(*tensor.sent()),), parameters={"binary_data_output": True})


def write(asked: Inference, model: str, reply: Reply) -> tuple[bytes, int | None]:
    """The answer's body; the bytes of its JSON where raw tensors follow, else None.

    Raises InvalidInput for an output that is not there, or has no form in JSON and was to have one; HandlerSaid where
    the handler answered with a status of its own.
    """
    everything = asked.parameters.get("binary_data_output") is True
    if everything and not asked.outputs and reply.content_type == tensors.PACKED and reply.status == 200:
        header, data = tensors.parted(reply.body)  # as it lies there: no tensor is taken out
        once = asked.id or len(header) >= tensors.SHORT
        head = (_describe if once else _described)(model, reply.version, asked.id, header)
        return b"".join((head, data)), len(head)
    outputs = convert.outputs(asked, reply)
    forms = [everything if one.binary is None else one.binary for one in asked.outputs] or [everything] * len(outputs)
    said, behind = [], []
    for tensor, binary in zip(outputs, forms):
        name, datatype, shape, data = tensor
        if binary:
            said.append(_behind(name, datatype, shape, len(data)))
            behind.append(data)
        else:
            said.append({"name": name, "datatype": datatype, "shape": shape, "data": orjson.Fragment(tensor.json())})
    head = _head(model, reply.version, asked.id, said)
    return b"".join((head, *behind)), len(head) if behind else None


def _head(model: str, version: str, id: str, outputs: list[dict[str, Any]]) -> bytes:
    answer: dict[str, Any] = {"model_name": model, "model_version": version}
    if id:
        answer["id"] = id
    answer["outputs"] = outputs
    return orjson.dumps(answer)


def _behind(name: str, datatype: str, shape: Sequence[int], size: int) -> dict[str, Any]:
    """An output whose data are so many bytes behind the JSON."""
    return {"name": name, "datatype": datatype, "shape": shape, "parameters": {"binary_data_size": size}}


def _describe(model: str, version: str, id: str, header: bytes) -> bytes:
    """The JSON in front of packed tensors that have this header."""
    return _head(model, version, id, [_behind(*one) for one in tensors.listing(header)])


_described = lru_cache(maxsize=1024)(_describe)  # a model's answers begin alike


def document(body: bytes) -> dict[str, Any]:
    """A JSON object; numbers that only Python's json knows, NaN among them, are read too. Raises InvalidBody."""
    try:
        said = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        try:
            said = json.loads(body)
        except (ValueError, RecursionError):
            raise InvalidBody(f"The body is not JSON: {error}.") from None
    if not isinstance(said, dict):
        raise InvalidBody(f"The body is {short(said)}; it is a JSON object.")
    return said


def _list(said: Mapping[str, Any], key: str, required: bool = False) -> list[dict[str, Any]]:
    given = said.get(key)
    if given is None and not required:
        return []
    if not isinstance(given, list) or not _OBJECTS.issuperset(map(type, given)):
        raise InvalidBody(f"{key} is {short(given)}; it is a list of objects.")
    if len(given) > _MOST:
        raise InvalidBody(f"There are {len(given)} {key}; a request has at most {_MOST}.")
    return given


def _name(given: Mapping[str, Any], what: str) -> str:
    name = given.get("name")
    if not isinstance(name, str) or not name:
        raise InvalidBody(f"An {what}'s name is {short(name)}; it is a text.")
    return name


def _id(said: Mapping[str, Any]) -> str:
    given = said.get("id")
    if given is not None and not isinstance(given, str):
        raise InvalidBody(f"id is {short(given)}; it is a text.")
    return given or ""


def _parameters(said: Mapping[str, Any]) -> Mapping[str, Parameter]:
    given = said.get("parameters")
    if given is None:
        return {}
    if not isinstance(given, dict) or not _SCALARS.issuperset(map(type, given.values())):
        raise InvalidBody(f"parameters is {short(given)}; it is an object of texts, numbers, true and false.")
    if "shared_memory_region" in given:
        raise InvalidBody("shared_memory_region: shared memory is not served; send the tensor's bytes.")
    return given
