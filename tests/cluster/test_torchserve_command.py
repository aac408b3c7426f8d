"""The command `torchserve` in a TorchServe user's folder: started, used, stopped, started again."""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.archives import ECHO, make_archive, says
from tests.support.certificates import make_pair
from tests.support.ports import free_port

pytestmark = [pytest.mark.cluster, pytest.mark.nightly]


class Installation:
    """A folder as TorchServe's users have it, and the command run in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = folder / "model_store"
        self.store.mkdir()
        make_pair(folder)
        self.inference = f"https://127.0.0.1:{free_port()}"
        self.management = f"http://127.0.0.1:{free_port()}"
        (folder / "config.properties").write_text(
            f"inference_address={self.inference}\n"
            f"management_address={self.management}\n"
            f"metrics_address=http://127.0.0.1:{free_port()}\n"
            f"grpc_inference_port={free_port()}\ngrpc_management_port={free_port()}\n"
            "certificate_file=certificate.pem\nprivate_key_file=key.pem\n"
            "load_models=echo.mar\n"
            "models={\\\n"
            '  "echo": {"1.0": {"minWorkers": 1, "batchSize": 4, "responseTimeout": 33}}\\\n'
            "}\n"
            "number_of_netty_threads=32\n"
        )
        self.env = {**os.environ, "TEMP": str(folder)}
        self.trust = ssl.create_default_context(cafile=str(folder / "certificate.pem"))

    def run(self, *words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "serve_app.cli.torchserve", *words],
            cwd=cwd or self.folder,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=300,
        )

    def start_in_the_foreground(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-u", "-m", "serve_app.cli.torchserve", "--foreground", *words],
            cwd=self.folder,
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def key(self, kind: str) -> dict[str, str]:
        keys = json.loads((self.folder / "key_file.json").read_text())
        return {"authorization": f"Bearer {keys[kind]['key']}"}

    def predict(self, model: str, body: bytes) -> httpx.Response:
        url = f"{self.inference}/predictions/{model}"
        return httpx.post(url, content=body, headers=self.key("inference"), verify=self.trust, timeout=60)

    def describe(self, model: str) -> dict:
        url = f"{self.management}/models/{model}"
        return httpx.get(url, headers=self.key("management"), timeout=30).json()[0]

    def wait(self, condition: Callable[[], bool], max_wait: float = 180.0) -> None:
        deadline = time.monotonic() + max_wait
        while not condition():
            assert time.monotonic() < deadline, (
                self.folder / "logs/config/torchrelay/logs/server.log"
            ).read_text()
            time.sleep(0.1)


@pytest.fixture
def installation(tmp_path: Path) -> Iterator[Installation]:
    here = Installation(tmp_path)
    try:
        yield here
    finally:
        here.run("--stop")


def test_a_torchserve_users_day(installation: Installation, tmp_path: Path) -> None:
    here = installation
    make_archive(here.store, "echo", ECHO).rename(here.store / "echo.mar")
    make_archive(here.store, "late", says("registered at run time")).rename(here.store / "late.mar")
    flags = "--model-store", "model_store", "--enable-model-api"

    started = here.run("--start", *flags)
    assert (started.returncode, started.stdout) == (0, "Model server started.\n"), started.stderr
    assert (tmp_path / ".model_server.pid").is_file()
    assert here.run("--start", *flags).stdout == (
        "TorchServe is already running, please use torchserve --stop to stop TorchServe.\n"
    )

    # What the file asked for is there, behind TLS and tokens.
    here.wait(lambda: here.predict("echo", b"hello").text == "hello")
    described = here.describe("echo")
    assert (described["batchSize"], described["responseTimeout"]) == (4, 33)
    unasked = httpx.post(f"{here.inference}/predictions/echo", content=b"x", verify=here.trust, timeout=60)
    assert (unasked.status_code, unasked.json()["type"]) == (400, "InvalidKeyException")
    with pytest.raises(httpx.HTTPError):
        httpx.get(here.inference.replace("https", "http") + "/ping")

    # What is registered at run time comes back after a stop, which may be called from anywhere.
    parameters = {"url": "late.mar", "initial_workers": 1}
    registered = httpx.post(
        f"{here.management}/models", params=parameters, headers=here.key("management"), timeout=120
    )
    assert registered.status_code == 200, registered.text
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    stopped = here.run("--stop", cwd=elsewhere)
    assert (stopped.returncode, stopped.stdout) == (0, "TorchServe has stopped.\n")
    assert not (tmp_path / "key_file.json").exists()
    assert here.run("--stop").stdout == "TorchServe is not currently running.\n"

    foreground = here.start_in_the_foreground(*flags)
    try:
        assert foreground.stdout is not None
        result = foreground.stdout.readline()
        assert result == "Model server started.\n", result + foreground.stdout.read()
        here.wait(lambda: here.predict("late", b"").text == "registered at run time")
        assert here.run("--stop").stdout == "TorchServe has stopped.\n"
        log = foreground.stdout.read()
        assert "late--1.0" in log
        assert foreground.wait(120) == 0
    finally:
        foreground.kill()
        foreground.wait()
        foreground.stdout.close()
