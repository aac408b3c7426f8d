"""Tensors by the Open Inference Protocol, as numpy arrays."""

from __future__ import annotations

from collections.abc import AsyncIterable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np

from serve_app.client._operations import Operation, StreamOperation
from serve_app.client.errors import ServerError
from serve_app.client.grpc import errors
from serve_app.client.grpc._operations import (
    GrpcFlow,
    GrpcRequestDescriptor,
    GrpcStreamDescriptor,
    RequestStream,
    to_document,
)
from serve_app.domain import tensors
from serve_app.proto import open_inference_grpc_pb2 as messages
from serve_app.proto.contents import CONTENTS
from serve_app.proto.open_inference_grpc_pb2_grpc import GRPCInferenceServiceStub as Stub

_PARAMETERS = ((bool, "bool_param"), (int, "int64_param"), (str, "string_param"))
_FINAL = "triton_final_response"
_ENABLE_FINAL = "triton_enable_empty_final_response"


@dataclass(frozen=True)
class InferOutputs:
    """A response of a stream to the request number ``request_index``, counted from 0, or a chunk of one.

    ``final``: it is the request's last one; where a handler streams, the last one has no ``arrays``.
    ``error`` is set where the request failed.
    """

    request_index: int
    arrays: dict[str, np.ndarray]
    final: bool
    error: ServerError | None = None


class GrpcOpenInferenceOperations:
    """The service ``inference.GRPCInferenceService``."""

    @Operation
    def infer(
        self,
        model: str,
        inputs: Mapping[str, Any],
        outputs: Sequence[str] = (),
        version: str | None = None,
        *,
        datatypes: Mapping[str, str] | None = None,
        parameters: Mapping[str, Any] | None = None,
        binary: bool = True,
        timeout: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> GrpcFlow[dict[str, np.ndarray]]:
        """Return a model's outputs by name, those in ``outputs`` or all.

        ``inputs`` are arrays, or values that numpy converts to arrays. ``datatypes`` are the protocol's names
        of their types where they differ from the arrays' own (``BF16``). BYTES are arrays of ``bytes``.
        Without ``binary`` the data is sent in typed contents. ``timeout`` is the call's deadline in seconds;
        ``headers`` are metadata.
        """
        message = _build_message(model, inputs, outputs, version, datatypes or {}, parameters or {}, binary)
        reply = yield GrpcRequestDescriptor(
            "inference",
            Stub,
            "ModelInfer",
            message,
            _lower_names(headers),
            ... if timeout is None else timeout,
        )
        return _arrays(reply.message)

    @StreamOperation
    def infer_stream(
        self,
        model: str,
        requests: Iterable[Mapping[str, Any]] | AsyncIterable[Mapping[str, Any]],
        outputs: Sequence[str] = (),
        version: str | None = None,
        *,
        datatypes: Mapping[str, str] | None = None,
        parameters: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> GrpcStreamDescriptor[InferOutputs]:
        """Send requests over one stream as ``requests`` yields them; yield the responses.

        A request is the ``inputs`` of ``infer``. A failed request yields a response with its ``error``, and
        the stream goes on. ``timeout`` limits the whole stream.
        """
        numbers = count()
        all_parameters = {**(parameters or {}), _ENABLE_FINAL: True}

        def build_message(inputs: Mapping[str, Any]) -> messages.ModelInferRequest:
            message = _build_message(model, inputs, outputs, version, datatypes or {}, all_parameters, True)
            message.id = str(next(numbers))
            return message

        stream = RequestStream(requests, build_message)
        request = GrpcRequestDescriptor(
            "inference", Stub, "ModelStreamInfer", stream, _lower_names(headers), timeout
        )
        return GrpcStreamDescriptor(request, _outputs)

    @Operation
    def model_ready(self, model: str, version: str | None = None) -> GrpcFlow[bool]:
        """Return whether a version is ready; without ``version``, the default one. Raises NotFoundError."""
        return bool((yield _model_request("ModelReady", model, version, retryable=False)).message.ready)

    @Operation
    def metadata(self, model: str, version: str | None = None) -> GrpcFlow[dict[str, Any]]:
        """Return a model's versions, and its inputs and outputs by name, datatype and shape."""
        return to_document((yield _model_request("ModelMetadata", model, version)).message)

    @Operation
    def config(self, model: str, version: str | None = None) -> GrpcFlow[dict[str, Any]]:
        """Return a model's configuration for Triton's clients: its inputs, outputs and batches."""
        return to_document((yield _model_request("ModelConfig", model, version)).message.config)

    @Operation
    def statistics(
        self, model: str | None = None, version: str | None = None
    ) -> GrpcFlow[list[dict[str, Any]]]:
        """Return the counters of each version of a model, or of all models."""
        reply = yield _model_request("ModelStatistics", model or "", version)
        statistics: list[dict[str, Any]] = to_document(reply.message)["model_stats"]
        return statistics

    @Operation
    def repository(self, ready: bool = False) -> GrpcFlow[list[dict[str, Any]]]:
        """Return every version of every model with its state; with ``ready``, only those that are ready."""
        message = messages.RepositoryIndexRequest(ready=ready)
        reply = yield GrpcRequestDescriptor("inference", Stub, "RepositoryIndex", message)
        models: list[dict[str, Any]] = to_document(reply.message)["models"]
        return models

    @Operation
    def load(self, /, model: str, **parameters: Any) -> GrpcFlow[None]:
        """Start a model, or register the archive of its name; ``parameters``: ``url`` and ``workers``."""
        message = messages.RepositoryModelLoadRequest(model_name=model)
        for name, value in parameters.items():
            _set_parameter(message.parameters[name], name, value)
        yield GrpcRequestDescriptor("inference", Stub, "RepositoryModelLoad", message, timeout=None)

    @Operation
    def unload(self, model: str) -> GrpcFlow[None]:
        """Stop a model's replicas; the model stays registered."""
        message = messages.RepositoryModelUnloadRequest(model_name=model)
        yield GrpcRequestDescriptor("inference", Stub, "RepositoryModelUnload", message, timeout=None)


def _model_request(
    method: str, model: str, version: str | None, retryable: bool = True
) -> GrpcRequestDescriptor:
    message_class = getattr(messages, f"{method}Request")
    message = message_class(name=model, version=version or "")
    return GrpcRequestDescriptor("inference", Stub, method, message, retryable=retryable)


def _lower_names(headers: Mapping[str, str] | None) -> dict[str, str]:
    return {name.lower(): value for name, value in (headers or {}).items()}


def _build_message(
    model: str,
    inputs: Mapping[str, Any],
    outputs: Sequence[str],
    version: str | None,
    datatypes: Mapping[str, str],
    parameters: Mapping[str, Any],
    binary: bool,
) -> messages.ModelInferRequest:
    message = messages.ModelInferRequest(model_name=model, model_version=version or "")
    for name, value in parameters.items():
        _set_parameter(message.parameters[name], name, value)
    for name, value in inputs.items():
        tensor = tensors.from_array(name, value, datatypes.get(name))
        model_input = message.inputs.add(name=name, datatype=tensor.datatype, shape=tensor.shape)
        if binary:
            message.raw_input_contents.append(bytes(tensor.data))
        elif tensor.datatype in CONTENTS:
            getattr(model_input.contents, CONTENTS[tensor.datatype]).extend(tensor.to_list())
        else:
            raise ValueError(f"{name} is {tensor.datatype}, which has no typed contents; send it binary.")
    for name in outputs:
        message.outputs.add(name=name)
    return message


def _set_parameter(parameter: Any, name: str, value: Any) -> None:
    field = next((field for kind, field in _PARAMETERS if isinstance(value, kind)), None)
    if field is None and isinstance(value, float) and "double_param" in parameter.DESCRIPTOR.fields_by_name:
        field = "double_param"
    if field is None:
        raise ValueError(
            f"The parameter {name} is {type(value).__name__}; gRPC supports bool, int, float and str."
        )
    setattr(parameter, field, value)


def _arrays(response: messages.ModelInferResponse) -> dict[str, np.ndarray]:
    raw, arrays = response.raw_output_contents, {}
    for index, output in enumerate(response.outputs):
        name, datatype, shape = output.name, output.datatype, tuple(output.shape)
        if raw:
            tensor = tensors.from_bytes(name, datatype, shape, raw[index])
        else:
            tensor = tensors.from_list(
                name, datatype, shape, list(getattr(output.contents, CONTENTS[datatype]))
            )
        arrays[name] = tensor.to_array()
    return arrays


def _outputs(message: messages.ModelStreamInferResponse) -> InferOutputs:
    response = message.infer_response
    request_index = int(response.id or 0)
    if message.error_message:
        metadata = {name: value.string_param for name, value in response.parameters.items()}
        return InferOutputs(
            request_index, {}, True, errors.from_status(None, message.error_message, metadata)
        )
    return InferOutputs(request_index, _arrays(response), response.parameters[_FINAL].bool_param)
