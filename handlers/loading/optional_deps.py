"""What is installed beside PyTorch, under the names by which handlers ask for it."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os

PROFILER_AVAILABLE = PT2_AVAILABLE = PT230_AVAILABLE = True  # of every torch that we run on
XLA_AVAILABLE = importlib.util.find_spec("torch_xla") is not None
ONNX_AVAILABLE = importlib.util.find_spec("onnxruntime") is not None
IPEX_AVAILABLE = (
    os.environ.get("TS_IPEX_ENABLE") == "true" and importlib.util.find_spec("intel_extension_for_pytorch") is not None
)


def register_backends() -> None:
    """Let the installed ones register themselves with torch.compile, and with torch.jit.load what they compiled."""
    for name in ("torch_tensorrt", "openvino.torch"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
