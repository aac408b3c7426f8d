"""Selection of a model's device, and a process's limit on GPU memory."""

from __future__ import annotations

import importlib
import importlib.util
import os

import torch


def limit_gpu_memory(gpu_id: int, fraction: float) -> None:
    """Limit this process to a fraction of a GPU's memory, so that it cannot exhaust its neighbours' memory.

    ``fraction`` is above 0 and at most 1. Only torch's own allocator respects it: memory that other libraries
    allocate is not counted.
    """
    if torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(fraction, gpu_id)


def select_device(gpu_id: int | None) -> torch.device:
    """Return the accelerator ``gpu_id``, else XLA where torch_xla is installed, else the CPU.

    Accelerators are tried in this order: CUDA, Intel's XPU (with ``TS_IPEX_GPU_ENABLE=true``), Apple's MPS.
    From NVIDIA's Ampere on, float32 matrix products use the tensor cores, as in TorchServe.
    """
    if gpu_id is not None and torch.cuda.is_available():
        if torch.version.cuda and torch.cuda.get_device_capability(gpu_id) >= (8, 0):
            torch.set_float32_matmul_precision("high")
        return torch.device("cuda", gpu_id)
    if gpu_id is not None and os.environ.get("TS_IPEX_GPU_ENABLE") == "true" and torch.xpu.is_available():
        return torch.device("xpu", gpu_id)
    if gpu_id is not None and torch.backends.mps.is_available():
        return torch.device("mps")
    if importlib.util.find_spec("torch_xla") is not None:
        device: torch.device = importlib.import_module("torch_xla").device()
        return device
    return torch.device("cpu")
