"""The process group of a model over several processes.

Every rank runs the same calls with the same rows in the same order: a collective that one rank skips blocks
all of them.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from handlers.distributed.degrees import check_divisible

_RENDEZVOUS_TIMEOUT = timedelta(minutes=5)


@dataclass(frozen=True)
class RankPlacement:
    """The position of a process among ``world`` ranks and among the ``local_size`` ranks of its machine."""

    rank: int
    world: int
    local_rank: int
    local_size: int
    address: str  # of rank 0's machine
    gpu: bool = False


class Rendezvous:
    """The TCP store of all ranks: rank 0 starts it on a free ``port``, the others connect to that port."""

    def __init__(self, placement: RankPlacement, port: int = 0) -> None:
        self._placement = placement
        self._store = dist.TCPStore(
            placement.address,
            port,
            placement.world,
            placement.rank == 0,
            timeout=_RENDEZVOUS_TIMEOUT,
            wait_for_workers=False,
        )
        self.port = int(self._store.port)

    def join(self) -> None:
        """Wait for all ranks, and form the process group: nccl with GPUs, gloo without.

        It sets the environment variables of torchrun, and DeepSpeed's LOCAL_SIZE. A rank sees only its own
        GPU, so its LOCAL_RANK is 0 there: libraries use it as the index of the device.
        """
        placement = self._placement
        os.environ.update(
            RANK=str(placement.rank),
            WORLD_SIZE=str(placement.world),
            LOCAL_RANK="0" if placement.gpu else str(placement.local_rank),
            LOCAL_WORLD_SIZE=str(placement.local_size),
            LOCAL_SIZE=str(placement.local_size),
            MASTER_ADDR=placement.address,
            MASTER_PORT=str(self.port),
        )
        if placement.gpu:
            torch.cuda.set_device(0)
        elif placement.local_size < placement.world:
            # By default gloo listens where the host's name leads, which is a loopback address on Debian.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", find_interface(placement.address))
        backend = "nccl" if placement.gpu else "gloo"
        dist.init_process_group(backend, store=self._store, rank=placement.rank, world_size=placement.world)


def distributed_config(folder: Path, tensor: int, pipeline: int) -> Any:
    """Return transformers' configuration that splits the model in ``folder``; each rank loads its part.

    Raises HandlerLoadError where the model cannot be split that way.
    """
    from transformers.distributed import DistributedConfig

    check_parallelism(folder, tensor, pipeline)
    sizes = {name: size for name, size in (("tp_size", tensor), ("pp_size", pipeline)) if size > 1}
    return DistributedConfig(**sizes)


def check_parallelism(folder: Path, tensor: int, pipeline: int) -> None:
    """Raise HandlerLoadError where the model in ``folder`` cannot be split that way."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False
    ).get_text_config()
    check_divisible(config, tensor, pipeline, folder)


def find_interface(address: str) -> str:
    """Return the interface by which this machine reaches ``address``; an own address has its own interface.

    Raises OSError where no route leads there.
    """
    family, _, _, _, destination = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(destination)  # of a datagram socket: nothing is sent
        own = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if any(found.address.partition("%")[0] == own for found in addresses):
            return name
    raise OSError(f"no network interface has the address {own}, by which {address} is reached")
