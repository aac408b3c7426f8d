"""The HTTP encoding of inferences: a JSON document, and raw tensors after it. The functions are pure.

Source: the protocol's REST API, and its extension ``binary_tensor_data``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any, NamedTuple

import orjson
from typing_extensions import NotRequired, TypedDict

from handlers import json_text
from serve_app.domain import exact_json, tensors
from serve_app.domain.request import InferenceResponse, InputPart
from serve_app.domain.signature import ANY, DATATYPES, Signature, abbreviate
from serve_app.domain.tensors import TensorLayout
from serve_app.domain.validation import documented
from serve_app.errors import InvalidBody
from serve_app.protocols.http.exchange import InferenceHeaders
from serve_app.protocols.openinference import conversion
from serve_app.protocols.openinference.conversion import Parameter, ParsedInference, RequestedOutput
from serve_app.protocols.openinference.metadata import Count, Datatype

JSON_LENGTH_HEADER = "inference-header-content-length"
_MAX_CACHED_JSON = 1024  # bytes of the JSON before raw tensors
_MAX_ITEMS = 1_000  # inputs, or outputs, of a request
_OBJECT_TYPES, _SCALAR_TYPES = {dict}, {str, int, float, bool}


_Name = Annotated[str, documented(minLength=1)]
_Parameters = Annotated[dict[str, Parameter], documented("Parameters of the request, input or output.")]


_JSONLength = TypedDict(
    "_JSONLength",
    {
        "inference-header-content-length": Annotated[
            int,
            documented("Bytes of the JSON before tensors; 0: the body is the only input.", minimum=0),
        ]
    },
)


class TensorHeaders(InferenceHeaders, _JSONLength):
    """The headers of every inference request, and the size of the JSON."""


class TensorDocument(TypedDict):
    """A tensor; its elements follow the JSON as bytes where ``data`` is absent."""

    name: _Name
    datatype: Datatype
    shape: Annotated[Sequence[Count], documented(maxItems=32)]
    parameters: NotRequired[_Parameters]
    data: NotRequired[Annotated[Any, documented("The elements, flat or nested as in the shape.")]]


class OutputRequest(TypedDict):
    name: _Name
    parameters: NotRequired[_Parameters]


class InferRequest(TypedDict):
    id: NotRequired[str]
    parameters: NotRequired[_Parameters]
    inputs: Annotated[list[TensorDocument], documented(maxItems=_MAX_ITEMS)]
    outputs: NotRequired[Annotated[list[OutputRequest], documented("Default: all.", maxItems=_MAX_ITEMS)]]


class InferResponse(TypedDict):
    model_name: str
    model_version: str
    id: NotRequired[str]
    outputs: list[TensorDocument]


class _BinaryInput(NamedTuple):
    """An input whose ``size`` bytes follow the JSON."""

    layout: TensorLayout
    size: int


class _RequestHeader(NamedTuple):
    """The JSON of a request."""

    inputs: tuple[InputPart | _BinaryInput, ...]
    outputs: tuple[RequestedOutput, ...]
    id: str
    parameters: Mapping[str, Parameter]


def parse_request(model: str, version: str | None, body: bytes, json_length: str | None) -> ParsedInference:
    """Parse ``body``; ``json_length`` is the value of JSON_LENGTH_HEADER, or None without it.

    Raises BadRequest.
    """
    size = len(body)
    if json_length is not None:
        if not json_length.isdecimal() or len(json_length) > 12 or int(json_length) > size:
            raise InvalidBody(
                f"Header Inference-Header-Content-Length is {abbreviate(json_length)}; it is the number of "
                f"bytes of the JSON in front of the tensors, and the body has {size}."
            )
        size = int(json_length)
    # A client's JSON before its tensors is the same from request to request.
    is_cacheable = size < len(body) and size <= _MAX_CACHED_JSON
    header = _parse_cached_header(body[:size]) if is_cacheable else _parse_header(body[:size])
    position = size
    inputs = []
    for item in header.inputs:
        if isinstance(item, _BinaryInput):
            layout, size = item
            remaining = len(body) - position
            if size > remaining:
                raise InvalidBody(
                    f"The input {abbreviate(layout.name)}: binary_data_size is {size}, and {remaining} bytes "
                    "are left behind the JSON and the inputs before it."
                )
            data = body[position : position + size]
            layout.check(data)
            inputs.append(InputPart(layout.name, data, layout.content_type))
            position += size
        else:
            inputs.append(item)
    if position != len(body):
        raise InvalidBody(
            f"{len(body) - position} bytes behind the JSON belong to no input; set binary_data_size."
        )
    return ParsedInference(model, version, tuple(inputs), header.outputs, header.id, header.parameters)


def _parse_header(text: bytes) -> _RequestHeader:
    document = parse_json_object(text)
    inputs = tuple([_parse_input(item) for item in _parse_list(document, "inputs", required=True)])
    outputs = tuple(
        [
            conversion.parse_output(_parse_name(item, "output"), _parse_parameters(item))
            for item in _parse_list(document, "outputs")
        ]
    )
    return _RequestHeader(inputs, outputs, _parse_id(document), _parse_parameters(document))


_parse_cached_header = lru_cache(maxsize=256)(_parse_header)


def _parse_input(item: Mapping[str, Any]) -> InputPart | _BinaryInput:
    name, shape = _parse_name(item, "input"), item.get("shape")
    datatype: Any = item.get("datatype")  # checked by the tensor
    binary_size = _parse_parameters(item).get("binary_data_size")
    if binary_size is None:
        if "data" not in item:
            raise InvalidBody(
                f"The input {abbreviate(name)} has no data, and its parameters no binary_data_size."
            )
        return InputPart(*tensors.from_list(name, datatype, shape, item["data"]).to_part())
    if "data" in item:
        raise InvalidBody(
            f"The input {abbreviate(name)} has data, and its parameters binary_data_size; send one of them."
        )
    if type(binary_size) is not int or binary_size < 0:
        raise InvalidBody(
            f"The input {abbreviate(name)}: binary_data_size is {abbreviate(binary_size)}; "
            "it is a number of bytes."
        )
    return _BinaryInput(tensors.make_layout(name, datatype, shape), binary_size)


def parse_raw_request(
    model: str, version: str | None, body: bytes, signature: Signature | None
) -> ParsedInference:
    """Parse a request without JSON: the body is the model's only input, and its outputs return raw.

    Raises InvalidBody.
    """
    if signature is None or len(signature.inputs) != 1:
        raise InvalidBody(
            "Inference-Header-Content-Length is 0, so the body is one raw tensor; that is for a model whose "
            "signature has exactly one input. Send the JSON that names the inputs."
        )
    [port] = signature.inputs
    if port.datatype == "BYTES":
        tensor = tensors.from_text(body, port.name)
    else:
        shape = list(port.shape or (ANY,))
        if shape.count(ANY) == 1:
            known_size = DATATYPES[port.datatype]
            for axis in shape:
                known_size *= 1 if axis == ANY else axis
            shape[shape.index(ANY)] = len(body) // known_size if known_size else 0
        tensor = tensors.from_bytes(port.name, port.datatype, shape, body)
    return ParsedInference(
        model, version, (InputPart(*tensor.to_part()),), parameters={"binary_data_output": True}
    )


def encode_response(
    inference: ParsedInference, model: str, response: InferenceResponse, nullify: bool = True
) -> tuple[bytes, int | None]:
    """Return the body, and the size of its JSON if raw tensors follow, else None.

    ``nullify``: NaN and the infinities become null in JSON; otherwise they have no JSON form.
    Raises InvalidInput for an unknown output or one without a JSON form; HandlerRejected if the handler set
    an error status.
    """
    all_binary = inference.parameters.get("binary_data_output") is True
    is_packed = response.content_type == tensors.PACKED_MEDIA_TYPE and response.status == 200
    if all_binary and not inference.outputs and is_packed:
        tensor_header, data = tensors.split_header(response.body)  # sent as it is: no tensor is unpacked
        is_unique = inference.id or len(tensor_header) >= tensors.MAX_CACHED_HEADER
        encode = _encode_binary_header if is_unique else _encode_cached_binary_header
        header = encode(model, response.version, inference.id, tensor_header)
        return b"".join((header, data)), len(header)
    outputs = conversion.select_outputs(inference, response)
    binary_flags = [
        all_binary if requested.binary is None else requested.binary for requested in inference.outputs
    ] or [all_binary] * len(outputs)
    documents: list[TensorDocument] = []
    buffers = []
    for tensor, binary in zip(outputs, binary_flags):
        name, datatype, shape, data = tensor
        if binary:
            documents.append(_describe_binary_output(name, datatype, shape, len(data)))
            buffers.append(data)
        else:
            documents.append(
                {
                    "name": name,
                    "datatype": datatype,
                    "shape": shape,
                    "data": orjson.Fragment(tensor.to_json(nullify)),
                }
            )
    header = _encode_header(model, response.version, inference.id, documents)
    return b"".join((header, *buffers)), len(header) if buffers else None


def _encode_header(model: str, version: str, id: str, outputs: list[TensorDocument]) -> bytes:
    document: InferResponse = {"model_name": model, "model_version": version, "id": id, "outputs": outputs}
    if not id:
        del document["id"]
    return orjson.dumps(document)


def _describe_binary_output(name: str, datatype: str, shape: Sequence[int], size: int) -> TensorDocument:
    """Return the JSON of an output whose ``size`` bytes follow."""
    return {"name": name, "datatype": datatype, "shape": shape, "parameters": {"binary_data_size": size}}


def _encode_binary_header(model: str, version: str, id: str, tensor_header: bytes) -> bytes:
    """Return the JSON before packed tensors with this header."""
    outputs = [_describe_binary_output(*item) for item in tensors.parse_header(tensor_header)]
    return _encode_header(model, version, id, outputs)


# The responses of a model have the same JSON.
_encode_cached_binary_header = lru_cache(maxsize=1024)(_encode_binary_header)


def parse_json_object(body: bytes) -> dict[str, Any]:
    """Parse a JSON object, including the numbers that only Python's json accepts, such as NaN.

    Raises InvalidBody.
    """
    try:
        document = exact_json.loads(body)
    except orjson.JSONDecodeError as error:
        try:
            if exact_json.is_too_deep(error):
                raise ValueError from error
            document = json_text.loads(body)
            exact_json.check_texts(body, document)
        except (ValueError, RecursionError):
            raise InvalidBody(f"The body is not JSON: {error}.") from None
    if not isinstance(document, dict):
        raise InvalidBody(f"The body is {abbreviate(document)}; it is a JSON object.")
    return document


def _parse_list(document: Mapping[str, Any], key: str, required: bool = False) -> list[dict[str, Any]]:
    items = document.get(key)
    if items is None and not required:
        return []
    if not isinstance(items, list) or not _OBJECT_TYPES.issuperset(map(type, items)):
        raise InvalidBody(f"{key} is {abbreviate(items)}; it is a list of objects.")
    if len(items) > _MAX_ITEMS:
        raise InvalidBody(f"There are {len(items)} {key}; a request has at most {_MAX_ITEMS}.")
    return items


def _parse_name(item: Mapping[str, Any], kind: str) -> str:
    name = item.get("name")
    if not isinstance(name, str) or not name:
        raise InvalidBody(f"An {kind}'s name is {abbreviate(name)}; it is a text.")
    return name


def _parse_id(document: Mapping[str, Any]) -> str:
    id = document.get("id")
    if id is not None and not isinstance(id, str):
        raise InvalidBody(f"id is {abbreviate(id)}; it is a text.")
    return id or ""


def _parse_parameters(document: Mapping[str, Any]) -> Mapping[str, Parameter]:
    parameters = document.get("parameters")
    if parameters is None:
        return {}
    if isinstance(parameters, dict) and None in parameters.values():
        # MLServer's and pydantic's clients write fields without a value as null.
        parameters = {name: value for name, value in parameters.items() if value is not None}
    if not isinstance(parameters, dict) or not _SCALAR_TYPES.issuperset(map(type, parameters.values())):
        raise InvalidBody(
            f"parameters is {abbreviate(parameters)}; it is an object of texts, numbers, true and false."
        )
    if "shared_memory_region" in parameters:
        raise InvalidBody("shared_memory_region: shared memory is not served; send the tensor's bytes.")
    return parameters
