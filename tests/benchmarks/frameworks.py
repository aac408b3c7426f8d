"""Other servers with the same echo and mlp, each with its own way to write a model and its own batching."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from serve_app.cli.server_process import read_env
from tests.benchmarks.archives import MODELS, Model
from tests.benchmarks.environments import CACHE, interpreter
from tests.benchmarks.servers import RAY_PORTS, Peer, bare, free_ports, started

BATCH = 16
# For how long a batch waits for more rows, where a framework has a fixed time.
BATCH_DELAY_S = 0.002
_APPLICATIONS = Path(__file__).parent / "applications"
_ONE_THREAD = {"OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Framework:
    """A server to compare with: how it starts, and how its models are requested where that differs."""

    start: Callable[[Path], AbstractContextManager[Peer]]
    path: str = "/predictions/{model}"
    models: Mapping[str, Model] = field(default_factory=lambda: MODELS)

    def url(self, peer: Peer, model: str) -> str:
        return peer.base + self.path.format(model=model)


@contextmanager
def litserve(folder: Path, cache: Path = CACHE) -> Iterator[Peer]:
    """LitServe with one worker for each model. Raises PeerFailed."""
    python = interpreter("litserve", cache)
    (port,) = free_ports(1)
    command = [str(python), str(_APPLICATIONS / "litserve_app.py"), str(port)]
    how: dict[str, Any] = {"folder": folder, "env": _ONE_THREAD, "health": "/health"}
    with started("LitServe", command, f"http://127.0.0.1:{port}", **how) as peer:
        yield peer


@contextmanager
def mlserver(folder: Path, cache: Path = CACHE) -> Iterator[Peer]:
    """MLServer with its one worker process, adaptive batching and no metrics' port. Raises PeerFailed."""
    python = interpreter("mlserver", cache)
    port, grpc, metrics = free_ports(3)
    home = folder / "mlserver"
    shutil.rmtree(home, ignore_errors=True)
    ports = {"http_port": port, "grpc_port": grpc, "metrics_port": metrics}
    _write(home / "settings.json", {"host": "127.0.0.1", "debug": False, **ports})
    for name, cls in (("echo", "Echo"), ("mlp", "Perceptron")):
        implementation = f"tests.benchmarks.applications.mlserver_models.{cls}"
        batching = {"max_batch_size": BATCH, "max_batch_time": BATCH_DELAY_S}
        settings = {"name": name, "implementation": implementation, **batching}
        _write(home / name / "model-settings.json", settings)
    command = [str(python.with_name("mlserver")), "start", str(home)]
    how: dict[str, Any] = {"folder": home, "env": _ONE_THREAD, "health": "/v2/health/ready"}
    with started("MLServer", command, f"http://127.0.0.1:{port}", **how) as peer:
        yield peer


@contextmanager
def bentoml(folder: Path, cache: Path = CACHE) -> Iterator[Peer]:
    """BentoML with one worker and adaptive batching. Raises PeerFailed."""
    python = interpreter("bentoml", cache)
    (port,) = free_ports(1)
    home = folder / "bentoml"
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir()
    command = [str(python.with_name("bentoml")), "serve", "tests.benchmarks.applications.bentoml_app:Models"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    env = {**_ONE_THREAD, "BENTOML_HOME": str(home), "BENTOML_DO_NOT_TRACK": "True"}
    how: dict[str, Any] = {"folder": home, "env": env, "health": "/readyz"}
    with started("BentoML", command, f"http://127.0.0.1:{port}", **how) as peer:
        yield peer


@contextmanager
def ray_serve(folder: Path) -> Iterator[Peer]:
    """Ray Serve alone, as it is installed: its proxy, one replica for each model, @serve.batch."""
    (port,) = free_ports(1)
    ports = {name: str(port) for name, port in zip(RAY_PORTS, free_ports(len(RAY_PORTS)))}
    with tempfile.TemporaryDirectory(prefix="bench-ray-") as home:  # a short path: Ray has sockets in it
        command = [sys.executable, str(_APPLICATIONS / "ray_serve_app.py"), str(port), home]
        env = {**_ONE_THREAD, **ports, "RAY_USAGE_STATS_ENABLED": "0"}
        with started("Ray Serve", command, f"http://127.0.0.1:{port}", folder=folder, env=env) as peer:
            yield peer


@contextmanager
def bare_parser(folder: Path, configs: Path, archive: Path) -> Iterator[Peer]:
    """Start a parser and a handler thread behind Ray Serve's HAProxy, for the model of one archive."""
    port, front = free_ports(2)
    home = folder / f"bare-parser-{archive.stem}"
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir()
    ports = {name: str(port) for name, port in zip(RAY_PORTS, free_ports(len(RAY_PORTS)))}
    command = [sys.executable, "-m", "tests.benchmarks.bare_parser", str(archive), archive.stem]
    command += [str(port), str(front), str(home)]
    env = {**read_env(configs / "serve.env"), **ports, **_ONE_THREAD}
    with started("bare-parser", command, f"http://127.0.0.1:{front}", folder=home, env=env) as peer:
        yield peer


def _write(file: Path, document: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(document))


def _tensor(name: str, data: list[Any], datatype: str, shape: list[int]) -> bytes:
    tensor = {"name": name, "shape": shape, "datatype": datatype, "data": data}
    return json.dumps({"inputs": [tensor]}).encode()


def _outputs(answer: Any) -> dict[str, Any]:
    return {output["name"]: output["data"] for output in answer["outputs"]}


def _mlp_tensors(answer: Any) -> bool:
    outputs = _outputs(answer)
    return MODELS["mlp"].check({"class": outputs["class"][0], "logits": outputs["logits"]})


_TEXT = json.loads(MODELS["echo"].body)["text"]
_ROW = json.loads(MODELS["mlp"].body)
_MLSERVER = {
    "echo": replace(
        MODELS["echo"],
        body=_tensor("text", [_TEXT], "BYTES", [1]),
        check=lambda answer: _outputs(answer)["text"] == [_TEXT],
    ),
    "mlp": replace(MODELS["mlp"], body=_tensor("x", _ROW, "FP32", [1, 64]), check=_mlp_tensors),
}
_BENTOML = {
    "echo": replace(
        MODELS["echo"],
        body=json.dumps({"texts": [_TEXT]}).encode(),
        check=lambda answer: answer == [_TEXT],
    ),
    "mlp": replace(
        MODELS["mlp"],
        body=json.dumps({"rows": [_ROW]}).encode(),
        check=lambda answer: MODELS["mlp"].check(answer[0]),
    ),
}
FRAMEWORKS = {
    "fastapi": Framework(bare),
    "litserve": Framework(litserve),
    "mlserver": Framework(mlserver, "/v2/models/{model}/infer", _MLSERVER),
    "bentoml": Framework(bentoml, models=_BENTOML),
    "ray-serve": Framework(ray_serve),
}
