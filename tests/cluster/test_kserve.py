"""The server as KServe's runtime for TorchServe starts it, with a read-only folder in place of
/mnt/models.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from tests.support.archives import make_archive
from tests.support.ports import free_port

pytestmark = [pytest.mark.cluster, pytest.mark.nightly]

ROOT = Path(__file__).parents[2]
HANDLER = """
def handle(data, context):
    return None if data is None else [sum(map(int, row["data"])) for row in data]
"""
OLD = """
def handle(data, context):
    return None if data is None else [row["data"] * 2 for row in data]
"""

# In a process of its own, for its messages have our names.
BY_GRPC = """
import sys
import numpy
import tritonclient.grpc as triton

with triton.InferenceServerClient(sys.argv[1]) as remote:
    asked = triton.InferInput("a", [3], "INT64")
    asked.set_data_from_numpy(numpy.array([1, 2, 3]))
    print(list(remote.infer("sum", [asked]).get_output("a").shape))
"""


class Pod:
    def __init__(self, folder: Path) -> None:
        self.home, mount = folder / "home", folder / "mnt"
        self.home.mkdir()
        command = self.home / "torchserve"  # as the image has it
        command.write_text(f'#!/bin/sh\nexec {sys.executable} -m serve_app.cli.torchserve "$@"\n')
        command.chmod(0o755)
        store, config = mount / "model-store", mount / "config"
        store.mkdir(parents=True)
        config.mkdir()
        versions = {"1.0": {"defaultVersion": True, "minWorkers": 1, "maxWorkers": 1, "batchSize": 1}}
        for name, handler, result in (("sum", HANDLER, None), ("old", OLD, {"envelope": "kserve"})):
            make_archive(store, name, handler, config=result).rename(store / f"{name}.mar")
        models = {name: {"1.0": {**versions["1.0"], "marName": f"{name}.mar"}} for name in ("sum", "old")}
        snapshot = json.dumps({"name": "startup.cfg", "modelCount": 2, "models": models})
        (config / "config.properties").write_text(
            "inference_address=http://0.0.0.0:8085\nmanagement_address=http://0.0.0.0:8085\n"
            "metrics_address=http://0.0.0.0:8082\ngrpc_inference_port=7070\ngrpc_management_port=7071\n"
            "enable_envvars_config=true\ninstall_py_dep_per_model=true\nmetrics_format=prometheus\n"
            f"model_store=/mnt/models/model-store\nmodel_snapshot={snapshot}\n"
        )
        for path in (*mount.rglob("*"), mount):
            path.chmod(0o555 if path.is_dir() else 0o444)
        # Ports of its own, as TorchServe's variables say them; in a pod they are KServe's.
        self.rest, self.metrics, self.grpc = (f"127.0.0.1:{free_port()}" for _ in range(3))
        addresses = {
            "INFERENCE": self.rest,
            "METRICS": self.metrics,
            "MANAGEMENT": f"127.0.0.1:{free_port()}",
        }
        self.env = {
            **os.environ,
            **{f"TS_{name}_ADDRESS": f"http://{address}" for name, address in addresses.items()},
            "TS_GRPC_INFERENCE_PORT": self.grpc.rpartition(":")[2],
            "TS_GRPC_MANAGEMENT_PORT": str(free_port()),
            "TEMP": str(self.home),
            "PATH": f"{self.home}:{os.environ['PATH']}",
            "TORCHRELAY_ENV": str(ROOT / "configs/serve.env"),
            "TS_SERVICE_ENVELOPE": "kservev2",
            "PROTOCOL_VERSION": "grpc-v2",
        }
        runtime = next(yaml.safe_load_all((ROOT / "cluster/kserve/runtime.yaml").read_text()))
        (container,) = runtime["spec"]["containers"]
        self.words = [word.replace("/mnt/models", str(mount)) for word in container["args"]]

    def run(self) -> subprocess.Popen[str]:
        command = [str(ROOT / "cluster/entrypoint.sh"), *self.words]
        log = (self.home / "container.log").open("w")
        with log:
            return subprocess.Popen(command, cwd=self.home, env=self.env, stdout=log, stderr=log, text=True)


@pytest.fixture
def pod(tmp_path: Path) -> Iterator[tuple[Pod, subprocess.Popen[str]]]:
    pod = Pod(tmp_path)
    process = pod.run()
    try:
        yield pod, process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        process.wait(60)


def test_kserves_arguments_start_a_server_that_its_clients_ask(
    pod: tuple[Pod, subprocess.Popen[str]],
) -> None:
    here, process = pod
    deadline = time.monotonic() + 300
    with httpx.Client(base_url=f"http://{here.rest}", timeout=30) as client:
        while not ready(client):
            assert process.poll() is None and time.monotonic() < deadline, (
                here.home / "container.log"
            ).read_text()
            time.sleep(0.2)
        assert client.get("/v2/models/sum/ready").json() == {"name": "sum", "ready": True}
        result = client.get("/v1/models/old").json()
        assert (result["name"], result["ready"]) == ("old", True)

        answer = client.post("/v1/models/old:predict", json={"instances": [{"data": 1}]})
        assert answer.json() == {"predictions": [2]}
        tensor = {"name": "a", "shape": [3], "datatype": "INT64", "data": [1, 2, 3]}
        answer = client.post("/v2/models/sum/infer", json={"id": "q", "inputs": [tensor]})
        assert answer.status_code == 200, answer.text
        assert (answer.json()["id"], answer.json()["outputs"][0]["data"]) == ("q", [6])

        requested = subprocess.run(
            [sys.executable, "-c", BY_GRPC, here.grpc], capture_output=True, text=True, timeout=300
        )
        assert (requested.returncode, requested.stdout) == (0, "[1]\n"), requested.stderr
        page = httpx.get(f"http://{here.metrics}/metrics", timeout=300).text
        assert 'torchrelay_requests_total{model="old"' in page
        refused = client.post("/models", params={"url": "sum.mar"})
        assert refused.status_code in (404, 405), "whoever manages can run code: not from here"
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) in (0, 130)


def ready(client: httpx.Client) -> bool:
    try:
        return client.get("/health/ready").status_code == 200
    except httpx.HTTPError:
        return False
