"""The public API, installed as the package ``torchrelay``.

Each name is imported when it is first used, so that ``import torchrelay`` loads neither torch nor Ray.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from serve_app._version import __version__ as __version__

if TYPE_CHECKING:
    from handlers.base import BaseHandler as BaseHandler
    from handlers.builtin.text import TextHandler as TextHandler
    from handlers.builtin.vision import VisionHandler as VisionHandler
    from handlers.context import Context as Context
    from handlers.errors import HandlerLoadError as HandlerLoadError
    from handlers.errors import PredictionException as PredictionException
    from handlers.model_class import model as model
    from handlers.onnx_model import OnnxModel as OnnxModel
    from serve_app.client import *  # noqa: F403
    from serve_app.client.errors import *  # noqa: F403
    from serve_app.local import local as local
    from serve_app.local import local_async as local_async

_CLIENT = "serve_app.client"  # all of its names are public
_HANDLERS = {
    "BaseHandler": "handlers.base",
    "Context": "handlers.context",
    "HandlerLoadError": "handlers.errors",
    "OnnxModel": "handlers.onnx_model",
    "PredictionException": "handlers.errors",
    "TextHandler": "handlers.builtin.text",
    "VisionHandler": "handlers.builtin.vision",
    "local": "serve_app.local",
    "local_async": "serve_app.local",
    "model": "handlers.model_class",
}


def _load(name: str) -> Any:
    """Import a public name from its module.

    Raises ImportError with the replacement of a removed name, or with the ``pip`` command where the package
    of an extra is missing.
    """
    if name not in _HANDLERS:
        return _load_from_client(name)
    try:
        return getattr(import_module(_HANDLERS[name]), name)
    except ModuleNotFoundError as error:
        import handlers.extras as extras  # late: only error messages need it

        package = extras.find_package(error.name)
        if package is None:
            raise
        raise ImportError(
            f"{__name__}.{name} needs {package}, which is not installed: {extras.install_command(package)}",
            name=package,
        ) from error


def _load_from_client(name: str) -> Any:
    client = import_module(_CLIENT)
    if name == "__all__":
        return sorted([*_HANDLERS, *client.__all__, "__version__"])
    if name in client.__all__:
        return getattr(client, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if not TYPE_CHECKING:  # a type checker would accept every name

    def __getattr__(name: str) -> Any:
        value = globals()[name] = _load(name)
        return value


def __dir__() -> list[str]:
    return list(_load("__all__"))
