"""The API for model authors: handlers, the context passed to them, and the errors that they may raise.

``load`` turns a handler's name into a ``LoadedHandler`` that runs batches. Nothing here imports torch
until a handler needs it.
"""

from __future__ import annotations

from handlers.errors import HandlerLoadError, PredictionException
from handlers.loading.loader import FOLDER_HANDLERS, HANDLERS, LoadedHandler, load, load_envelope

__all__ = [
    "FOLDER_HANDLERS",
    "HANDLERS",
    "HandlerLoadError",
    "LoadedHandler",
    "PredictionException",
    "load",
    "load_envelope",
]
