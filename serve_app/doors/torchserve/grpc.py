"""TorchServe's gRPC APIs: inference over the data plane, management over the control plane."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from google.protobuf.empty_pb2 import Empty
from google.rpc.error_details_pb2 import ErrorInfo
from grpc import StatusCode

from serve_app.controlplane import ControlPlane
from serve_app.dataplane import DataPlane
from serve_app.doors.grpc.errors import Table, by_http_status, look_up
from serve_app.doors.grpc.rpc import LONGEST_DETAILS, Dialect, Port, Rpc, Unary
from serve_app.doors.streaming import whole
from serve_app.doors.torchserve import errors
from serve_app.doors.torchserve.inference import SILENCE
from serve_app.doors.torchserve.management import (
    COUNTS,
    PAGE,
    NobodyDescribes,
    described,
    listed,
    registered,
    scaled,
)
from serve_app.errors import (
    AccessDenied,
    CannotRemoveDefault,
    ClientTimeout,
    Loading,
    MethodNotAllowed,
    MissingParameter,
    ModelNotFound,
    NotYet,
    NoWorker,
    QueueFull,
    StartFailed,
    VersionExists,
    VersionNotFound,
    reason,
)
from serve_app.proto import inference_pb2 as inference
from serve_app.proto import management_pb2 as management
from serve_app.settings import Settings
from serve_app.types import Call, Input, Registration, Reply, ReplyStream, Right

Write = Callable[[inference.PredictionResponse], Awaitable[None]]
Said = Callable[[Any, Rpc], Awaitable[str]]  # what a management method answers with

_SIDE_BY_SIDE = 32  # requests of one stream; more are read when one of them is answered

INFERENCE = "org.pytorch.serve.grpc.inference.InferenceAPIsService"
MANAGEMENT = "org.pytorch.serve.grpc.management.ManagementAPIsService"

# What the HTTP API answers, as TorchServe translates that, but for these.
_TABLE: Table = {
    **{cls: by_http_status(status) for cls, (status, _) in errors.TABLE.items()},
    AccessDenied: StatusCode.PERMISSION_DENIED,
    MethodNotAllowed: StatusCode.PERMISSION_DENIED,  # the model API is switched off
    NotYet: StatusCode.UNAVAILABLE,
}
INFERENCE_TABLE: Table = {
    **_TABLE,
    MissingParameter: StatusCode.INTERNAL,
    ModelNotFound: StatusCode.INTERNAL,
    VersionNotFound: StatusCode.INTERNAL,
    NoWorker: StatusCode.INTERNAL,
    QueueFull: StatusCode.INTERNAL,
    Loading: StatusCode.INTERNAL,
}
MANAGEMENT_TABLE: Table = {
    **_TABLE,
    CannotRemoveDefault: StatusCode.UNKNOWN,
    VersionExists: StatusCode.UNKNOWN,
}


class InferenceDoor:
    """Four methods. A row's parts are the entries of ``input``, as bytes or of the type that ``x-content-type`` names.

    Metadata are its headers.
    """

    def __init__(self, plane: DataPlane, settings: Settings, port: Port) -> None:
        self._plane = plane
        self._runtime = settings.runtime
        self._drops = settings.inference.late_answer == "drop"
        self._dialect = d = Dialect(INFERENCE, INFERENCE_TABLE, Words(settings))
        asked = inference.PredictionsRequest
        self.methods = {
            "Ping": port.unary(d, "Ping", Empty, self._ping),
            "Predictions": port.unary(d, "Predictions", asked, self._predict, "infer"),
            "StreamPredictions": port.stream(d, "StreamPredictions", asked, self._stream, "infer"),
            "StreamPredictions2": port.stream(d, "StreamPredictions2", asked, self._sequence, "infer", many=True),
        }

    async def _ping(self, request: Any, rpc: Rpc) -> inference.TorchServeHealthResponse:
        word = "Healthy" if self._plane.healthy else "Unhealthy"
        return inference.TorchServeHealthResponse(health=errors.pretty({"status": word}).decode())

    async def _predict(self, request: inference.PredictionsRequest, rpc: Rpc) -> inference.PredictionResponse:
        reply = await self._infer(self._call(request, rpc), rpc)
        if isinstance(reply, ReplyStream):
            body, name = await whole(reply, self._runtime.max_response_size), self._name(reply.head)
            return inference.PredictionResponse(prediction=body, sequence_id=name)
        return inference.PredictionResponse(prediction=reply.body, sequence_id=self._name(reply))

    async def _stream(self, request: inference.PredictionsRequest, rpc: Rpc) -> None:
        await self._pieces(await self._infer(self._call(request, rpc), rpc), rpc.write)

    async def _sequence(self, requests: AsyncIterator[inference.PredictionsRequest], rpc: Rpc) -> None:
        """The requests of one sequence. Each is sent on as it comes, also while an answer to one before it is streamed.

        An error answers its request, and the stream goes on.
        """
        room, turn = asyncio.Semaphore(_SIDE_BY_SIDE), asyncio.Lock()
        answers: set[asyncio.Task[None]] = set()

        async def write(message: inference.PredictionResponse) -> None:
            async with turn:
                await rpc.write(message)

        def ended(task: asyncio.Task[None]) -> None:
            answers.discard(task)
            if not task.cancelled():
                task.exception()  # of a client who has left: nobody is there to hear of it

        async def answer(request: inference.PredictionsRequest) -> None:
            try:
                await self._one_of_sequence(request, rpc, write)
            finally:
                room.release()

        try:
            async for request in requests:
                await room.acquire()
                task = asyncio.create_task(answer(request))
                answers.add(task)
                task.add_done_callback(ended)
            await asyncio.gather(*answers)
        finally:
            for task in answers:
                task.cancel()

    async def _one_of_sequence(self, request: inference.PredictionsRequest, rpc: Rpc, write: Write) -> None:
        name = request.sequence_id
        rpc.renew()
        try:
            if not name and not self._says(request, self._runtime.header_key_sequence_start):
                raise MissingParameter("sequenceId")
            await self._pieces(await self._infer(self._call(request, rpc), rpc), write, name)
        except Exception as error:
            rpc.failed(error)
            await write(self._refusal(name, error, rpc))

    def _call(self, request: inference.PredictionsRequest, rpc: Rpc) -> Call:
        if not request.model_name:
            raise MissingParameter("model_name")
        kind = rpc.headers.get("x-content-type")
        inputs = tuple([Input(name, value, kind) for name, value in request.input.items()])
        return rpc.call(request.model_name, request.model_version, inputs, self._of_sequence(request))

    def _of_sequence(self, request: inference.PredictionsRequest) -> dict[str, str]:
        """The headers of sequences, as a request over HTTP has them."""
        names = self._runtime
        headers = {names.header_key_sequence_id.lower(): request.sequence_id} if request.sequence_id else {}
        for name in (names.header_key_sequence_start, names.header_key_sequence_end):
            if self._says(request, name):
                headers[name.lower()] = "true"
        return headers

    def _says(self, request: inference.PredictionsRequest, name: str) -> bool:
        value = request.input.get(name)
        return value is not None and value.lower() == b"true"

    def _name(self, reply: Reply) -> str | None:
        """The name of the sequence that an answer belongs to, where it says one."""
        if not reply.headers:
            return None
        key = self._runtime.header_key_sequence_id.lower()
        return next((value for name, value in reply.headers if name.lower() == key), None)

    async def _infer(self, call: Call, rpc: Rpc) -> Reply | ReplyStream:
        try:
            reply = await self._plane.infer(call)
        except ClientTimeout:
            if self._drops:
                await asyncio.sleep(SILENCE)
            raise
        rpc.answered(reply.head if isinstance(reply, ReplyStream) else reply)
        return reply

    async def _pieces(self, reply: Reply | ReplyStream, write: Write, name: str | None = None) -> None:
        """Each piece as a message, an answer in one piece as one; ``name`` is the caller's own of its sequence."""
        name = name or self._name(reply.head if isinstance(reply, ReplyStream) else reply)
        if not isinstance(reply, ReplyStream):
            return await write(inference.PredictionResponse(prediction=reply.body, sequence_id=name))
        try:
            async for piece in reply:
                await write(inference.PredictionResponse(prediction=piece, sequence_id=name))
        finally:
            await reply.aclose()

    def _refusal(self, name: str, error: Exception, rpc: Rpc) -> inference.PredictionResponse:
        """An error as one message of a stream; beside it stands what trailing metadata would say."""
        message = inference.PredictionResponse(sequence_id=name)
        status = message.status
        status.code = look_up(error, self._dialect.table).value[0]
        status.message = self._dialect.words(error, rpc)[:LONGEST_DETAILS]
        status.details.add().Pack(ErrorInfo(reason=reason(error), domain="torchrelay", metadata=rpc.trailers))
        return message


class ManagementDoor:
    """Six methods, which answer with the sentences and the JSON of the REST API."""

    def __init__(self, control: ControlPlane, settings: Settings, port: Port) -> None:
        self._control = control
        dialect = Dialect(MANAGEMENT, MANAGEMENT_TABLE, Words(settings))
        methods: dict[str, tuple[Any, Said, Right]] = {
            "DescribeModel": (management.DescribeModelRequest, self._describe, "observe"),
            "ListModels": (management.ListModelsRequest, self._list, "observe"),
            "RegisterModel": (management.RegisterModelRequest, self._register, "manage"),
            "ScaleWorker": (management.ScaleWorkerRequest, self._scale, "manage"),
            "SetDefault": (management.SetDefaultRequest, self._set_default, "manage"),
            "UnregisterModel": (management.UnregisterModelRequest, self._unregister, "manage"),
        }
        self.methods = {
            name: port.unary(dialect, name, kind, _in_a_message(said), right)
            for name, (kind, said, right) in methods.items()
        }

    async def _describe(self, request: management.DescribeModelRequest, rpc: Rpc) -> str:
        model, version = _named(request, rpc)
        every = version == "all"
        try:
            found = await self._control.describe(
                model, None if every else version, every, customized=request.customized and not every
            )
        except NoWorker:
            raise NobodyDescribes(model) from None
        return errors.pretty([described(description) for description in found]).decode()

    async def _list(self, request: management.ListModelsRequest, rpc: Rpc) -> str:
        said = await listed(self._control, request.limit or PAGE, request.next_page_token, rpc.within)
        return errors.pretty(said).decode()

    async def _register(self, request: management.RegisterModelRequest, rpc: Rpc) -> str:
        asked = Registration(
            request.url,
            **{key: getattr(request, key) or None for key in ("model_name", "handler", "runtime")},
            **{key: _positive(getattr(request, key)) for key in COUNTS},
            wait=request.synchronous,
            within=rpc.within,
            s3_sse_kms=request.s3_sse_kms,
        )
        return registered(await self._control.register(asked))[1]

    async def _scale(self, request: management.ScaleWorkerRequest, rpc: Rpc) -> str:
        model, version = _named(request, rpc)
        low = _positive(request.min_worker) or 1
        high = _positive(request.max_worker)
        try:
            progress = await self._control.scale(model, version, low, high, request.synchronous)
        except StartFailed as error:
            if version is None:  # TorchServe names the version only where the caller did
                raise type(error)(model, "null", error.detail) from None
            raise
        return scaled(progress, low, version is not None)[1]

    async def _set_default(self, request: management.SetDefaultRequest, rpc: Rpc) -> str:
        model, version = _named(request, rpc)
        if version is None:
            raise MissingParameter("model_version")
        await self._control.set_default(model, version)
        return f'Default version successfully updated for model "{model}" to "{version}"'

    async def _unregister(self, request: management.UnregisterModelRequest, rpc: Rpc) -> str:
        model, version = _named(request, rpc)
        await self._control.unregister(model, version)
        return f'Model "{model}" unregistered'


class Words:
    """What a status says: TorchServe's message, and behind it the name of its exception."""

    def __init__(self, settings: Settings) -> None:
        self._shown = settings.inference.handler_errors

    def __call__(self, error: Exception, rpc: Rpc) -> str:
        said = errors.document(error, rpc.request_id, self._shown) or {}
        parts = (said.get("message") or str(error), said.get("detail"), said.get("type"))
        return "\n".join(part for part in parts if part)


def _in_a_message(said: Said) -> Unary:
    async def answer(request: Any, rpc: Rpc) -> management.ManagementResponse:
        try:
            message = await said(request, rpc)
        except NotYet as accepted:
            message = str(accepted)
        return management.ManagementResponse(msg=message)

    return answer


def _named(request: Any, rpc: Rpc) -> tuple[str, str | None]:
    """The model and the version that a request names. Raises MissingParameter and WrongModel."""
    if not request.model_name:
        raise MissingParameter("model_name")
    rpc.model, rpc.version = request.model_name, request.model_version
    rpc.cover(rpc.model)
    return rpc.model, rpc.version or None


def _positive(number: int) -> int | None:
    return number if number > 0 else None
