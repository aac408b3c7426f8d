"""One model over several processes: who each of them is, and the process group that they form.

Every rank runs the same calls with the same rows in the same order: a collective that one of them leaves out
stops them all.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from handlers.degrees import must_divide

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


def plan(folder: Path, tensor: int, pipeline: int) -> Any:
    """How transformers cuts the model in ``folder`` up: each rank reads its own part. Raises HandlerLoadError."""
    from transformers.distributed import DistributedConfig

    check(folder, tensor, pipeline)
    sizes = {name: size for name, size in (("tp_size", tensor), ("pp_size", pipeline)) if size > 1}
    return DistributedConfig(**sizes)


def check(folder: Path, tensor: int, pipeline: int) -> None:
    """Raise HandlerLoadError where the model in ``folder`` cannot be cut into so many parts."""
    from transformers import AutoConfig

    must_divide(AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config(), tensor, pipeline, folder)
