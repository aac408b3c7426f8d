"""A gRPC call and its response, and the steps that all calls of a port share.

Each call is authorized, answered, counted and logged once. A service passes its methods to
``ServiceAdapter.unary`` and ``ServiceAdapter.stream``, which return method handlers for the gRPC server.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple, Protocol

import grpc
from google.protobuf.message import DecodeError, Message

from serve_app.domain.access import AccessTable, KeyGrant, Right
from serve_app.domain.request import InferenceRequest, InferenceResponse, InputPart, Priority
from serve_app.errors import (
    AccessDenied,
    HandlerRejected,
    InvalidBody,
    ModelNotAllowed,
    RelayError,
)
from serve_app.protocols.grpc.status import StatusTable, find_status_code
from serve_app.protocols.http import auth
from serve_app.protocols.http.exchange import (
    build_error_headers,
    encode_handler_headers,
    parse_deadline,
    parse_priority,
    uuid4,
)
from serve_app.telemetry import tracing
from serve_app.telemetry.access_log import AccessLog
from serve_app.telemetry.audit_log import set_actor

MAX_DETAILS = 2_000  # characters: a status is sent in a header, and clients accept 8 KiB of those
_MAX_HANDLER_HEADERS = 4_096  # bytes of headers that a handler set
_METADATA_KEY = re.compile(r"(?!grpc-)[0-9a-z_.-]+(?<!-bin)")
_OK = grpc.StatusCode.OK
_CANCELLED = grpc.StatusCode.CANCELLED

_log = logging.getLogger(__name__)


class CallContext(Protocol):
    """A call as the server of its port passes it to a method.

    ``headers`` is the call's metadata, which must not be changed. ``grant`` holds the permissions of the
    caller's key, once ``authorized`` is true.
    """

    authorized: bool
    grant: KeyGrant | None
    headers: Mapping[str, str]
    peer: str

    def time_remaining(self) -> float | None:
        """Return the seconds until the caller's deadline, or None if it set none."""

    def set_trailing_metadata(self, fields: Sequence[tuple[str, str]]) -> None: ...

    def send_initial_metadata(self) -> None:
        """Confirm to the caller that its call was accepted, before there is a response."""

    async def write(self, message: Any) -> None:
        """Send a message of a stream; wait while the client reads slowly."""

    async def abort(self, code: grpc.StatusCode, details: str = "") -> None:
        """End the call with ``code``. Always raises AbortError."""

    def send_status(self, code: grpc.StatusCode, details: str = "") -> None:
        """End the call; later messages and statuses are not sent."""


class GrpcCall:
    """A call, its metadata and its trailing metadata.

    ``headers`` are the call's metadata without binary values; the last of repeated keys wins. ``model`` and
    ``version`` are those that answered, for the log. ``grant`` holds the permissions of the caller's key, or
    None if no key is required. ``find_grant`` finds them again.
    """

    __slots__ = (
        "_trailers",
        "context",
        "find_grant",
        "grant",
        "headers",
        "model",
        "request_id",
        "span",
        "version",
    )

    def __init__(self, context: CallContext) -> None:
        self.context = context
        self.headers = dict(context.headers)
        self.request_id = uuid4()
        self.model = self.version = ""
        self.grant: KeyGrant | None = None
        self.find_grant: Callable[[], KeyGrant | None] = lambda: None
        self.span: Any = None  # of a traced call
        self._trailers = [("x-request-id", self.request_id)]
        self.finish()  # calls that the server itself ends have the id, too

    def start_next_request(self) -> str:
        """Assign a new request id, for the next request of a stream, and return it."""
        self.request_id = uuid4()
        self._trailers = [("x-request-id", self.request_id)]
        return self.request_id

    def renew_grant(self) -> None:
        """Look up the grant of the key again, which may have expired or been revoked. Raises AccessDenied."""
        self.grant = self.find_grant()

    def check_model(self, model: str) -> None:
        """Raise ModelNotAllowed if the caller's key does not cover ``model``."""
        if self.grant is not None and not self.grant.covers(model):
            raise ModelNotAllowed(model)

    @property
    def allowed_models(self) -> tuple[str, ...]:
        """The patterns of models that the caller's key covers."""
        return self.grant.models if self.grant is not None else ("*",)

    def build_request(
        self, model: str, version: str, inputs: tuple[InputPart, ...], headers: dict[str, str] | None = None
    ) -> InferenceRequest:
        """Return a prediction request with the caller's deadline and priority.

        Raises BadRequest and ModelNotAllowed.
        """
        self.model, self.version = model, version
        self.check_model(model)
        request_headers = {**self.headers, "url_path": "", "explain": "False"}
        if headers:
            request_headers.update(headers)
        return InferenceRequest(
            model,
            version or None,
            inputs,
            request_headers,
            "predict",
            self.request_id,
            self.deadline,
            self.priority,
        )

    @property
    def priority(self) -> Priority:
        """The priority of the call. Raises BadRequest."""
        return parse_priority(self.headers)

    @property
    def deadline(self) -> float | None:
        """The earlier of gRPC's deadline and that of the metadata, as a Unix time in seconds.

        Raises BadRequest.
        """
        remaining, from_headers = self.context.time_remaining(), parse_deadline(self.headers)
        if remaining is None:
            return from_headers
        from_grpc = time.time() + remaining
        return from_grpc if from_headers is None else min(from_grpc, from_headers)

    def record_response(self, response: InferenceResponse) -> None:
        """Set the trailing metadata of ``response``: the fields that HTTP sends as headers."""
        self.version = response.version
        trailers = [self._trailers[0], ("x-model-version", _metadata_value(response.version))]
        timings = response.timings
        if timings.batch_size:
            timing = "queue;dur=%.3f, inference;dur=%.3f, batch;desc=%d"
            milliseconds = (timings.queue * 1000, timings.inference * 1000)
            trailers.append(("server-timing", timing % (*milliseconds, timings.batch_size)))
        if response.arm:
            trailers.append(("x-torchrelay-arm", _metadata_value(response.arm)))
        if response.content_type or response.headers:
            trailers += _handler_trailers(response)
        if response.status != 200:
            trailers.append(("x-status", _metadata_value(f"{response.status} {response.phrase}")))
        self._trailers = trailers

    def record_error(self, error: Exception) -> None:
        """Set the trailing metadata of ``error``, which ends this call or the current request of a stream."""
        if not isinstance(error, RelayError):
            _log.error(
                "The gRPC call %s of %s failed: a fault of this server",
                self.request_id,
                self.model or "no model",
                exc_info=error,
            )
        else:
            self.version = error.selected_version or self.version
        headers = build_error_headers(error)
        if isinstance(error, HandlerRejected):
            headers.append((b"x-status", b"%d" % error.code))
        fields = [(name.decode(), _metadata_value(value.decode("latin-1"))) for name, value in headers]
        self._trailers = [self._trailers[0], *fields]

    @property
    def trailers(self) -> dict[str, str]:
        """The current trailing metadata."""
        return dict(self._trailers)

    async def write(self, message: Any) -> None:
        """Send a message of a stream; wait while the client reads slowly."""
        await self.context.write(message)

    def finish(self) -> None:
        self.context.set_trailing_metadata(self._trailers)


UnaryMethod = Callable[[Any, GrpcCall], Awaitable[Any]]
StreamMethod = Callable[[Any, GrpcCall], Awaitable[None]]  # it writes its messages itself


class StatusMapping(NamedTuple):
    """The name of a service, its table of status codes, and the function that writes a status's details."""

    service: str
    table: StatusTable
    details: Callable[[Exception, GrpcCall], str]


class ServiceAdapter:
    """The conversion of a service's methods to method handlers of the gRPC server.

    ``access`` returns the table of permissions. ``count`` is called with the name of each response's status,
    and ``on_refusal`` for unary calls that manage and that the key does not permit.
    Messages are parsed here and not by the gRPC server, so that malformed ones get a status of this module.
    """

    def __init__(
        self,
        access: Callable[[], AccessTable | None],
        count: Callable[[str], None] | None = None,
        log: AccessLog | None = None,
        on_refusal: Callable[[GrpcCall, str, AccessDenied], None] | None = None,
    ) -> None:
        self._access = access
        self._on_refusal = on_refusal
        self._count = count
        self._access_log = log
        self._methods: dict[str, tuple[StatusMapping, tuple[Right, ...]]] = {}  # by path

    def needs_key(self, path: str) -> bool:
        """Return whether the method at ``path`` has rights that a key must have."""
        return path in self._methods and bool(self._methods[path][1])

    def refuses(self, path: str, metadata: Mapping[str, str]) -> bool:
        """Return whether the method at ``path`` refuses the key in a call's metadata, or its absence."""
        access = self._access()
        if access is None or not self.needs_key(path):
            return False
        try:
            auth.resolve_grant(access, metadata.get("authorization"), *self._methods[path][1])
        except AccessDenied:
            return True
        return False

    def unary(
        self,
        mapping: StatusMapping,
        name: str,
        message_class: type[Message],
        method: UnaryMethod,
        *rights: Right,
    ) -> grpc.RpcMethodHandler:
        """Return the handler of the method ``name``: one response for one message of ``message_class``.

        Without ``rights`` no key is needed.
        """

        async def run(data: bytes, call: GrpcCall) -> Any:
            return await method(_parse(message_class, data), call)

        return grpc.unary_unary_rpc_method_handler(self._guard(mapping, name, rights, run), None, _serialize)

    def stream(
        self,
        mapping: StatusMapping,
        name: str,
        message_class: type[Message],
        method: StreamMethod,
        *rights: Right,
        stream_requests: bool = False,
    ) -> grpc.RpcMethodHandler:
        """Return the handler of a method that streams its response.

        Its request is one message, or a stream of them with ``stream_requests``.
        """

        async def parse_each(data: AsyncIterator[bytes]) -> AsyncIterator[Any]:
            async for message in data:
                yield _parse(message_class, message)

        async def run(data: Any, call: GrpcCall) -> None:
            if stream_requests:
                call.context.send_initial_metadata()  # some clients send their requests only after it
            await method(parse_each(data) if stream_requests else _parse(message_class, data), call)

        create_handler = (
            grpc.stream_stream_rpc_method_handler if stream_requests else grpc.unary_stream_rpc_method_handler
        )
        return create_handler(self._guard(mapping, name, rights, run), None, _serialize)

    def _guard(
        self,
        mapping: StatusMapping,
        name: str,
        rights: tuple[Right, ...],
        run: Callable[[Any, GrpcCall], Awaitable[Any]],
    ) -> Callable[[Any, CallContext], Awaitable[Any]]:
        """Return ``run`` with authorization, a status for every error, and the records of a call's end."""
        path = f"/{mapping.service}/{name}"
        self._methods[path] = mapping, rights

        async def behaviour(data: Any, context: CallContext) -> Any:
            started_at = time.perf_counter()
            call = GrpcCall(context)
            code = _CANCELLED
            call.span = tracing.begin_request("gRPC", path, call.headers, call.request_id) if rights else None
            try:
                if rights:
                    self._authorize(call, *rights)
                response = await run(data, call)
                code = _OK
                call.finish()
                return response
            except Exception as error:
                code = find_status_code(error, mapping.table)
                if self._on_refusal is not None and isinstance(error, AccessDenied) and "manage" in rights:
                    self._on_refusal(call, path, error)
                await _abort(error, code, call, mapping)
            finally:
                self._record_end(path, call, code, started_at)

        return behaviour

    def authorize(self, path: str, context: CallContext) -> None:
        """Check the key of a call when its headers arrive; end a call without the permission."""
        if not self.needs_key(path):
            return
        mapping, rights = self._methods[path]
        started_at = time.perf_counter()
        try:
            self._resolve_grant(context, rights)
        except AccessDenied as error:
            call = GrpcCall(context)
            call.grant = context.grant
            call.record_error(error)
            call.finish()
            code = find_status_code(error, mapping.table)
            context.send_status(code, mapping.details(error, call)[:MAX_DETAILS])
            self._record_end(path, call, code, started_at)

    def _find_grant(self, context: CallContext, rights: tuple[Right, ...]) -> KeyGrant | None:
        access = self._access()
        if access is None:
            return None
        return auth.resolve_grant(access, context.headers.get("authorization"), *rights)

    def _resolve_grant(self, context: CallContext, rights: tuple[Right, ...]) -> None:
        """Store the grant of the call's key, also of one without ``rights``. Raises AccessDenied."""
        access = self._access()
        if access is not None:
            context.grant = grant = auth.resolve_grant(access, context.headers.get("authorization"))
            auth.check_rights(grant, *rights)
        context.authorized = True

    def _authorize(self, call: GrpcCall, *rights: Right) -> None:
        """Remove the key from the metadata: handlers and logs must not see it.

        gRPC's own server has not checked the key before. Raises AccessDenied.
        """
        context = call.context
        try:
            if not context.authorized:
                self._resolve_grant(context, rights)
        finally:
            call.grant = context.grant
        call.find_grant = partial(self._find_grant, context, rights)
        if call.grant is not None:
            call.headers.pop("authorization", None)
            if (access := self._access()) is not None:
                access.add_cache_salt(call.headers, call.grant)
        if "infer" not in rights:  # management
            set_actor(auth.create_actor(call.grant, call.context.peer))

    def _record_end(self, path: str, call: GrpcCall, code: grpc.StatusCode, started_at: float) -> None:
        if self._count is not None:
            self._count(code.name)
        if call.span is not None:
            attributes = {"rpc.system": "grpc", "rpc.grpc.status_code": code.value[0]}
            error = None if code is _OK else code.name
            tracing.end(call.span, error, attributes, model=call.model, version=call.version)
        log = self._access_log
        if log is None:
            return
        request_headers: dict[str, str] | None = None
        if log.json:
            request_headers = {
                key: call.headers[key] for key in ("x-request-id", "traceparent") if key in call.headers
            }
        milliseconds = (time.perf_counter() - started_at) * 1000
        client, number = call.context.peer, code.value[0]
        log.write(
            client,
            "gRPC",
            path,
            "2",
            number,
            milliseconds,
            call.request_id,
            call.model,
            call.version,
            request_headers,
            "" if call.grant is None else call.grant.name,
        )


async def _abort(error: Exception, code: grpc.StatusCode, call: GrpcCall, mapping: StatusMapping) -> None:
    call.record_error(error)
    call.finish()
    await call.context.abort(code, mapping.details(error, call)[:MAX_DETAILS])


def _parse(message_class: type[Message], data: bytes) -> Any:
    try:
        return message_class.FromString(data)
    except DecodeError:
        name = message_class.__name__
        raise InvalidBody(
            f"The message of {len(data)} bytes is no {name}; its framing is malformed."
        ) from None


def _serialize(message: Any) -> bytes:
    return message.SerializeToString()


def _handler_trailers(response: InferenceResponse) -> list[tuple[str, str]]:
    """Return the handler's headers up to the size limit; its content type becomes ``x-content-type``."""
    fields = []
    size = 0
    for key, value in encode_handler_headers(response.content_type, response.headers):
        name = "x-content-type" if key == b"content-type" else key.decode("latin-1")
        size += len(name) + len(value)
        if _METADATA_KEY.fullmatch(name) and size <= _MAX_HANDLER_HEADERS:
            fields.append((name, _metadata_value(value.decode("latin-1"))))
    return fields


@lru_cache(maxsize=1024)
def _metadata_value(text: str) -> str:
    """Return ``text`` as a value that gRPC accepts: printable ASCII."""
    return "".join(letter if " " <= letter <= "~" else "?" for letter in text)
