"""TorchServe's gRPC APIs: inference over the data plane, management over the control plane."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from google.protobuf.empty_pb2 import Empty
from google.rpc.error_details_pb2 import ErrorInfo
from grpc import StatusCode

from serve_app.control.api import ControlPlane
from serve_app.dataplane.data_plane import DataPlane
from serve_app.domain.access import Right
from serve_app.domain.model import Registration
from serve_app.domain.request import InferenceRequest, InferenceResponse, InputPart, ResponseStream
from serve_app.errors import (
    AccessDenied,
    CannotRemoveDefault,
    ClientTimeout,
    InProgress,
    MethodNotAllowed,
    MissingParameter,
    ModelLoading,
    ModelNotFound,
    NoReplica,
    QueueFull,
    StartFailed,
    VersionExists,
    VersionNotFound,
    get_reason,
)
from serve_app.proto import inference_pb2 as inference
from serve_app.proto import management_pb2 as management
from serve_app.protocols.grpc.call import MAX_DETAILS, GrpcCall, ServiceAdapter, StatusMapping, UnaryMethod
from serve_app.protocols.grpc.status import StatusTable, find_status_code, from_http_status
from serve_app.protocols.http import json_errors
from serve_app.protocols.http.sse import read_all
from serve_app.protocols.torchserve.descriptions import (
    MAX_PAGE_SIZE,
    NoReplicaToDescribe,
    describe_registration,
    describe_scaling,
    describe_version,
    list_models,
)
from serve_app.protocols.torchserve.inference import LATE_RESPONSE_HOLD_S
from serve_app.protocols.torchserve.parameters import COUNT_PARAMETERS
from serve_app.settings import Settings

Write = Callable[[inference.PredictionResponse], Awaitable[None]]
ManagementMethod = Callable[[Any, GrpcCall], Awaitable[str]]  # returns the message of the response

_MAX_CONCURRENT_REQUESTS = 32  # of one stream; the next is read when one of them is answered

INFERENCE = "org.pytorch.serve.grpc.inference.InferenceAPIsService"
MANAGEMENT = "org.pytorch.serve.grpc.management.ManagementAPIsService"

# The statuses of the HTTP API, translated as TorchServe does, with these exceptions.
_TABLE: StatusTable = {
    **{cls: from_http_status(status) for cls, (status, _) in json_errors.TABLE.items()},
    AccessDenied: StatusCode.PERMISSION_DENIED,
    MethodNotAllowed: StatusCode.PERMISSION_DENIED,  # the model API is disabled
    InProgress: StatusCode.UNAVAILABLE,
}
INFERENCE_TABLE: StatusTable = {
    **_TABLE,
    MissingParameter: StatusCode.INTERNAL,
    ModelNotFound: StatusCode.INTERNAL,
    VersionNotFound: StatusCode.INTERNAL,
    NoReplica: StatusCode.INTERNAL,
    QueueFull: StatusCode.INTERNAL,
    ModelLoading: StatusCode.INTERNAL,
}
MANAGEMENT_TABLE: StatusTable = {
    **_TABLE,
    CannotRemoveDefault: StatusCode.UNKNOWN,
    VersionExists: StatusCode.UNKNOWN,
}


class InferenceService:
    """TorchServe's inference service, with four methods.

    The parts of a request are the entries of ``input``, as bytes or of the type that ``x-content-type``
    names. The call's metadata are the request's headers.
    """

    def __init__(self, plane: DataPlane, settings: Settings, port: ServiceAdapter) -> None:
        self._plane = plane
        self._runtime = settings.runtime
        self._drops_late_responses = settings.inference.late_response == "drop"
        self._dialect = d = StatusMapping(INFERENCE, INFERENCE_TABLE, TorchServeStatus(settings))
        message_type = inference.PredictionsRequest
        self.methods = {
            "Ping": port.unary(d, "Ping", Empty, self._ping),
            "Predictions": port.unary(d, "Predictions", message_type, self._predict, "infer"),
            "StreamPredictions": port.stream(d, "StreamPredictions", message_type, self._stream, "infer"),
            "StreamPredictions2": port.stream(
                d, "StreamPredictions2", message_type, self._sequence, "infer", stream_requests=True
            ),
        }

    async def _ping(self, request: Any, rpc: GrpcCall) -> inference.TorchServeHealthResponse:
        status = "Healthy" if self._plane.healthy else "Unhealthy"
        return inference.TorchServeHealthResponse(health=json_errors.encode_json({"status": status}).decode())

    async def _predict(
        self, request: inference.PredictionsRequest, rpc: GrpcCall
    ) -> inference.PredictionResponse:
        response = await self._infer(self._to_request(request, rpc), rpc)
        if isinstance(response, ResponseStream):
            body = await read_all(response, self._runtime.max_response_size)
            sequence_id = self._sequence_id(response.head)
        else:
            body, sequence_id = response.body, self._sequence_id(response)
        return inference.PredictionResponse(prediction=body, sequence_id=sequence_id)

    async def _stream(self, request: inference.PredictionsRequest, rpc: GrpcCall) -> None:
        await self._write_chunks(await self._infer(self._to_request(request, rpc), rpc), rpc.write)

    async def _sequence(self, requests: AsyncIterator[inference.PredictionsRequest], rpc: GrpcCall) -> None:
        """Process a stream of requests: each starts on arrival, also while earlier responses are streamed.

        An error is the response to its own request, and the stream continues.
        """
        slots, write_lock = asyncio.Semaphore(_MAX_CONCURRENT_REQUESTS), asyncio.Lock()
        tasks: set[asyncio.Task[None]] = set()

        async def write(message: inference.PredictionResponse) -> None:
            async with write_lock:
                await rpc.write(message)

        def discard(task: asyncio.Task[None]) -> None:
            tasks.discard(task)
            if not task.cancelled():
                task.exception()  # retrieved, because a client that disconnected cannot receive it

        async def process(request: inference.PredictionsRequest) -> None:
            try:
                await self._process_one(request, rpc, write)
            finally:
                slots.release()

        try:
            async for request in requests:
                await slots.acquire()
                task = asyncio.create_task(process(request))
                tasks.add(task)
                task.add_done_callback(discard)
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _process_one(self, request: inference.PredictionsRequest, rpc: GrpcCall, write: Write) -> None:
        sequence_id = request.sequence_id
        request_id = rpc.start_next_request()  # later requests of the stream have others
        try:
            rpc.renew_grant()
            if not sequence_id and not self._is_true(request, self._runtime.header_key_sequence_start):
                raise MissingParameter("sequenceId")
            await self._write_chunks(
                await self._infer(self._to_request(request, rpc), rpc), write, sequence_id
            )
        except Exception as error:
            rpc.record_error(error)
            await write(self._error_message(sequence_id, error, rpc, request_id))

    def _to_request(self, request: inference.PredictionsRequest, rpc: GrpcCall) -> InferenceRequest:
        if not request.model_name:
            raise MissingParameter("model_name")
        content_type = rpc.headers.get("x-content-type")
        inputs = tuple([InputPart(name, value, content_type) for name, value in request.input.items()])
        return rpc.build_request(
            request.model_name, request.model_version, inputs, self._sequence_headers(request)
        )

    def _sequence_headers(self, request: inference.PredictionsRequest) -> dict[str, str]:
        """Return the sequence headers that the same request over HTTP has."""
        names = self._runtime
        headers = {names.header_key_sequence_id.lower(): request.sequence_id} if request.sequence_id else {}
        for name in (names.header_key_sequence_start, names.header_key_sequence_end):
            if self._is_true(request, name):
                headers[name.lower()] = "true"
        return headers

    def _is_true(self, request: inference.PredictionsRequest, name: str) -> bool:
        value = request.input.get(name)
        return value is not None and value.lower() == b"true"

    def _sequence_id(self, response: InferenceResponse) -> str | None:
        """Return the id of the sequence that a response belongs to, where its headers have one."""
        if not response.headers:
            return None
        key = self._runtime.header_key_sequence_id.lower()
        return next((value for name, value in response.headers if name.lower() == key), None)

    async def _infer(self, request: InferenceRequest, rpc: GrpcCall) -> InferenceResponse | ResponseStream:
        try:
            response = await self._plane.infer(request, rpc.grant)
        except ClientTimeout:
            if self._drops_late_responses:
                await asyncio.sleep(LATE_RESPONSE_HOLD_S)
            raise
        rpc.record_response(response.head if isinstance(response, ResponseStream) else response)
        return response

    async def _write_chunks(
        self, response: InferenceResponse | ResponseStream, write: Write, sequence_id: str | None = None
    ) -> None:
        """Write each chunk as a message; a ``sequence_id`` of the client overrides the response's."""
        if not isinstance(response, ResponseStream):
            sequence_id = sequence_id or self._sequence_id(response)
            return await write(
                inference.PredictionResponse(prediction=response.body, sequence_id=sequence_id)
            )
        sequence_id = sequence_id or self._sequence_id(response.head)
        try:
            async for chunk in response:
                await write(inference.PredictionResponse(prediction=chunk, sequence_id=sequence_id))
        finally:
            await response.aclose()

    def _error_message(
        self, sequence_id: str, error: Exception, rpc: GrpcCall, request_id: str
    ) -> inference.PredictionResponse:
        """Return an error as one message of a stream; its details hold what trailing metadata would."""
        message = inference.PredictionResponse(sequence_id=sequence_id)
        status = message.status
        status.code = find_status_code(error, self._dialect.table).value[0]
        status.message = self._dialect.details(error, rpc)[:MAX_DETAILS]
        metadata = {**rpc.trailers, "x-request-id": request_id}
        status.details.add().Pack(ErrorInfo(reason=get_reason(error), domain="torchrelay", metadata=metadata))
        return message


class ManagementService:
    """TorchServe's management service: six methods, with the sentences and the JSON of the REST API."""

    def __init__(self, control: ControlPlane, settings: Settings, port: ServiceAdapter) -> None:
        self._control = control
        dialect = StatusMapping(MANAGEMENT, MANAGEMENT_TABLE, TorchServeStatus(settings))
        methods: dict[str, tuple[Any, ManagementMethod, Right]] = {
            "DescribeModel": (management.DescribeModelRequest, self._describe, "observe"),
            "ListModels": (management.ListModelsRequest, self._list, "observe"),
            "RegisterModel": (management.RegisterModelRequest, self._register, "manage"),
            "ScaleWorker": (management.ScaleWorkerRequest, self._scale, "manage"),
            "SetDefault": (management.SetDefaultRequest, self._set_default, "manage"),
            "UnregisterModel": (management.UnregisterModelRequest, self._unregister, "manage"),
        }
        self.methods = {
            name: port.unary(dialect, name, message_type, _wrap(method), right)
            for name, (message_type, method, right) in methods.items()
        }

    async def _describe(self, request: management.DescribeModelRequest, rpc: GrpcCall) -> str:
        model, version = _model_and_version(request, rpc)
        every = version == "all"
        try:
            descriptions = await self._control.describe(
                model, None if every else version, every, customized=request.customized and not every
            )
        except NoReplica:
            raise NoReplicaToDescribe(model) from None
        return json_errors.encode_json(
            [describe_version(description) for description in descriptions]
        ).decode()

    async def _list(self, request: management.ListModelsRequest, rpc: GrpcCall) -> str:
        limit = request.limit or MAX_PAGE_SIZE
        document = await list_models(self._control, limit, request.next_page_token, rpc.allowed_models)
        return json_errors.encode_json(document).decode()

    async def _register(self, request: management.RegisterModelRequest, rpc: GrpcCall) -> str:
        texts: dict[str, Any] = {
            key: getattr(request, key) or None for key in ("model_name", "handler", "runtime")
        }
        counts: dict[str, Any] = {key: _positive(getattr(request, key)) for key in COUNT_PARAMETERS}
        registration = Registration(
            request.url,
            **texts,
            **counts,
            wait=request.synchronous,
            allowed_models=rpc.allowed_models,
            s3_sse_kms=request.s3_sse_kms,
            sha256=request.sha256 or None,
            trusted=request.trusted,
        )
        return describe_registration(await self._control.register(registration))[1]

    async def _scale(self, request: management.ScaleWorkerRequest, rpc: GrpcCall) -> str:
        model, version = _model_and_version(request, rpc)
        min_workers = _positive(request.min_worker) or 1
        max_workers = _positive(request.max_worker)
        try:
            progress = await self._control.scale(
                model, version, min_workers, max_workers, request.synchronous
            )
        except StartFailed as error:
            if version is None:  # TorchServe names the version only where the request does
                raise type(error)(model, "null", error.detail) from None
            raise
        return describe_scaling(progress, min_workers, version is not None)[1]

    async def _set_default(self, request: management.SetDefaultRequest, rpc: GrpcCall) -> str:
        model, version = _model_and_version(request, rpc)
        if version is None:
            raise MissingParameter("model_version")
        await self._control.api.set_default(model, version)
        return f'Default version successfully updated for model "{model}" to "{version}"'

    async def _unregister(self, request: management.UnregisterModelRequest, rpc: GrpcCall) -> str:
        model, version = _model_and_version(request, rpc)
        await self._control.unregister(model, version)
        return f'Model "{model}" unregistered'


class TorchServeStatus:
    """The message of a status: TorchServe's, followed by its detail and the name of its exception."""

    def __init__(self, settings: Settings) -> None:
        self._handler_errors = settings.inference.handler_errors

    def __call__(self, error: Exception, rpc: GrpcCall) -> str:
        document: Any = json_errors.to_document(error, rpc.request_id, self._handler_errors) or {}
        parts = (document.get("message") or str(error), document.get("detail"), document.get("type"))
        return "\n".join(part for part in parts if part)


def _wrap(method: ManagementMethod) -> UnaryMethod:
    """Return ``method`` with its text in a response message; accepted work is no error."""

    async def respond(request: Any, rpc: GrpcCall) -> management.ManagementResponse:
        try:
            message = await method(request, rpc)
        except InProgress as accepted:
            message = str(accepted)
        return management.ManagementResponse(msg=message)

    return respond


def _model_and_version(request: Any, rpc: GrpcCall) -> tuple[str, str | None]:
    """Return the model and the version that a request names. Raises MissingParameter and ModelNotAllowed."""
    if not request.model_name:
        raise MissingParameter("model_name")
    rpc.model, rpc.version = request.model_name, request.model_version
    rpc.check_model(rpc.model)
    return rpc.model, rpc.version or None


def _positive(number: int) -> int | None:
    return number if number > 0 else None
