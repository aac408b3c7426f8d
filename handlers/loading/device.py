"""Selection of a model's device, and a process's limit on GPU memory."""

from __future__ import annotations

import importlib
import importlib.util
import os

import torch

from handlers.loading.gpu_budget import GpuBudget, compute_budget

_budget: GpuBudget | None = None  # of this process


def limit_gpu_memory(gpu_id: int, fraction: float) -> None:
    """Limit this process to a fraction of a GPU's memory, so that it cannot exhaust its neighbours' memory.

    ``fraction`` is above 0 and below 1. It limits torch's allocator, and from now on ``get_budget`` returns
    the limit for ONNX Runtime, the generation cache and vLLM. Memory of other libraries is not limited.
    """
    global _budget
    if torch.cuda.is_available():
        _budget = compute_budget(fraction, torch.cuda.get_device_properties(gpu_id).total_memory)
        if _budget is not None:
            torch.cuda.set_per_process_memory_fraction(_budget.fraction, gpu_id)


def get_budget() -> GpuBudget | None:
    """Return the limit of this process on its GPU; None where it shares no GPU."""
    return _budget


def remaining_gpu_bytes(target: torch.device) -> int | None:
    """Return the bytes of the limit that torch has not reserved; None where there is no limit."""
    if _budget is None or target.type != "cuda":
        return None
    return _budget.remaining(torch.cuda.memory_reserved(target))


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
