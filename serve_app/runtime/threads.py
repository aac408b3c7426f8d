"""How many threads one operation of a model runs in: the model's, PyTorch's, ONNX Runtime's and tokenizers' alike."""

from __future__ import annotations

import os

from serve_app.types import ModelSpec


def intra_op(spec: ModelSpec, cores: int, pinned: bool = False) -> int | None:
    """``threads`` of model-config.yaml; None where it says nothing, and the process stays as it was started.

    ``auto``, which a replica that is to be ``pinned`` has where it says nothing, is this node's cores divided by the
    version's replicas, at least one. Where the load decides how many there are, those that there may be count, so
    that none takes a core from another.
    """
    asked = spec.config.get("threads") or ("auto" if pinned else None)
    if asked != "auto":
        return asked
    return max(1, cores // max(1, spec.min_workers, spec.max_workers))


def limit(threads: int) -> None:
    """Let this process run its operations in so many threads; a session of ONNX Runtime takes PyTorch's number."""
    os.environ["OMP_NUM_THREADS"] = str(threads)  # for what is imported later, and for child processes
    import torch  # late: a handler without a model may need none

    torch.set_num_threads(threads)


def limit_tokenizers() -> None:
    """Let Hugging Face's tokenizers keep to the threads that this process has, unless somebody has said otherwise.

    By itself a batch of texts wakes a thread for each core of the machine, and waits until all have had their turn.
    """
    number = os.environ.get("OMP_NUM_THREADS", "")
    if number == "1":
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    elif number.isdecimal():
        os.environ.setdefault("RAYON_NUM_THREADS", number)
