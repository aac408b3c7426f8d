"""A gRPC server on this process's event loop, with its methods, connections and calls.

It accepts the method handlers of gRPC's generated code, with coroutines as their behaviour.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import ssl
from collections.abc import Callable, Iterable, Mapping

import grpc

from serve_app.http2.call_status import (
    QUOTA_FIELDS,
    encode_reason,
    reject_call,
    reject_request,
)
from serve_app.http2.connection import Http2Connection
from serve_app.http2.frame_receiver import PortState
from serve_app.http2.hpack_headers import RequestHead
from serve_app.http2.limits import Http2Limits
from serve_app.http2.message_framing import ENCODINGS
from serve_app.http2.rpc import GrpcMethod, RpcContext
from serve_app.http2.stream import Http2Stream

_MAX_METADATA = 16_384  # bytes of a call's head
_CLOSE_TIMEOUT = 1.0  # seconds for the delivery of the data written last
_MIN_STALL = 1.0  # seconds without a message after which a call's place may go to another
_Code = grpc.StatusCode

Authorizer = Callable[[str, RpcContext], None]  # ends a call of a method without the permission


class Http2Server:
    """A gRPC server: add its methods, ``serve`` sockets, and ``stop`` it.

    ``authorize`` is called for each call when its headers arrive, before a byte of its message is buffered.
    """

    def __init__(self, limits: Http2Limits | None = None, authorize: Authorizer | None = None) -> None:
        self.limits = limits or Http2Limits()
        self._authorize = authorize
        self._port = PortState(self.limits)
        self.queues, self.budget = self._port.queues, self._port.budget
        self.large_messages = self._port.large_messages
        self._methods: dict[str, GrpcMethod] = {}
        self._listeners: list[asyncio.AbstractServer] = []
        self._connections: dict[Http2Connection, list[asyncio.TimerHandle]] = {}
        self._calls: set[RpcContext] = set()
        self._no_connections = asyncio.Event()
        self._is_stopping = False

    @property
    def calls(self) -> int:
        """The number of running calls."""
        return len(self._calls)

    def add_registered_method_handlers(
        self, service: str, handlers: Mapping[str, grpc.RpcMethodHandler]
    ) -> None:
        """Add the methods of ``service``, by name."""
        for name, handler in handlers.items():
            self._methods[f"/{service}/{name}"] = GrpcMethod.from_handler(handler)

    def add_generic_rpc_handlers(self, handlers: Iterable[grpc.GenericRpcHandler]) -> None:
        """Ignore ``handlers``: generated code adds its methods a second time this way, without names."""

    async def serve(self, sock: socket.socket, tls: ssl.SSLContext | None = None) -> None:
        """Accept connections on ``sock``, which is bound."""
        if tls is not None:
            tls.set_alpn_protocols(["h2"])
        loop = asyncio.get_running_loop()
        self._listeners.append(
            await loop.create_server(self._create_connection, sock=sock, ssl=tls, backlog=1024)
        )

    async def stop(self, grace: float) -> None:
        """Accept no further calls; cancel those that have not ended after ``grace`` seconds."""
        self._is_stopping = True
        for listener in self._listeners:
            listener.close()
        for connection in list(self._connections):
            connection.shut_down()
        await self._wait_for_disconnects(grace)
        for call in list(self._calls):
            call.shut_down()
        for connection in list(self._connections):
            connection.close()
        await self._wait_for_disconnects(_CLOSE_TIMEOUT)
        for connection in list(self._connections):
            connection.abort()
        self.queues.stop()

    async def _wait_for_disconnects(self, timeout: float) -> None:
        self._no_connections.clear()
        if self._connections and timeout > 0:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._no_connections.wait(), timeout)

    def remove_call(self, call: RpcContext) -> None:
        self._calls.discard(call)

    def _create_connection(self) -> Http2Connection:
        return Http2Connection(self, self._port, _MAX_METADATA)

    def on_connected(self, connection: Http2Connection) -> None:
        timers = self._connections[connection] = []
        if self._is_stopping:  # it was in the queue of the listener; the client connects to another server
            return connection.close()
        limits = self.limits
        if limits.max_connection_age:
            # ±10 % so that connections opened together do not close together
            age = limits.max_connection_age * random.uniform(0.9, 1.1)
            loop = asyncio.get_running_loop()
            timers.append(loop.call_later(age, connection.shut_down))
            if limits.connection_age_grace:
                timers.append(loop.call_later(age + limits.connection_age_grace, connection.abort))

    def on_disconnected(self, connection: Http2Connection) -> None:
        for timer in self._connections.pop(connection, ()):
            timer.cancel()
        if not self._connections:
            self._no_connections.set()

    def on_request(self, connection: Http2Connection, stream: Http2Stream, head: RequestHead) -> None:
        prefix, _, subtype = head.content_type.partition("application/grpc")
        if head.method != "POST":
            return reject_request(stream, 405)
        is_grpc = bool(subtype) or head.content_type == "application/grpc"
        if prefix or not is_grpc or subtype[:1] not in ("", "+", ";"):
            return reject_request(stream, 415)
        method = self._methods.get(head.path)
        if method is None:
            return reject_call(stream, _Code.UNIMPLEMENTED, f"There is no method {head.path[:200]} here.")
        if head.size > _MAX_METADATA:
            details = f"The metadata have {head.size} bytes, and {_MAX_METADATA} are taken."
            return reject_call(stream, _Code.RESOURCE_EXHAUSTED, details, encode_reason("request_too_large"))
        if head.encoding not in ENCODINGS:
            details = f"Messages may be {', '.join(ENCODINGS)}, not {head.encoding[:50]}."
            return reject_call(stream, _Code.UNIMPLEMENTED, details)
        max_calls = self.limits.max_concurrent_calls
        if len(self._calls) >= max_calls and not self._evict_waiting_call():
            details = f"{max_calls} calls are under way, as many as grpc.max_concurrent_calls allows."
            return reject_call(stream, _Code.RESOURCE_EXHAUSTED, details, QUOTA_FIELDS)
        call = RpcContext(self, stream, head, method, connection.peer)
        self._calls.add(call)
        stream.receiver = call
        if self._authorize is not None:
            self._authorize(head.path, call)
        if method.request_streaming and not call.ended:
            call.start()
        return None

    def _evict_waiting_call(self) -> bool:
        """End the call that is longest without a message; return False if all are running."""
        queues, limits = self.queues, self.limits
        call = queues.unfinished.oldest(_MIN_STALL) or queues.idle_streams.oldest(limits.message_timeout)
        if call is not None:
            call.evict()
        return call is not None
