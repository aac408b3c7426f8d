"""The public API, installed as the package ``torchrelay``.

Each name is imported when it is first used, so that ``import torchrelay`` loads neither torch nor Ray.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from serve_app._version import __version__

if TYPE_CHECKING:
    from handlers.base import BaseHandler
    from handlers.builtin.text import TextHandler
    from handlers.builtin.vision import VisionHandler
    from handlers.context import Context
    from handlers.errors import PredictionException
    from handlers.onnx_model import OnnxModel
    from serve_app.client import AsyncClient, Client, Prediction, Retries
    from serve_app.client.errors import (
        AuthenticationError,
        BadRequestError,
        ConflictError,
        DeadlineExceededError,
        HandlerFailedError,
        InProgressError,
        MethodNotAllowedError,
        ModelLoadingError,
        NoReplicaError,
        NotFoundError,
        PermissionDeniedError,
        QueueFullError,
        QuotaExceededError,
        ReplicaDiedError,
        RequestTooLargeError,
        SequenceLostError,
        ServerError,
        StartFailedError,
        UnavailableError,
    )

__all__ = [
    "AsyncClient",
    "AuthenticationError",
    "BadRequestError",
    "BaseHandler",
    "Client",
    "ConflictError",
    "Context",
    "DeadlineExceededError",
    "HandlerFailedError",
    "InProgressError",
    "MethodNotAllowedError",
    "ModelLoadingError",
    "NoReplicaError",
    "NotFoundError",
    "OnnxModel",
    "PermissionDeniedError",
    "Prediction",
    "PredictionException",
    "QueueFullError",
    "QuotaExceededError",
    "ReplicaDiedError",
    "RequestTooLargeError",
    "Retries",
    "SequenceLostError",
    "ServerError",
    "StartFailedError",
    "TextHandler",
    "UnavailableError",
    "VisionHandler",
    "__version__",
]

_HANDLERS = {
    "BaseHandler": "handlers.base",
    "Context": "handlers.context",
    "OnnxModel": "handlers.onnx_model",
    "PredictionException": "handlers.errors",
    "TextHandler": "handlers.builtin.text",
    "VisionHandler": "handlers.builtin.vision",
}


def __getattr__(name: str) -> Any:
    """Import a public name from its module.

    Raises ImportError with the ``pip`` command where the package of an extra is missing.
    """
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(import_module(_HANDLERS.get(name, "serve_app.client")), name)
    except ModuleNotFoundError as error:
        import handlers.extras as extras  # late: only error messages need it

        package = extras.find_package(error.name)
        if package is None:
            raise
        raise ImportError(
            f"{__name__}.{name} needs {package}, which is not installed: {extras.install_command(package)}",
            name=package,
        ) from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
