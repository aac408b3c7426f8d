"""Tensor parallelism of a transformers model by DeepSpeed's AutoTP."""

from __future__ import annotations

from typing import Any

import torch

from handlers.errors import HandlerLoadError


def shard(model: Any, ranks: int, place: object, **options: Any) -> Any:
    """Return DeepSpeed's inference engine for ``model``, of which each rank keeps its part.

    ``options`` are further ones of ``deepspeed.init_inference``; ``place`` names the model in errors. Raises
    HandlerLoadError for a model that DeepSpeed cannot split.
    """
    import deepspeed
    import deepspeed.ops

    # None of DeepSpeed's own operations is compiled. Its shared-memory all-reduce takes minutes of a C++
    # compiler at the first start, leaves a lock where that is killed, and crashes with ranks on several
    # machines.
    deepspeed.ops.__compatible_ops__ = {}
    if torch.distributed.is_initialized():
        backend = torch.distributed.get_backend()
        deepspeed.init_distributed(backend, auto_mpi_discovery=False, verbose=False)
    settings = {"replace_with_kernel_inject": False, **options, "tensor_parallel": {"tp_size": ranks}}
    try:
        return deepspeed.init_inference(model, config=settings)
    except AssertionError as error:
        raise HandlerLoadError(
            f"{place}: DeepSpeed cannot cut this model up ({error}). Take engine: {{name: transformers}}."
        ) from error
