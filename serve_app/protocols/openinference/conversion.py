"""Conversion of the protocol's inferences to requests, and of responses to the protocol's outputs.

The functions are pure and independent of the transport.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from serve_app.domain import tensors
from serve_app.domain.request import InferenceRequest, InferenceResponse, InputPart, Priority
from serve_app.domain.signature import abbreviate
from serve_app.domain.tensors import Tensor
from serve_app.errors import HandlerRejected, InvalidBody, InvalidInput
from serve_app.settings import RuntimeSettings

Parameter = bool | int | float | str


@dataclass(frozen=True, slots=True)
class RequestedOutput:
    """An output that a request names.

    ``classes``: the number of highest values to return, or 0 for the tensor itself. ``binary`` applies to
    HTTP only; None means that the request does not set it for this output.
    """

    name: str
    classes: int = 0
    binary: bool | None = None


class ParsedInference(NamedTuple):
    """A parsed request with its inputs as an InferenceRequest holds them.

    Empty ``outputs`` request all of them. ``parameters`` are those of the request.
    """

    model: str
    version: str | None
    inputs: tuple[InputPart, ...]
    outputs: tuple[RequestedOutput, ...] = ()
    id: str = ""
    parameters: Mapping[str, Parameter] = MappingProxyType({})


def build_request(
    inference: ParsedInference,
    request_id: str,
    headers: Mapping[str, str],
    settings: RuntimeSettings,
    deadline: float | None = None,
    priority: Priority = "normal",
) -> InferenceRequest:
    """Return the request of an inference.

    The parameter ``timeout``, in microseconds, may shorten ``deadline``. The parameter ``priority`` overrides
    ``priority``: 1 is high, 2 normal, more is low, 0 has no effect. ``sequence_id``, ``sequence_start`` and
    ``sequence_end`` become TorchServe's headers. Raises InvalidBody.
    """
    parameters = inference.parameters
    inputs = inference.inputs
    if len(inputs) > 1 and len({part.name for part in inputs}) < len(inputs):
        names = [part.name for part in inputs]
        duplicate = next(name for name in names if names.count(name) > 1)
        raise InvalidBody(f"The input {abbreviate(duplicate)} is there twice; each name once.")
    if "timeout" in parameters and (timeout := _parse_number(parameters, "timeout")):
        timeout_at = time.time() + timeout / 1e6
        deadline = timeout_at if deadline is None else min(deadline, timeout_at)
    if "priority" in parameters and (level := _parse_number(parameters, "priority")):
        priority = "high" if level == 1 else "normal" if level == 2 else "low"
    request_headers = {**headers, "explain": "False"}
    if parameters and parameters.get("sequence_id") not in (None, 0, ""):
        request_headers[settings.header_key_sequence_id.lower()] = str(parameters["sequence_id"])
        for key, header in (
            ("sequence_start", settings.header_key_sequence_start),
            ("sequence_end", settings.header_key_sequence_end),
        ):
            if parameters.get(key) is True:
                request_headers[header.lower()] = "true"
    return InferenceRequest(
        inference.model,
        inference.version,
        inputs,
        request_headers,
        "tensors",
        request_id,
        deadline,
        priority,
    )


def build_rejection(response: InferenceResponse, message: str) -> HandlerRejected:
    """Return the error of a response with a status of the handler's own, with its version and arm."""
    error = HandlerRejected(message, response.status)
    error.selected_version, error.arm = response.version, response.arm
    return error


def select_outputs(inference: ParsedInference, response: InferenceResponse) -> Sequence[Tensor]:
    """Return the requested outputs of a response in the order of the request.

    Raises InvalidInput for an unknown output, and HandlerRejected if the handler set an error status.
    """
    if not 200 <= response.status < 300:
        raise build_rejection(response, response.body.decode("utf-8", "replace"))
    outputs = (
        tensors.unpack(response.body)
        if response.content_type == tensors.PACKED_MEDIA_TYPE
        else (tensors.from_text(response.body),)
    )
    if not inference.outputs:
        return outputs
    outputs_by_name = {tensor.name: tensor for tensor in outputs}
    selected = []
    for requested in inference.outputs:
        tensor = outputs_by_name.get(requested.name)
        if tensor is None:
            raise InvalidInput(
                f"There is no output {abbreviate(requested.name)}; "
                f"the model gives {', '.join(outputs_by_name)}."
            )
        selected.append(select_classes(tensor, requested.classes) if requested.classes else tensor)
    return selected


def parse_output(name: str, parameters: Mapping[str, Any]) -> RequestedOutput:
    """Parse an output of a request. Raises InvalidBody."""
    classes, binary = parameters.get("classification"), parameters.get("binary_data")
    if classes is not None and (type(classes) is not int or classes < 1):
        raise InvalidBody(
            f"The output {abbreviate(name)}: classification is {abbreviate(classes)}; it is a number from 1."
        )
    if binary is not None and type(binary) is not bool:
        raise InvalidBody(
            f"The output {abbreviate(name)}: binary_data is {abbreviate(binary)}; it is true or false."
        )
    return RequestedOutput(name, classes or 0, binary)


def select_classes(tensor: Tensor, count: int) -> Tensor:
    """Return the ``count`` highest values along the last axis, each as BYTES ``value:index``.

    Raises InvalidInput.
    """
    if tensor.datatype in ("BYTES", "BOOL") or not tensor.shape:
        raise InvalidInput(
            f"The output {tensor.name} is {tensor.datatype} {list(tensor.shape)}, which holds no classes."
        )
    array = tensor.to_array()
    best = np.argsort(-array.astype(np.float64), axis=-1, kind="stable")[..., :count]
    values = np.take_along_axis(array, best, axis=-1)
    pairs = zip(values.reshape(-1).tolist(), best.reshape(-1).tolist())
    return Tensor(
        tensor.name, "BYTES", best.shape, tensors.encode_elements(f"{v:f}:{i}".encode() for v, i in pairs)
    )


def _parse_number(parameters: Mapping[str, Any], key: str) -> int:
    """Return a parameter that is a number or its text, or 0 without it. Raises InvalidBody."""
    value = parameters.get(key, 0)
    if isinstance(value, str) and value.isdecimal() and len(value) < 20:
        value = int(value)
    if type(value) is not int or value < 0:
        raise InvalidBody(f"The parameter {key} is {abbreviate(value)}; it is a whole number from 0.")
    return value
