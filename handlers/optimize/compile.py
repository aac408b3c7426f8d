"""torch.compile with the settings of model-config.yaml."""

from __future__ import annotations

import enum
import importlib
import logging
from collections.abc import Mapping
from typing import Any

import torch

from handlers.loading import optional_deps

logger = logging.getLogger(__name__)

_BACKENDS = (
    "eager",
    "aot_eager",
    "inductor",
    "nvfuser",
    "aot_nvfuser",
    "aot_cudagraphs",
    "ofi",
    "fx2trt",
    "onnxrt",
    "ipex",
    "torchxla_trace_once",
    "openvino",
    "tensorrt",
    "hpu_backend",
)
_MEMBERS = {name.upper(): name for name in _BACKENDS}
PT2Backend = enum.Enum("PT2Backend", _MEMBERS, type=str)  # type: ignore[misc]


def check_valid_pt2_backend(backend: str) -> bool:
    """Return whether TorchServe lists this backend of torch.compile; others may still be installed."""
    is_known = backend in _BACKENDS
    if not is_known:
        logger.warning("%s is not a backend of torch.compile that TorchServe knows", backend)
    return is_known


def compile_options(pt2: Any) -> dict[str, Any] | None:
    """Return torch.compile's arguments from the ``pt2`` key of model-config.yaml; None disables compilation.

    The form is ``{compile: {enable: true, backend: inductor, ...}}``, or one of the older ones: a backend's
    name, or the arguments themselves.
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


def compile_model(model: Any, pt2: Any) -> Any:
    """Compile ``model`` with the settings of ``pt2``; where that fails, log a warning and return it
    unchanged.

    Without such settings and with ``TS_IPEX_ENABLE=true``, the Intel Extension for PyTorch optimizes the
    model where it is installed.
    """
    arguments = compile_options(pt2)
    if arguments is None:
        if optional_deps.IPEX_AVAILABLE and isinstance(model, torch.nn.Module):
            return _optimize_for_intel(model)
        return model
    try:
        return torch.compile(model, **arguments)
    except Exception as error:
        logger.warning("torch.compile(%s) was refused, so the model runs as it is: %s", arguments, error)
        return model


def _optimize_for_intel(model: torch.nn.Module) -> Any:
    ipex = importlib.import_module("intel_extension_for_pytorch")
    return ipex.optimize(model.to(memory_format=torch.channels_last))
