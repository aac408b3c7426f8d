"""torch.compile as a model's configuration asks for it."""

from __future__ import annotations

import enum
import logging
from collections.abc import Mapping
from typing import Any

import torch

from handlers import extensions

logger = logging.getLogger(__name__)

_BACKENDS = ("eager", "aot_eager", "inductor", "nvfuser", "aot_nvfuser", "aot_cudagraphs", "ofi", "fx2trt", "onnxrt")
_BACKENDS += ("ipex", "torchxla_trace_once", "openvino", "tensorrt", "hpu_backend")
PT2Backend = enum.Enum("PT2Backend", {name.upper(): name for name in _BACKENDS}, type=str)  # type: ignore[misc]


def check_valid_pt2_backend(backend: str) -> bool:
    """Whether TorchServe knows this backend of torch.compile; others may be installed all the same."""
    known = backend in _BACKENDS
    if not known:
        logger.warning("%s is not a backend of torch.compile that TorchServe knows", backend)
    return known


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
    """``model``, compiled where ``pt2`` asks for it; as it was, with a warning, where torch.compile refuses.

    Otherwise, with ``TS_IPEX_ENABLE=true``, optimized by the Intel Extension for PyTorch where that is installed.
    """
    arguments = options(pt2)
    if arguments is None:
        return _for_intel(model) if extensions.IPEX_AVAILABLE and isinstance(model, torch.nn.Module) else model
    try:
        return torch.compile(model, **arguments)
    except Exception as error:
        logger.warning("torch.compile(%s) was refused, so the model runs as it is: %s", arguments, error)
        return model


def _for_intel(model: torch.nn.Module) -> Any:
    import intel_extension_for_pytorch as ipex

    return ipex.optimize(model.to(memory_format=torch.channels_last))
