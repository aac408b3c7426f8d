"""Names that earlier versions of the client had, each with what to use instead."""

from __future__ import annotations

_GRPC = "stubs generated from the .proto files of serve_app/proto, and tritonclient.grpc for tensors"
_WEBSOCKET = "the package websockets"
_CLASSES = {
    _GRPC: ("AsyncGrpcClient", "GrpcChunk", "GrpcClient", "InferOutputs"),
    _WEBSOCKET: ("AsyncSocket", "Socket", "StreamEnd"),
}
_METHODS = {
    "tritonclient.http or tritonclient.grpc": (
        "config",
        "generate",
        "generate_stream",
        "load",
        "metadata",
        "model_ready",
        "repository",
        "unload",
    ),
    "the package openai with base_url='http://HOST:PORT/v1'": (
        "chat",
        "chat_stream",
        "complete",
        "complete_stream",
        "embed",
        "served_models",
    ),
    _WEBSOCKET: ("connect",),
}


def missing_name(module: str, name: str) -> Exception:
    """Return the exception to raise where ``module`` has no attribute ``name``.

    It is an ImportError for a removed class, because ``from module import name`` hides the message of an
    AttributeError.
    """
    for replacement, names in _CLASSES.items():
        if name in names:
            return ImportError(f"{name} was removed from {module}; use {replacement}", name=module)
    return AttributeError(f"module {module!r} has no attribute {name!r}")


def missing_method(client: object, name: str) -> AttributeError:
    """Return the exception to raise where a client has no method ``name``."""
    message = f"{type(client).__name__!r} object has no attribute {name!r}"
    for replacement, names in _METHODS.items():
        if name in names:
            message += f"; use {replacement}"
    return AttributeError(message, name=name, obj=client)
