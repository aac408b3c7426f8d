"""Flags for the packages that are installed beside PyTorch, under TorchServe's names."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os

PROFILER_AVAILABLE = PT2_AVAILABLE = PT230_AVAILABLE = True  # in every supported torch
XLA_AVAILABLE = importlib.util.find_spec("torch_xla") is not None
ONNX_AVAILABLE = importlib.util.find_spec("onnxruntime") is not None
IPEX_AVAILABLE = (
    os.environ.get("TS_IPEX_ENABLE") == "true"
    and importlib.util.find_spec("intel_extension_for_pytorch") is not None
)


def register_backends() -> None:
    """Import the installed torch.compile backends.

    They register themselves with torch.compile, and with torch.jit.load the modules that they compiled.
    """
    for name in ("torch_tensorrt", "openvino.torch"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
