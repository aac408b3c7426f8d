"""Names that earlier versions of the client had, each with what to use instead."""

from __future__ import annotations

_TENSORS = "tritonclient.http or tritonclient.grpc"
_OPENAI = "the package openai with base_url='http://HOST:PORT/v1'"
_GRPC = "stubs generated from the .proto files of serve_app/proto, and tritonclient.grpc for tensors"
_WEBSOCKET = "the package websockets"

_CLASSES = {
    **dict.fromkeys(("AsyncGrpcClient", "GrpcChunk", "GrpcClient", "InferOutputs"), _GRPC),
    **dict.fromkeys(("AsyncSocket", "Socket", "StreamEnd"), _WEBSOCKET),
}
_METHODS = {
    **dict.fromkeys(
        (
            "config",
            "generate",
            "generate_stream",
            "infer",
            "load",
            "metadata",
            "model_ready",
            "repository",
            "statistics",
            "unload",
        ),
        _TENSORS,
    ),
    **dict.fromkeys(
        ("chat", "chat_stream", "complete", "complete_stream", "embed", "served_models"), _OPENAI
    ),
    "connect": _WEBSOCKET,
}


def missing_name(module: str, name: str) -> Exception:
    """Return the exception to raise where ``module`` has no attribute ``name``.

    It is an ImportError for a removed class, because ``from module import name`` hides the message of an
    AttributeError.
    """
    if name in _CLASSES:
        return ImportError(f"{name} was removed from {module}; use {_CLASSES[name]}", name=module)
    return AttributeError(f"module {module!r} has no attribute {name!r}")


def missing_method(client: object, name: str) -> AttributeError:
    """Return the exception to raise where a client has no method ``name``."""
    hint = f"; use {_METHODS[name]}" if name in _METHODS else ""
    message = f"{type(client).__name__!r} object has no attribute {name!r}{hint}"
    return AttributeError(message, name=name, obj=client)
