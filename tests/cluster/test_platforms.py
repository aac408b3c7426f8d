"""The image's own command with the variables of Azure ML, Hugging Face and Vertex AI."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from serve_app.conformance import ServerUnderTest, run
from tests.support.ports import free_port

pytestmark = [pytest.mark.cluster, pytest.mark.own_server, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
COMMAND = ("torchrelay", "start", "--foreground", "/opt/torchrelay/configs/container.yaml")
SCORE = """
import json
import os

def init():
    global folder
    folder = os.environ["AZUREML_MODEL_DIR"]

def run(raw_data):
    return {"folder": folder, "sum": sum(json.loads(raw_data)["data"])}
"""
HANDLER = """
class EndpointHandler:
    def __init__(self, path=""):
        self.path = path

    def __call__(self, data):
        return [{"label": data["inputs"], **data.get("parameters", {})}]
"""
Start = Callable[..., httpx.Client]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Return ``begin(port, probe, **variables)``: start the entry point, and wait until the probe is 200."""
    command = tmp_path / "bin/torchserve"  # as the image has it
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m serve_app.cli.torchserve "$@"\n')
    command.chmod(0o755)
    (tmp_path / "home/model_store").mkdir(parents=True)
    log = tmp_path / "container.log"
    processes: list[subprocess.Popen[bytes]] = []
    clients: list[httpx.Client] = []

    def begin(port: int, probe: str, **variables: str) -> httpx.Client:
        env = {
            **os.environ,
            "PATH": f"{command.parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "TEMP": str(tmp_path),
            "TORCHRELAY_ENV": str(ROOT / "configs/serve.env"),
            "TORCHRELAY_HOME": str(tmp_path / "home"),
            "MODEL_SERVER_HOME": str(tmp_path / "home"),
            "TORCHRELAY_HEALTH_FILE": str(tmp_path / "health"),
            **variables,
        }
        with log.open("w") as file:
            process = subprocess.Popen(
                [str(ROOT / "cluster/entrypoint.sh"), *COMMAND], env=env, stdout=file, stderr=file
            )
        processes.append(process)
        client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60)
        clients.append(client)
        deadline = time.monotonic() + 240
        while not is_ready(client, probe):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        return client

    yield begin
    for client in clients:
        client.close()
    for process in processes:
        process.send_signal(signal.SIGINT)
        process.wait(120)


def is_ready(client: httpx.Client, probe: str) -> bool:
    try:
        return client.get(probe).status_code == 200
    except httpx.HTTPError:
        return False


def write_properties(home: Path, port: int) -> None:
    """Write addresses of free ports where the platform requires none."""
    management, metrics, grpc, grpc_management = (free_port() for _ in range(4))
    (home / "config.properties").write_text(
        f"inference_address=http://0.0.0.0:{port}\nmodel_store={home}/model_store\n"
        f"management_address=http://0.0.0.0:{management}\nmetrics_address=http://0.0.0.0:{metrics}\n"
        f"grpc_inference_port={grpc}\ngrpc_management_port={grpc_management}\n"
    )


def check(contract: str, client: httpx.Client, instance: object, *paths: str) -> None:
    outcomes = run(contract, ServerUnderTest(client, "model", instance, *paths))
    assert not [outcome for outcome in outcomes if outcome.problem]


def test_a_script_of_azure_is_scored(start: Start, tmp_path: Path) -> None:
    (tmp_path / "app").mkdir()
    (tmp_path / "app/score.py").write_text(SCORE)
    write_properties(tmp_path / "home", port := free_port())
    client = start(
        port, "/", AML_APP_ROOT=f"{tmp_path}/app", AZUREML_ENTRY_SCRIPT="score.py", AZUREML_MODEL_DIR="/m"
    )
    answer = client.post("/score", json={"data": [1, 2]})
    assert (answer.status_code, answer.json()) == (200, {"folder": "/m", "sum": 3})
    assert client.post("/score", content=b"{").status_code == 500
    assert client.get("/score", params={"data": "[3]"}).json()["sum"] == 3
    check("azureml", client, {"data": [1]})
    assert (tmp_path / "health").read_text() == f"http://127.0.0.1:{port}\n"


def test_a_custom_handler_of_hugging_face_answers_at_the_root(start: Start, tmp_path: Path) -> None:
    folder = tmp_path / "repository"
    folder.mkdir()
    (folder / "handler.py").write_text(HANDLER)
    write_properties(tmp_path / "home", port := free_port())
    client = start(port, "/health", HF_MODEL_DIR=str(folder), HF_TASK="text-classification")
    for path in ("/", "/predict"):
        answer = client.post(path, json={"inputs": "a", "parameters": {"k": 1}})
        assert (answer.status_code, answer.json()) == (200, [{"label": "a", "k": 1}])
    assert client.get("/").status_code == 200
    check("hf-endpoint", client, "a")


def test_vertex_starts_the_images_own_command(start: Start, tmp_path: Path) -> None:
    folder = tmp_path / "artifacts"
    folder.mkdir()
    (folder / "handler.py").write_text(HANDLER)
    write_properties(tmp_path / "home", free_port())
    with (tmp_path / "home/config.properties").open("a") as file:
        file.write(f"load_models=model={folder}\ndefault_service_handler=hf_endpoint\n")
    routes = {"AIP_HEALTH_ROUTE": "/v1/e", "AIP_PREDICT_ROUTE": "/v1/e:predict"}
    port = free_port()
    client = start(port, "/v1/e", AIP_HTTP_PORT=str(port), **routes)
    body = {"instances": [{"inputs": "a"}, "b"], "parameters": {"k": 2}}
    answer = client.post("/v1/e:predict", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json() == {"predictions": [[{"label": "a", "k": 2}], [{"label": "b", "k": 2}]]}
    check("vertex", client, "a", "/v1/e", "/v1/e:predict")
