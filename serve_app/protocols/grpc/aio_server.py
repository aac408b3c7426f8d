"""gRPC's own asyncio server for the management port, where calls are rare and their cost does not matter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

import grpc
import grpc.aio

from serve_app.domain.access import KeyGrant
from serve_app.settings import Settings

_KEEPALIVE_MS = 30_000
_MIN_PING_INTERVAL_MS = 10_000  # of clients; gRPC's own client pings every 10 s at most
_MAX_PING_STRIKES = 2  # pings that may come sooner, before the connection is closed
_IDLE_MS = 300_000  # for which a connection may have no calls
_HANDSHAKE_MS = 10_000  # until TLS and HTTP/2's preface are complete
_MAX_STREAMS = 32  # of one connection; management calls are rare
_MAX_CONNECTIONS = 1_024


class AioContext:
    """A call of gRPC's own server, with the part of ``CallContext`` that unary methods use."""

    authorized = False  # the method checks the key itself
    grant: KeyGrant | None = None

    def __init__(self, context: grpc.aio.ServicerContext) -> None:
        self.headers = {
            key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)
        }
        self.peer = unquote(context.peer()).partition(":")[2]  # without "ipv4:"
        self.time_remaining = context.time_remaining
        self.set_trailing_metadata = context.set_trailing_metadata
        self.abort = context.abort


def adapt(methods: Mapping[str, grpc.RpcMethodHandler]) -> dict[str, grpc.RpcMethodHandler]:
    """Return unary method handlers of ``ServiceAdapter`` as handlers for gRPC's own server."""
    return {name: _adapt(handler) for name, handler in methods.items()}


def _adapt(handler: grpc.RpcMethodHandler) -> grpc.RpcMethodHandler:
    async def behaviour(data: bytes, context: grpc.aio.ServicerContext) -> Any:
        return await handler.unary_unary(data, AioContext(context))

    return grpc.unary_unary_rpc_method_handler(behaviour, None, handler.response_serializer)


def create_server(settings: Settings, *interceptors: grpc.aio.ServerInterceptor) -> grpc.aio.Server:
    """Return a server without services for the running event loop."""
    g = settings.grpc
    options = {
        "grpc.max_receive_message_length": min(
            settings.inference.max_request_size, g.management_max_message_size
        ),
        "grpc.max_send_message_length": settings.runtime.max_response_size or -1,
        "grpc.max_metadata_size": 16_384,
        "grpc.so_reuseport": 0,  # a second process on the port would answer half of the calls
        "grpc.keepalive_time_ms": _KEEPALIVE_MS,
        "grpc.keepalive_timeout_ms": _KEEPALIVE_MS,
        "grpc.keepalive_permit_without_calls": 1,
        "grpc.http2.min_ping_interval_without_data_ms": _MIN_PING_INTERVAL_MS,
        "grpc.http2.max_ping_strikes": _MAX_PING_STRIKES,
        "grpc.max_concurrent_streams": _MAX_STREAMS,
        # The probe lets windows grow, and management messages are small: unfinished ones stay at 64 KiB.
        "grpc.http2.bdp_probe": 0,
        "grpc.max_connection_idle_ms": _IDLE_MS,
        "grpc.max_allowed_incoming_connections": _MAX_CONNECTIONS,
        "grpc.server_handshake_timeout_ms": _HANDSHAKE_MS,
    }
    if g.management_max_connection_age:
        options["grpc.max_connection_age_ms"] = round(g.management_max_connection_age * 1000)
        if g.management_max_connection_age_grace:
            options["grpc.max_connection_age_grace_ms"] = round(g.management_max_connection_age_grace * 1000)
    return grpc.aio.server(
        interceptors=interceptors,
        options=list(options.items()),
        maximum_concurrent_rpcs=g.max_concurrent_calls,
    )
