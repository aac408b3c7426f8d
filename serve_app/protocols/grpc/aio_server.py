"""gRPC's own asyncio server for the management port, where calls are rare and their cost does not matter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

import grpc
import grpc.aio

from serve_app.settings import Settings

_KEEPALIVE_MS = 30_000


class AioContext:
    """A call of gRPC's own server, with the part of ``RpcContext`` that unary methods use."""

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


def create_server(settings: Settings) -> grpc.aio.Server:
    """Return a server without services for the running event loop."""
    g = settings.grpc
    options = {
        "grpc.max_receive_message_length": settings.inference.max_request_size,
        "grpc.max_send_message_length": settings.runtime.max_response_size or -1,
        "grpc.max_metadata_size": 16_384,
        "grpc.so_reuseport": 0,  # a second process on the port would answer half of the calls
        "grpc.keepalive_time_ms": _KEEPALIVE_MS,
        "grpc.keepalive_timeout_ms": _KEEPALIVE_MS,
        "grpc.keepalive_permit_without_calls": 1,
        "grpc.http2.max_ping_strikes": 0,  # clients may ping as often as they like
    }
    if g.management_max_connection_age:
        options["grpc.max_connection_age_ms"] = round(g.management_max_connection_age * 1000)
        if g.management_max_connection_age_grace:
            options["grpc.max_connection_age_grace_ms"] = round(g.management_max_connection_age_grace * 1000)
    return grpc.aio.server(options=list(options.items()), maximum_concurrent_rpcs=g.max_concurrent_calls)
