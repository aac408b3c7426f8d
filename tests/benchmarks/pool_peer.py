"""MLServer with as many models of the pool's benchmark as fit into the memory of Torchrelay's processes."""

from __future__ import annotations

import asyncio
import json
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.benchmarks.environments import CACHE, interpreter
from tests.benchmarks.pool_load import INPUTS, ZipfLoad
from tests.benchmarks.servers import Peer, free_ports, started

_STEP = 10  # models between two measurements of the memory
_MIB = 1 << 20
_IMPLEMENTATION = "tests.benchmarks.applications.mlserver_models.StoredPerceptron"


class MLServerLoad(ZipfLoad):
    """The same load over the Open Inference Protocol."""

    async def send(self, client: httpx.AsyncClient, name: str, row: Sequence[float]) -> httpx.Response:
        tensor = {"name": "x", "shape": [1, INPUTS], "datatype": "FP32", "data": list(row)}
        return await client.post(f"/v2/models/{name}/infer", json={"inputs": [tensor]})

    def is_load(self, name: str, document: Any) -> bool:
        assert document["model_name"] == name
        return False


def write_model(home: Path, archive: Path, name: str) -> None:
    """Write one archive's model as MLServer reads it."""
    folder = home / name
    folder.mkdir(parents=True)
    with zipfile.ZipFile(archive) as opened:
        weights = opened.read("weights.pt")
        hidden = int(opened.read("helper.py").decode().partition(f"Linear({INPUTS}, ")[2].partition(")")[0])
    (folder / "weights.pt").write_bytes(weights)
    parameters = {"uri": str(folder / "weights.pt"), "extra": {"hidden": hidden}}
    settings = {"name": name, "implementation": _IMPLEMENTATION, "parameters": parameters}
    (folder / "model-settings.json").write_text(json.dumps(settings))


@contextmanager
def start(folder: Path, cache: Path = CACHE) -> Iterator[Peer]:
    """Start MLServer with no model loaded. Raises PeerFailed."""
    python = interpreter("mlserver", cache)
    port, grpc, metrics = free_ports(3)
    ports = {"http_port": port, "grpc_port": grpc, "metrics_port": metrics}
    settings = {"host": "127.0.0.1", "debug": False, "load_models_at_startup": False, **ports}
    (folder / "settings.json").write_text(json.dumps(settings))
    command = [str(python.with_name("mlserver")), "start", str(folder)]
    environment = {"OMP_NUM_THREADS": "1"}
    base = f"http://127.0.0.1:{port}"
    with started("MLServer", command, base, folder=folder, env=environment, health="/v2/health/live") as peer:
        yield peer


def load_models(peer: Peer, names: Sequence[str], limit_mib: float) -> list[str]:
    """Load models until the server's processes have the memory; return those that were loaded."""
    loaded: list[str] = []
    with httpx.Client(base_url=peer.base, timeout=120) as client:
        for name in names:
            if len(loaded) % _STEP == 0 and peer.memory()[0] > limit_mib * _MIB:
                break
            client.post(f"/v2/repository/models/{name}/load").raise_for_status()
            loaded.append(name)
    return loaded


def measure(
    folder: Path, archives: Path, names: Sequence[str], limit_mib: float, seconds: float
) -> tuple[int, float, MLServerLoad]:
    """Return how many of ``names`` fit, the MiB of the processes, and a finished load on those."""
    for name in names:
        write_model(folder, archives / f"{name}-1.0.mar", name)
    with start(folder) as peer:
        loaded = load_models(peer, names, limit_mib)
        load = MLServerLoad(peer.base, loaded)
        asyncio.run(load.run(seconds))
        return len(loaded), peer.memory()[0] / _MIB, load
