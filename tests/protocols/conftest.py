"""The fixtures of the in-process servers."""

from tests.support.protocol_servers import (
    asgi_inference,
    grpc_listening,
    inference,
    managed_by_grpc,
    management,
    over_grpc,
    over_http,
)

__all__ = [
    "asgi_inference",
    "grpc_listening",
    "inference",
    "managed_by_grpc",
    "management",
    "over_grpc",
    "over_http",
]
