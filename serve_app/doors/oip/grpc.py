"""The Open Inference Protocol by gRPC, with the extensions that Triton's clients ask for."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from typing import Any

from google.protobuf import json_format
from grpc import StatusCode

from serve_app import tensors
from serve_app.controlplane import ControlPlane
from serve_app.dataplane import DataPlane
from serve_app.doors.grpc.errors import Table, by_http_status
from serve_app.doors.grpc.rpc import LONGEST_DETAILS, Dialect, Port, Rpc
from serve_app.doors.oip import convert, errors, metadata, repository
from serve_app.doors.oip.convert import Inference, Parameter
from serve_app.doors.streaming import whole
from serve_app.errors import InvalidBody, MethodNotAllowed, QueueFull, VersionExists
from serve_app.proto import open_inference_grpc_pb2 as messages
from serve_app.proto.contents import CONTENTS
from serve_app.settings import Settings
from serve_app.tensors import Tensor
from serve_app.types import Input, Reply, ReplyStream, VersionRow

SERVICE = "inference.GRPCInferenceService"

# What the protocol answers over HTTP, but for these.
TABLE: Table = {
    **{cls: by_http_status(status) for cls, status in errors.TABLE.items()},
    MethodNotAllowed: StatusCode.PERMISSION_DENIED,  # the model API is switched off
    VersionExists: StatusCode.ALREADY_EXISTS,
    QueueFull: StatusCode.RESOURCE_EXHAUSTED,
}
_FINAL = "triton_final_response"
_WANTS_FINAL = "triton_enable_empty_final_response"


class OpenInferenceDoor:
    """Twelve methods. What is told of models comes from the routing table, what changes them goes to ``control``."""

    def __init__(self, plane: DataPlane, control: ControlPlane, settings: Settings, port: Port) -> None:
        self._plane = plane
        self._control = control
        self._runtime = settings.runtime
        self._words = words = Words(settings)
        dialect = Dialect(SERVICE, TABLE, words)
        told: dict[str, Callable[[Any, Rpc], Any]] = {
            "ModelReady": self._model_ready,
            "ModelMetadata": self._model_metadata,
            "ModelConfig": self._model_config,
            "ModelStatistics": self._statistics,
            "RepositoryIndex": self._index,
        }
        asked = messages.ModelInferRequest
        self.methods = {
            "ServerLive": port.unary(dialect, "ServerLive", messages.ServerLiveRequest, self._live),
            "ServerReady": port.unary(dialect, "ServerReady", messages.ServerReadyRequest, self._ready),
            "ServerMetadata": port.unary(dialect, "ServerMetadata", messages.ServerMetadataRequest, self._server),
            "ModelInfer": port.unary(dialect, "ModelInfer", asked, self._infer, "infer"),
            "ModelStreamInfer": port.stream(dialect, "ModelStreamInfer", asked, self._stream, "infer", many=True),
            **{
                name: port.unary(dialect, name, getattr(messages, f"{name}Request"), tell, "observe", "infer")
                for name, tell in told.items()
            },
            "RepositoryModelLoad": port.unary(
                dialect, "RepositoryModelLoad", messages.RepositoryModelLoadRequest, self._load, "manage"
            ),
            "RepositoryModelUnload": port.unary(
                dialect, "RepositoryModelUnload", messages.RepositoryModelUnloadRequest, self._unload, "manage"
            ),
        }

    async def _live(self, request: Any, rpc: Rpc) -> Any:
        return messages.ServerLiveResponse(live=True)

    async def _ready(self, request: Any, rpc: Rpc) -> Any:
        return messages.ServerReadyResponse(ready=self._plane.ready)

    async def _server(self, request: Any, rpc: Rpc) -> Any:
        return messages.ServerMetadataResponse(**metadata.server())

    async def _model_ready(self, request: Any, rpc: Rpc) -> Any:
        return messages.ModelReadyResponse(ready=metadata.ready(self._found(request, rpc)))

    async def _model_metadata(self, request: Any, rpc: Rpc) -> Any:
        found = self._found(request, rpc)
        said = metadata.model(request.name, self._plane.table.models[request.name], found)
        return json_format.ParseDict(said, messages.ModelMetadataResponse())

    async def _model_config(self, request: Any, rpc: Rpc) -> Any:
        said = {"config": metadata.config(request.name, self._found(request, rpc))}
        return json_format.ParseDict(said, messages.ModelConfigResponse(), ignore_unknown_fields=True)

    def _found(self, request: Any, rpc: Rpc) -> VersionRow:
        """The version that a request names. Raises WrongModel, ModelNotFound and VersionNotFound."""
        rpc.model, rpc.version = request.name, request.version
        rpc.cover(request.name)
        return self._plane.describe(request.name, request.version or None)

    async def _statistics(self, request: Any, rpc: Rpc) -> Any:
        if request.name:
            self._found(request, rpc)
        figures = [
            one
            for one in await self._control.figures(rpc.within)
            if request.name in ("", one.model) and request.version in ("", one.version)
        ]
        return json_format.ParseDict(metadata.statistics(figures), messages.ModelStatisticsResponse())

    async def _index(self, request: Any, rpc: Rpc) -> Any:
        said = {"models": metadata.index(self._plane.table, rpc.within, request.ready)}
        return json_format.ParseDict(said, messages.RepositoryIndexResponse())

    async def _load(self, request: Any, rpc: Rpc) -> Any:
        rpc.model = request.model_name
        rpc.cover(rpc.model)
        await repository.load(self._control, rpc.model, _parameters(request.parameters), rpc.within)
        return messages.RepositoryModelLoadResponse()

    async def _unload(self, request: Any, rpc: Rpc) -> Any:
        rpc.model = request.model_name
        rpc.cover(rpc.model)
        await repository.unload(self._control, rpc.model)
        return messages.RepositoryModelUnloadResponse()

    async def _infer(self, request: Any, rpc: Rpc) -> Any:
        asked = read(request)
        reply = await self._ask(asked, rpc)
        if isinstance(reply, ReplyStream):
            body = await whole(reply, self._runtime.max_response_size)
            reply = replace(reply.head, body=body, content_type=None)
        return write(asked, reply, bool(request.raw_input_contents))

    async def _stream(self, requests: AsyncIterator[Any], rpc: Rpc) -> None:
        """Request after request. An error answers its request, and the stream goes on.

        What a handler streams is a response for each piece.
        """
        async for request in requests:
            rpc.renew()
            try:
                await self._answer(request, rpc)
            except Exception as error:
                rpc.failed(error)
                said = self._words(error, rpc)[:LONGEST_DETAILS]
                about = messages.ModelInferResponse(model_name=request.model_name, id=request.id)
                for name, value in rpc.trailers.items():
                    about.parameters[name].string_param = value
                await rpc.write(messages.ModelStreamInferResponse(error_message=said, infer_response=about))

    async def _answer(self, request: Any, rpc: Rpc) -> None:
        asked, raw = read(request), bool(request.raw_input_contents)
        reply = await self._ask(asked, rpc)
        if not isinstance(reply, ReplyStream):
            return await rpc.write(_streamed(write(asked, reply, raw), final=True))
        try:
            async for piece in reply:
                part = replace(reply.head, body=piece, content_type=None)
                await rpc.write(_streamed(write(asked, part, raw), final=False))
        finally:
            await reply.aclose()
        if asked.parameters.get(_WANTS_FINAL) is True:
            end = messages.ModelInferResponse(model_name=asked.model, model_version=reply.head.version, id=asked.id)
            await rpc.write(_streamed(end, final=True))

    async def _ask(self, asked: Inference, rpc: Rpc) -> Reply | ReplyStream:
        rpc.model, rpc.version = asked.model, asked.version or ""
        rpc.cover(asked.model)
        call = convert.call(asked, rpc.request_id, rpc.headers, self._runtime, rpc.deadline, rpc.priority)
        reply = await self._plane.infer(call)
        rpc.answered(reply.head if isinstance(reply, ReplyStream) else reply)
        return reply


class Words:
    """What a status says: the text that is ``error`` over HTTP."""

    def __init__(self, settings: Settings) -> None:
        self._shown = settings.inference.handler_errors

    def __call__(self, error: Exception, rpc: Rpc) -> str:
        return errors.document(error, rpc.request_id, self._shown)["error"]


def read(request: messages.ModelInferRequest) -> Inference:
    """The inference that is asked for. Raises InvalidBody and InvalidInput."""
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise InvalidBody(
            f"raw_input_contents has {len(raw)} elements, and there are {len(request.inputs)} inputs; each has its own."
        )
    if raw:
        for tensor in request.inputs:
            if tensor.HasField("contents"):
                raise InvalidBody(f"The input {tensor.name} has contents, and there are raw_input_contents; use one.")
        inputs = [tensors.raw(t.name, t.datatype, tuple(t.shape), data) for t, data in zip(request.inputs, raw)]
    else:
        inputs = [_typed(tensor) for tensor in request.inputs]
    outputs = [convert.wanted(output.name, _parameters(output.parameters)) for output in request.outputs]
    parameters = _parameters(request.parameters)
    model, version = request.model_name, request.model_version or None
    given = tuple([Input(*tensor.sent()) for tensor in inputs])
    return Inference(model, version, given, tuple(outputs), request.id, parameters)


def write(asked: Inference, reply: Reply, raw: bool) -> messages.ModelInferResponse:
    """The answer, ``raw`` where the request was, or where an output has no other form."""
    outputs = convert.outputs(asked, reply)
    response = messages.ModelInferResponse(model_name=asked.model, model_version=reply.version, id=asked.id)
    raw = raw or any(tensor.datatype not in CONTENTS for tensor in outputs)
    for tensor in outputs:
        output = response.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        if raw:
            response.raw_output_contents.append(bytes(tensor.data))
        else:
            getattr(output.contents, CONTENTS[tensor.datatype]).extend(tensor.values())
    return response


def _typed(tensor: Any) -> Tensor:
    kind = CONTENTS.get(tensor.datatype)
    if kind is None and tensor.datatype in ("FP16", "BF16"):
        raise InvalidBody(f"The input {tensor.name}: {tensor.datatype} has no typed contents; send raw_input_contents.")
    others = [field.name for field, _ in tensor.contents.ListFields() if field.name != kind]
    if kind is not None and others:
        raise InvalidBody(f"The input {tensor.name} has {others[0]}; those of {tensor.datatype} are {kind}.")
    data = list(getattr(tensor.contents, kind)) if kind is not None else []
    return tensors.listed(tensor.name, tensor.datatype, tuple(tensor.shape), data)


def _parameters(said: Mapping[str, Any]) -> dict[str, Parameter]:
    """Those that have a value."""
    chosen = ((key, value, value.WhichOneof("parameter_choice")) for key, value in said.items())
    return {key: getattr(value, kind) for key, value, kind in chosen if kind is not None}


def _streamed(response: messages.ModelInferResponse, final: bool) -> messages.ModelStreamInferResponse:
    response.parameters[_FINAL].bool_param = final
    return messages.ModelStreamInferResponse(infer_response=response)
