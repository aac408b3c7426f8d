"""Where a model's tensors live."""

from __future__ import annotations

import importlib.util
import os

import torch


def share(gpu_id: int, fraction: float) -> None:
    """Keep this process to its share of a GPU's memory: what wants more runs out, and its neighbours do not.

    ``fraction`` is from above 0 to 1. torch's own allocator minds it; what other libraries allocate is not counted.
    """
    if torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(fraction, gpu_id)


def choose(gpu_id: int | None) -> torch.device:
    """The accelerator that ``gpu_id`` names, else XLA where torch_xla is installed, else the CPU.

    In this order: CUDA, Intel's XPU (with ``TS_IPEX_GPU_ENABLE=true``), Apple's MPS.
    From NVIDIA's Ampere on, float32 matrix products use the tensor cores, as TorchServe has it.
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
        import torch_xla

        return torch_xla.device()
    return torch.device("cpu")
