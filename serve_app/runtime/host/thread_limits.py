"""Number of threads of one operation: the model's, PyTorch's, ONNX Runtime's and that of tokenizers."""

from __future__ import annotations

import os
import sys
from typing import Any

from serve_app.domain.model import ModelSpec


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def intra_op_threads(spec: ModelSpec, cores: int, pinned: bool = False) -> int | None:
    """Return ``threads`` of model-config.yaml; None where it is not set, and the process keeps its default.

    ``auto`` divides this node's cores by the version's replicas, at least one; it is the default of a
    ``pinned`` replica. With autoscaling the maximum number of replicas counts, so that none takes a core from
    another.
    """
    configured: Any = spec.config.get("threads") or ("auto" if pinned else None)
    if configured != "auto":
        threads: int | None = configured
        return threads
    return max(1, cores // max(1, spec.min_workers, spec.max_workers))


def set_threads(threads: int) -> None:
    """Run this process's operations in so many threads; a session of ONNX Runtime takes PyTorch's number."""
    os.environ["OMP_NUM_THREADS"] = str(threads)  # for what is imported later, and for child processes
    import torch  # late: a handler without a model may need none

    torch.set_num_threads(threads)


def apply_environment() -> None:
    """Run PyTorch's operations in as many threads as the environment names.

    Ray sets the variable to the CPUs of the replica, at least 1. A fork has PyTorch already, which read the
    variable before that: with a thread for each core, two replicas on two cores had half the throughput of
    one.
    """
    number, torch = os.environ.get("OMP_NUM_THREADS", ""), sys.modules.get("torch")
    if torch is not None and number.isdecimal() and int(number) > 0:
        torch.set_num_threads(int(number))


def limit_tokenizers() -> None:
    """Limit Hugging Face's tokenizers to this process's threads, unless the environment configures them.

    By default a batch of texts wakes a thread for each core of the machine, and waits for all of them.
    """
    number = os.environ.get("OMP_NUM_THREADS", "")
    if number == "1":
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    elif number.isdecimal():
        os.environ.setdefault("RAYON_NUM_THREADS", number)
