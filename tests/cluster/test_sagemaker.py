"""The image's entry point with SageMaker's variables, and the calls of a multi-model endpoint."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
import torch
from websockets.sync.client import connect

from serve_app.conformance import ServerUnderTest, run
from tests.support.ports import free_port

pytestmark = [pytest.mark.cluster, pytest.mark.own_server, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
JSON, CSV, NPY = "application/json", "text/csv", "application/x-npy"
ATTRIBUTES = "x-amzn-sagemaker-custom-attributes"
SCRIPT = """
    import json
    import os

    import words
    from sagemaker_inference import content_types

    def model_fn(model_dir, context):
        if os.path.exists(os.path.join(model_dir, "large")):
            raise MemoryError("the model is too large")
        return {"pid": os.getpid(), "batch": context.system_properties["batch_size"]}

    def input_fn(data, content_type):
        return data.split(words.SEPARATOR)

    def predict_fn(data, model):
        if data == ["fail"]:
            raise ValueError("a bad row")
        return model | {"words": data}

    def output_fn(prediction, accept, context):
        attributes = context.get_request_header(0, words.ATTRIBUTES)
        context.set_response_header(0, words.ATTRIBUTES, f"{attributes} seen")
        if accept == "text/plain":
            return (f"{word} " for word in prediction["words"])
        return json.dumps(prediction), content_types.JSON
"""


def write_script(folder: Path) -> Path:
    """Write a model whose script imports a neighbour."""
    (folder / "code").mkdir(parents=True)
    (folder / "code/inference.py").write_text(textwrap.dedent(SCRIPT))
    (folder / "code/words.py").write_text(f"SEPARATOR, ATTRIBUTES = ',', {ATTRIBUTES.title()!r}\n")
    (folder / "model-config.yaml").write_text("batchSize: 4\nmaxBatchDelay: 50\n")
    return folder


def find_port_range() -> int:
    """Return the first of four free ports in succession."""
    while True:
        first = free_port()
        with contextlib.ExitStack() as stack:
            try:
                for port in range(first, first + 4):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except (OSError, OverflowError):
                continue
            return first


class Endpoint:
    """A container of SageMaker, without the container."""

    def __init__(self, folder: Path) -> None:
        self.base, home = folder / "ml", folder / "home"
        self.log = folder / "container.log"
        (self.base / "models").mkdir(parents=True)
        home.mkdir()
        command = folder / "bin/torchserve"  # as the image has it
        command.parent.mkdir()
        command.write_text(f'#!/bin/sh\nexec {sys.executable} -m serve_app.cli.torchserve "$@"\n')
        command.chmod(0o755)
        port, first = free_port(), find_port_range()
        env = {
            **os.environ,
            "PATH": f"{command.parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "TEMP": str(folder),
            "TORCHRELAY_ENV": str(ROOT / "configs/serve.env"),
            "TORCHRELAY_HOME": str(home),
            "SAGEMAKER_BASE_DIR": str(self.base),
            "SAGEMAKER_BIND_TO_PORT": str(port),
            "SAGEMAKER_MULTI_MODEL": "true",
            "SAGEMAKER_SAFE_PORT_RANGE": f"{first}-{first + 3}",
        }
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [str(ROOT / "cluster/entrypoint.sh"), "serve"], env=env, stdout=log, stderr=log
            )
        self.url = f"http://127.0.0.1:{port}"
        self.http = httpx.Client(base_url=self.url, timeout=240)

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + 240  # SageMaker's limit
        while not self._answers_ping():
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.2)

    def _answers_ping(self) -> bool:
        try:
            response = self.http.get("/ping")
        except httpx.HTTPError:
            return False
        return response.status_code == 200 and response.content == b""

    def load(self, name: str) -> httpx.Response:
        url = str(self.base / "models" / name / "model")
        return self.http.post("/models", json={"model_name": name, "url": url})

    def invoke(self, name: str, content: bytes, **headers: str) -> httpx.Response:
        named = {key.replace("_", "-"): value for key, value in headers.items()}
        return self.http.post(f"/models/{name}/invoke", content=content, headers=named)


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[Endpoint]:
    running = Endpoint(tmp_path)
    try:
        yield running
    finally:
        running.http.close()
        running.process.send_signal(signal.SIGINT)  # which stops a server that is still starting, too
        running.process.wait(120)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_models_are_loaded_invoked_and_unloaded(endpoint: Endpoint) -> None:
    models = endpoint.base / "models"
    write_script(models / "scripted/model")
    write_script(models / "large/model").joinpath("large").write_text("")
    (models / "plain/model").mkdir(parents=True)
    torch.jit.script(torch.nn.Flatten(0)).save(str(models / "plain/model/model.pt"))
    endpoint.wait_until_ready()
    assert endpoint.http.get("/models").json() == {"models": []}
    outcomes = run("sagemaker-multi-model", ServerUnderTest(endpoint.http, "", "a"))
    assert not [outcome for outcome in outcomes if outcome.problem]

    loaded = endpoint.load("scripted")
    assert loaded.status_code == 200, loaded.text
    assert loaded.json()["status"] == 'Model "scripted" Version: 1.0 registered with 1 initial workers'
    assert endpoint.load("scripted").status_code == 409
    assert endpoint.load("plain").status_code == 200
    assert endpoint.load("large").status_code == 507
    assert endpoint.load("absent").status_code == 404
    listed = [model["modelName"] for model in endpoint.http.get("/models").json()["models"]]
    assert listed == ["plain", "scripted"]
    page = endpoint.http.get("/models", params={"limit": 1}).json()
    assert [model["modelName"] for model in page["models"]] == ["plain"] and page["nextPageToken"] == "1"
    assert endpoint.http.get("/models/absent").status_code == 404

    answer = endpoint.invoke("scripted", b"a,b", content_type=CSV, **{ATTRIBUTES: "trace"})
    assert (answer.status_code, answer.headers["content-type"]) == (200, JSON), answer.text
    assert answer.headers[ATTRIBUTES] == "trace seen"
    result = answer.json()
    assert (result["words"], result["batch"]) == (["a", "b"], 4)
    failed = endpoint.invoke("scripted", b"fail", content_type=CSV)
    assert (failed.status_code, "a bad row" in failed.text) == (500, True)
    streamed = endpoint.invoke("scripted", b"a,b", content_type=CSV, accept="text/plain")
    assert (streamed.text, streamed.headers["ts_stream_next"]) == ("a b ", "true")
    assert "content-length" not in streamed.headers
    address = endpoint.url.replace("http", "ws") + "/invocations-bidirectional-stream?model_name=scripted"
    with connect(address, open_timeout=60) as connection:
        for word in ("[1", "[2"):
            connection.send(f"{word},b")
            assert json.loads(connection.recv(60))["words"] == [word, "b"]
            assert json.loads(connection.recv(60))["end"]["status"] == 200

    array = io.BytesIO()
    np.save(array, np.float32([[1, 2], [3, 4]]))
    plain = endpoint.invoke("plain", array.getvalue(), content_type=NPY, accept=CSV)
    assert (plain.text, plain.headers["content-type"]) == ("1.0\n2.0\n3.0\n4.0\n", CSV)
    assert endpoint.invoke("plain", b"x", content_type="image/png").status_code == 415

    assert endpoint.http.delete("/models/scripted").status_code == 200
    with contextlib.suppress(psutil.NoSuchProcess):  # Ray ends it as Serve reports its end
        psutil.Process(result["pid"]).wait(60)
    assert endpoint.http.delete("/models/scripted").status_code == 404
    assert endpoint.invoke("scripted", b"a", content_type=CSV).status_code == 404
    assert endpoint.load("scripted").status_code == 200
    assert endpoint.invoke("scripted", b"a", content_type=CSV).json()["words"] == ["a"]
    endpoint.process.send_signal(signal.SIGTERM)
    assert endpoint.process.wait(30) in (0, 130), "SageMaker kills a container after 30 seconds"
