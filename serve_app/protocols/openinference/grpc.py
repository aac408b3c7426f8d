"""The Open Inference Protocol over gRPC, with the extensions that Triton's clients use."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any

from google.protobuf import json_format
from grpc import RpcMethodHandler, StatusCode

from serve_app.control.api import ControlPlane
from serve_app.dataplane.data_plane import DataPlane
from serve_app.domain import tensors
from serve_app.domain.access import Right
from serve_app.domain.request import InferenceResponse, InputPart, ResponseStream
from serve_app.domain.routing_table import VersionRoute
from serve_app.domain.tensors import Tensor
from serve_app.errors import InvalidBody, MethodNotAllowed, QueueFull, VersionExists
from serve_app.proto import open_inference_grpc_pb2 as messages
from serve_app.proto.contents import CONTENTS
from serve_app.protocols.grpc.call import MAX_DETAILS, GrpcCall, ServiceAdapter, StatusMapping, UnaryMethod
from serve_app.protocols.grpc.status import StatusTable, from_http_status
from serve_app.protocols.http.sse import read_all
from serve_app.protocols.openinference import conversion, errors, metadata, repository
from serve_app.protocols.openinference.conversion import Parameter, ParsedInference
from serve_app.settings import Settings

SERVICE = "inference.GRPCInferenceService"

# The statuses of the protocol over HTTP, with these exceptions.
TABLE: StatusTable = {
    **{cls: from_http_status(status) for cls, status in errors.TABLE.items()},
    MethodNotAllowed: StatusCode.PERMISSION_DENIED,  # the model API is switched off
    VersionExists: StatusCode.ALREADY_EXISTS,
    QueueFull: StatusCode.RESOURCE_EXHAUSTED,
}
_FINAL = "triton_final_response"
_FINAL_REQUESTED = "triton_enable_empty_final_response"


class OpenInferenceService:
    """The service's twelve methods.

    Descriptions of models come from the routing table; changes to models go to ``control``.
    """

    def __init__(
        self, plane: DataPlane, control: ControlPlane, settings: Settings, adapter: ServiceAdapter
    ) -> None:
        self._plane = plane
        self._control = control
        self._runtime = settings.runtime
        self._details = details = OpenInferenceStatus(settings)
        mapping = StatusMapping(SERVICE, TABLE, details)

        def unary(name: str, method: UnaryMethod, *rights: Right) -> tuple[str, RpcMethodHandler]:
            message_class = getattr(messages, f"{name}Request")
            return name, adapter.unary(mapping, name, message_class, method, *rights)

        self.methods = dict(
            (
                unary("ServerLive", self._live),
                unary("ServerReady", self._ready),
                unary("ServerMetadata", self._server_metadata),
                unary("ModelInfer", self._infer, "infer"),
                unary("ModelReady", self._model_ready, "observe", "infer"),
                unary("ModelMetadata", self._model_metadata, "observe", "infer"),
                unary("ModelConfig", self._model_config, "observe", "infer"),
                unary("ModelStatistics", self._statistics, "observe", "infer"),
                unary("RepositoryIndex", self._repository_index, "observe", "infer"),
                unary("RepositoryModelLoad", self._load, "manage"),
                unary("RepositoryModelUnload", self._unload, "manage"),
            )
        )
        self.methods["ModelStreamInfer"] = adapter.stream(
            mapping,
            "ModelStreamInfer",
            messages.ModelInferRequest,
            self._stream,
            "infer",
            stream_requests=True,
        )

    async def _live(self, request: Any, call: GrpcCall) -> Any:
        return messages.ServerLiveResponse(live=True)

    async def _ready(self, request: Any, call: GrpcCall) -> Any:
        return messages.ServerReadyResponse(ready=self._plane.ready)

    async def _server_metadata(self, request: Any, call: GrpcCall) -> Any:
        return messages.ServerMetadataResponse(**metadata.describe_server())

    async def _model_ready(self, request: Any, call: GrpcCall) -> Any:
        return messages.ModelReadyResponse(ready=metadata.is_ready(self._find_version(request, call)))

    async def _model_metadata(self, request: Any, call: GrpcCall) -> Any:
        version = self._find_version(request, call)
        document = metadata.describe_model(request.name, self._plane.table.models[request.name], version)
        return json_format.ParseDict(document, messages.ModelMetadataResponse())

    async def _model_config(self, request: Any, call: GrpcCall) -> Any:
        document = {"config": metadata.describe_config(request.name, self._find_version(request, call))}
        return json_format.ParseDict(document, messages.ModelConfigResponse(), ignore_unknown_fields=True)

    def _find_version(self, request: Any, call: GrpcCall) -> VersionRoute:
        """Return the requested version. Raises ModelNotAllowed, ModelNotFound and VersionNotFound."""
        call.model, call.version = request.name, request.version
        call.check_model(request.name)
        return self._plane.describe(request.name, request.version or None)

    async def _statistics(self, request: Any, call: GrpcCall) -> Any:
        if request.name:
            self._find_version(request, call)
        stats = [
            version
            for version in await self._control.get_version_stats(call.allowed_models)
            if request.name in ("", version.model) and request.version in ("", version.version)
        ]
        return json_format.ParseDict(metadata.describe_statistics(stats), messages.ModelStatisticsResponse())

    async def _repository_index(self, request: Any, call: GrpcCall) -> Any:
        versions = metadata.list_versions(self._plane.table, call.allowed_models, request.ready)
        return json_format.ParseDict({"models": versions}, messages.RepositoryIndexResponse())

    async def _load(self, request: Any, call: GrpcCall) -> Any:
        call.model = request.model_name
        call.check_model(call.model)
        parameters = _parse_parameters(request.parameters)
        await repository.load(self._control, call.model, parameters, call.allowed_models)
        return messages.RepositoryModelLoadResponse()

    async def _unload(self, request: Any, call: GrpcCall) -> Any:
        call.model = request.model_name
        call.check_model(call.model)
        await repository.unload(self._control, call.model)
        return messages.RepositoryModelUnloadResponse()

    async def _infer(self, message: Any, call: GrpcCall) -> Any:
        inference = parse_request(message)
        response = await self._run_inference(inference, call)
        if isinstance(response, ResponseStream):
            body = await read_all(response, self._runtime.max_response_size)
            response = replace(response.head, body=body, content_type=None)
        return build_response(inference, response, bool(message.raw_input_contents))

    async def _stream(self, requests: AsyncIterator[Any], call: GrpcCall) -> None:
        """Answer the requests in order; an error answers its own request, and the stream continues.

        Each chunk that a handler streams is a response.
        """
        async for message in requests:
            call.start_next_request()
            try:
                call.renew_grant()
                await self._write_responses(message, call)
            except Exception as error:
                call.record_error(error)
                details = self._details(error, call)[:MAX_DETAILS]
                response = messages.ModelInferResponse(model_name=message.model_name, id=message.id)
                for name, value in call.trailers.items():
                    response.parameters[name].string_param = value
                await call.write(
                    messages.ModelStreamInferResponse(error_message=details, infer_response=response)
                )

    async def _write_responses(self, message: Any, call: GrpcCall) -> None:
        inference, raw = parse_request(message), bool(message.raw_input_contents)
        response = await self._run_inference(inference, call)
        if not isinstance(response, ResponseStream):
            return await call.write(_stream_message(build_response(inference, response, raw), final=True))
        try:
            async for chunk in response:
                chunk_response = replace(response.head, body=chunk, content_type=None)
                await call.write(_stream_message(build_response(inference, chunk_response, raw), final=False))
        finally:
            await response.aclose()
        if inference.parameters.get(_FINAL_REQUESTED) is True:
            final_message = messages.ModelInferResponse(
                model_name=inference.model, model_version=response.head.version, id=inference.id
            )
            await call.write(_stream_message(final_message, final=True))

    async def _run_inference(
        self, inference: ParsedInference, call: GrpcCall
    ) -> InferenceResponse | ResponseStream:
        call.model, call.version = inference.model, inference.version or ""
        call.check_model(inference.model)
        request = conversion.build_request(
            inference, call.request_id, call.headers, self._runtime, call.deadline, call.priority
        )
        response = await self._plane.infer(request, call.grant)
        call.record_response(response.head if isinstance(response, ResponseStream) else response)
        return response


class OpenInferenceStatus:
    """The details of a status: the text that is ``error`` over HTTP."""

    def __init__(self, settings: Settings) -> None:
        self._shown = settings.inference.handler_errors

    def __call__(self, error: Exception, call: GrpcCall) -> str:
        return errors.to_document(error, call.request_id, self._shown)["error"]


def parse_request(message: messages.ModelInferRequest) -> ParsedInference:
    """Parse an inference request. Raises InvalidBody and InvalidInput."""
    raw = message.raw_input_contents
    if raw and len(raw) != len(message.inputs):
        raise InvalidBody(
            f"raw_input_contents has {len(raw)} elements, and there are {len(message.inputs)} inputs; "
            "each has its own."
        )
    if raw:
        for tensor in message.inputs:
            if tensor.HasField("contents"):
                raise InvalidBody(
                    f"The input {tensor.name} has contents, and there are raw_input_contents; use one."
                )
        inputs = [
            tensors.from_bytes(t.name, t.datatype, tuple(t.shape), data)
            for t, data in zip(message.inputs, raw)
        ]
    else:
        inputs = [_parse_typed_tensor(tensor) for tensor in message.inputs]
    outputs = [
        conversion.parse_output(output.name, _parse_parameters(output.parameters))
        for output in message.outputs
    ]
    parameters = _parse_parameters(message.parameters)
    model, version = message.model_name, message.model_version or None
    parts = tuple([InputPart(*tensor.to_part()) for tensor in inputs])
    return ParsedInference(model, version, parts, tuple(outputs), message.id, parameters)


def build_response(
    inference: ParsedInference, response: InferenceResponse, raw: bool
) -> messages.ModelInferResponse:
    """Return the response message; it is raw with ``raw``, or if an output has no typed form."""
    outputs = conversion.select_outputs(inference, response)
    message = messages.ModelInferResponse(
        model_name=inference.model, model_version=response.version, id=inference.id
    )
    raw = raw or any(tensor.datatype not in CONTENTS for tensor in outputs)
    for tensor in outputs:
        output = message.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        if raw:
            message.raw_output_contents.append(bytes(tensor.data))
        else:
            getattr(output.contents, CONTENTS[tensor.datatype]).extend(tensor.to_list())
    return message


def _parse_typed_tensor(tensor: Any) -> Tensor:
    field_name = CONTENTS.get(tensor.datatype)
    if field_name is None and tensor.datatype in ("FP16", "BF16"):
        raise InvalidBody(
            f"The input {tensor.name}: {tensor.datatype} has no typed contents; send raw_input_contents."
        )
    others = [field.name for field, _ in tensor.contents.ListFields() if field.name != field_name]
    if field_name is not None and others:
        raise InvalidBody(
            f"The input {tensor.name} has {others[0]}; those of {tensor.datatype} are {field_name}."
        )
    values = list(getattr(tensor.contents, field_name)) if field_name is not None else []
    return tensors.from_list(tensor.name, tensor.datatype, tuple(tensor.shape), values)


def _parse_parameters(parameters: Mapping[str, Any]) -> dict[str, Parameter]:
    """Return the parameters that have a value."""
    choices = ((key, value, value.WhichOneof("parameter_choice")) for key, value in parameters.items())
    return {key: getattr(value, choice) for key, value, choice in choices if choice is not None}


def _stream_message(response: messages.ModelInferResponse, final: bool) -> messages.ModelStreamInferResponse:
    response.parameters[_FINAL].bool_param = final
    return messages.ModelStreamInferResponse(infer_response=response)
