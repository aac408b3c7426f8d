"""torch.compile as a model's configuration asks for it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

logger = logging.getLogger(__name__)


def options(pt2: Any) -> dict[str, Any] | None:
    """torch.compile's keyword arguments from the ``pt2`` key of model-config.yaml; None where it is not to be compiled.

    ``{compile: {enable: true, backend: inductor, ...}}``, or in the older forms a backend's name or the
    arguments themselves.
    """
    if pt2 is None:
        return None
    if isinstance(pt2, str):
        return {"backend": pt2}
    if not isinstance(pt2, Mapping):
        raise ValueError(
            f"model-config.yaml: pt2 is {pt2!r}; write pt2: {{compile: {{enable: true, backend: inductor}}}}."
        )
    if "compile" in pt2:
        arguments = dict(pt2["compile"] or {})
        return arguments if arguments.pop("enable", False) else None
    return None if "export" in pt2 else dict(pt2)


def compiled(model: Any, pt2: Any) -> Any:
    """``model``, compiled where ``pt2`` asks for it; as it was, with a warning, where torch.compile refuses."""
    arguments = options(pt2)
    if arguments is None:
        return model
    try:
        return torch.compile(model, **arguments)
    except Exception as error:
        logger.warning("torch.compile(%s) was refused, so the model runs as it is: %s", arguments, error)
        return model
