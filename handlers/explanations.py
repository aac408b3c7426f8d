"""Captum, which explains an answer by what its input had to do with it; imported when somebody asks why."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from handlers.errors import PredictionException


def integrated_gradients(model: Any) -> Any:
    """``captum.attr.IntegratedGradients`` of ``model``; PredictionException (501) without Captum."""
    return _attr().IntegratedGradients(model)


def layer_integrated_gradients(model: Any, layer: torch.nn.Module) -> Any:
    """``captum.attr.LayerIntegratedGradients`` of ``layer`` in ``model``; PredictionException (501) without Captum."""
    return _attr().LayerIntegratedGradients(model, layer)


def _attr() -> Any:
    try:
        from captum import attr
    except ImportError as error:
        raise PredictionException(
            "Explanations need Captum, which is not installed where this model runs: install torchrelay[explain], or "
            "name captum in the archive's requirements.",
            501,
        ) from error
    return attr


@contextlib.contextmanager
def of_output(target: Any) -> Iterator[None]:
    """With gradients, whatever the caller's mode; a ``target`` that the model has not is the request's error (400)."""
    try:
        with torch.inference_mode(False), torch.enable_grad():
            yield
    except (IndexError, AssertionError) as error:  # Captum's two ways to say so
        if not _raised_in_captum(error):
            raise
        raise PredictionException(f"The model has no output {target!r} to explain: {error}", 400) from error


def _raised_in_captum(error: BaseException) -> bool:
    """Rather than in the author's model."""
    frames = error.__traceback__
    while frames is not None and frames.tb_next is not None:
        frames = frames.tb_next
    return frames is not None and frames.tb_frame.f_globals.get("__name__", "").startswith("captum.")
