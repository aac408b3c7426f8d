"""One model over several processes: who each of them is, and the process group that they form.

Every rank runs the same calls with the same rows in the same order: a collective that one of them leaves out
stops them all.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from math import gcd
from typing import Any

import torch
import torch.distributed as dist

from handlers.errors import HandlerLoadError

_RENDEZVOUS = timedelta(minutes=5)  # for all ranks to come


@dataclass(frozen=True)
class Place:
    """One process of ``world``; ``local_rank`` and ``local_size`` count those on its machine."""

    rank: int
    world: int
    local_rank: int
    local_size: int
    address: str  # of rank 0's machine
    gpu: bool = False


class Rendezvous:
    """Where the ranks meet. Rank 0 makes it without a port and tells the others its ``port``."""

    def __init__(self, place: Place, port: int = 0) -> None:
        self._place = place
        self._store = dist.TCPStore(
            place.address, port, place.world, place.rank == 0, timeout=_RENDEZVOUS, wait_for_workers=False
        )
        self.port = int(self._store.port)

    def join(self) -> None:
        """Wait for all ranks, and form the process group: nccl with GPUs, gloo without.

        Sets the environment that torchrun sets, and DeepSpeed's LOCAL_SIZE. A rank sees one GPU, its own, so its
        LOCAL_RANK is 0 there: libraries take that for the device's index.
        """
        place = self._place
        os.environ.update(
            RANK=str(place.rank),
            WORLD_SIZE=str(place.world),
            LOCAL_RANK="0" if place.gpu else str(place.local_rank),
            LOCAL_WORLD_SIZE=str(place.local_size),
            LOCAL_SIZE=str(place.local_size),
            MASTER_ADDR=place.address,
            MASTER_PORT=str(self.port),
        )
        if place.gpu:
            torch.cuda.set_device(0)
        backend = "nccl" if place.gpu else "gloo"
        dist.init_process_group(backend, store=self._store, rank=place.rank, world_size=place.world)


def must_divide(config: Any, tensor: int, pipeline: int, where: object) -> None:
    """Raise HandlerLoadError where a model with this Hugging Face configuration cannot be cut into so many parts."""
    heads = getattr(config, "num_attention_heads", None)
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if heads and kv_heads and (heads % tensor or kv_heads % tensor):
        common = gcd(heads, kv_heads)
        fits = ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)
        raise HandlerLoadError(
            f"{where}: tensor_parallel: {tensor} does not divide {heads} attention heads and {kv_heads} key-value "
            f"heads. These do: {fits}."
        )
    layers = getattr(config, "num_hidden_layers", None)
    if layers and layers < pipeline:
        raise HandlerLoadError(
            f"{where}: pipeline_parallel: {pipeline} is more than the model's {layers} layers. Ask for fewer."
        )


def degrees(config: Mapping[str, Any]) -> tuple[int, int]:
    """``tensor_parallel`` and ``pipeline_parallel`` of a model-config.yaml, 1 where it does not say."""
    return config.get("tensor_parallel") or 1, config.get("pipeline_parallel") or 1
