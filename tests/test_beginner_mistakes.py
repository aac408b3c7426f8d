"""Mistakes of beginners: each error states the failure, its place, and the fix."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import yaml
from typer.testing import CliRunner

from handlers.errors import HandlerLoadError, PredictionException
from handlers.images import open_image
from handlers.loading.loader import load
from serve_app.cli.app import app
from serve_app.cli.dev_server import DevServer
from serve_app.errors import InvalidArchive
from serve_app.model_store.archive import Archive
from serve_app.model_store.model_check import check_model
from tests.support.certificates import make_pair
from tests.support.handler_server import serve_handler
from tests.support.ports import free_port
from tests.support.protocol_servers import management, over_http

__all__ = ["management", "over_http"]
pytestmark = pytest.mark.integration

ROOT = Path(__file__).parent.parent


POINT = """
from pydantic import BaseModel

class Point(BaseModel):
    x: float

class Scores:
    def predict(self, request: Point) -> float:
        return request.x
"""
TENSOR = """
import torch

class Total:
    def predict(self, request: torch.Tensor) -> float:
        return request.sum().item()
"""
JSON, FORM = "application/json", "application/x-www-form-urlencoded"  # curl -d sends a form by default


@pytest.mark.parametrize(
    ("source", "body", "content_type", "message"),
    [
        (POINT, '{"x": "one"}', JSON, "request is invalid: x: Input should be a valid number"),
        (POINT, "", JSON, "request is empty: send JSON as the body of a POST."),
        (POINT, '{"x": 1}', FORM, "x: Field required. The request is a form; for JSON, send the header"),
        (TENSOR, "[1, 2]", FORM, "numbers. The request is a form; for JSON, send the header Content-Type"),
        (TENSOR, "[[1], [2, 3]]", JSON, "request is not a JSON list of numbers: setting an array element"),
    ],
)
def test_request(tmp_path: Path, source: str, body: str, content_type: str, message: str) -> None:
    (tmp_path / "model.py").write_text(source)
    with serve_handler("m", "model.py", tmp_path) as url:
        headers = {"content-type": content_type}
        response = httpx.post(f"{url}/predictions/m", content=body, headers=headers, timeout=60)
    assert response.status_code == 400
    assert message in response.json()["message"]


def test_a_prediction_for_which_the_host_has_too_little_memory(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(TENSOR.replace("request.sum()", "torch.empty(2**46).sum()"))
    with serve_handler("m", "model.py", tmp_path) as url:
        response = httpx.post(f"{url}/predictions/m", json=[1.0], timeout=60)
    assert (response.status_code, response.headers["x-torchrelay-reason"]) == (507, "out_of_memory")


def test_text_that_is_sent_as_an_image() -> None:
    with pytest.raises(PredictionException) as caught:
        open_image(b"hello, model!")
    assert (
        "no known format begins with b'hello, m'. Send the image's file as the body" in caught.value.message
    )


def test_a_weights_file_that_is_registered_as_an_archive(tmp_path: Path) -> None:
    weights = BytesIO()
    torch.save(torch.nn.Linear(2, 1).state_dict(), weights)
    (tmp_path / "model.pt").write_bytes(weights.getvalue())
    shutil.unpack_archive(tmp_path / "model.pt", tmp_path / "unpacked", "zip")
    with pytest.raises(InvalidArchive, match=r"is a file of torch\.save, and no archive; make one with"):
        check_model(Archive.read(tmp_path / "unpacked", "model.pt"))


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("code/inference.py", "has a script in code/; register it with the handler sagemaker"),
        ("config.pbtxt", "is a model of Triton; make an archive of its ONNX or TorchScript file"),
        ("readme.txt", "names no handler; name one when registering"),
    ],
)
def test_a_folder_of_another_server(tmp_path: Path, file: str, message: str) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).touch()
    with pytest.raises(InvalidArchive, match=message):
        check_model(Archive.read(tmp_path, "folder"))


def test_a_function_that_the_handler_file_lacks(tmp_path: Path) -> None:
    (tmp_path / "handler.py").write_text("def preprocess(data):\n    return data\n")
    with pytest.raises(HandlerLoadError, match=r"no function or class 'run' in it\. It defines preprocess"):
        load("handler.py:run", str(tmp_path), {})


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "500"})
    assert result.exit_code == 1, result.output
    return result.stderr


def test_a_command_that_the_server_refuses(
    management: Callable[..., Any], over_http: Callable[..., str]
) -> None:
    error = run("models", "--management", over_http(management().app), "describe", "digitz")
    assert 'Model not found: digitz (404)\nList models with "torchrelay models list".' in error


def test_remedies_name_commands_that_exist() -> None:
    commands = re.findall(r'"torchrelay ([a-z -]+)"', (ROOT / "serve_app/cli/remedies.yaml").read_text())
    assert len(commands) > 4
    for command in commands:
        assert CliRunner().invoke(app, [*command.split(), "--help"]).exit_code == 0, command


def test_a_port_with_other_routes(over_http: Callable[..., str], management: Callable[..., Any]) -> None:
    address = over_http(management(enable_model_api=False).app)
    error = run("models", "--management", f"{address}/v9")
    assert "Predictions belong to port 8080, models to 8081." in error


def test_https_where_the_port_has_none(
    over_http: Callable[..., str], management: Callable[..., Any], tmp_path: Path
) -> None:
    plain = over_http(management().app)
    error = run("models", "--management", plain.replace("http:", "https:"))
    assert f"The port has no TLS: name {plain}" in error
    make_pair(tmp_path)
    certificate, key = sorted(tmp_path.glob("*.pem"), key=lambda path: "key" in path.name)[:2]
    secure = over_http(management().app, ssl_certfile=str(certificate), ssl_keyfile=str(key))
    error = run("models", "--management", secure.replace("https:", "http:"))
    assert f"The port may require TLS: try {secure}" in error
    assert "Trust the certificate with SSL_CERT_FILE=FILE." in run("models", "--management", secure)


def test_no_server() -> None:
    error = run("models", "--management", "http://127.0.0.1:1")
    assert "Start a server with `torchrelay start`, or name the address" in error


def write_config(file: Path, home: Path, **args: Any) -> list[str]:
    """Write an app.yaml; return the command that starts its server."""
    document = yaml.safe_load((ROOT / "configs/app.yaml").read_text())
    document["http_options"]["port"] = free_port()
    ports = {
        "management": {"port": free_port(), "metrics_port": free_port()},
        "grpc": {"port": 0, "management_port": 0},
    }
    document["applications"][0]["args"] = {"home": str(home), **ports, **args}
    file.write_text(yaml.safe_dump(document))
    return ["start", str(file), "--env", str(ROOT / "configs/serve.env")]


def test_a_state_folder_that_cannot_be_created(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    error = run(*write_config(tmp_path / "app.yaml", tmp_path, control={"state_dir": "file/state"}))
    assert f"{tmp_path}/file/state cannot be created: Not a directory; let the user " in error
    assert f"change control.state_dir in {tmp_path}/app.yaml" in error


def test_a_full_disk(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    arguments = write_config(tmp_path / "app.yaml", disk)
    script = f'mount -t tmpfs -o size=1m none "{disk}" && exec "$@"'
    namespace = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, "sh"]
    done = subprocess.run(
        [*namespace, sys.executable, "-m", "serve_app.cli", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "500"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip("needs user namespaces with mounts")
    assert done.returncode == 1
    assert f"{disk}/state: its disk has 1 MiB left, and the server needs 32; free space" in done.stderr


def test_an_archive_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text("class Model:\n    def predict(self, request):\n        return request\n")
    (tmp_path / "m.mar").mkdir()
    error = run("archive", str(tmp_path / "m.py"), "-f", "--export-path", "/proc")
    assert "/proc/m.mar cannot be written: No such file or directory; name another folder with" in error


def test_a_state_dict_is_archived_without_its_class(tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(2, 1).state_dict(), tmp_path / "m.pt")
    options = {"--model-name": "m", "--version": "1.0", "--handler": "base_handler"}
    options |= {"--serialized-file": str(tmp_path / "m.pt"), "--export-path": str(tmp_path)}
    result = CliRunner().invoke(app, ["archive", *(word for pair in options.items() for word in pair)])
    assert result.exit_code == 0, result.output
    assert "m.pt will be refused: this is no TorchScript model. For a state dict, add the" in result.stderr


def test_python_that_is_too_old() -> None:
    program = "import sys; sys.version_info = (3, 9, 18); from serve_app.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert f"needs Python 3.10 to 3.13, and {sys.executable} is 3.9.18. Create an environment" in done.stderr


def test_make_with_a_python_that_is_too_old(tmp_path: Path) -> None:
    """An interpreter that prints 3.9 stands for one that CI does not have."""
    python = tmp_path / "python3.9"
    python.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.9.18 && exit 0\nexit 1\n')
    python.chmod(0o755)
    command = ["make", "-f", ROOT / "Makefile", "run", f"PYTHON={python}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0
    assert f"{python} is Python 3.9.18, and Python 3.10 to 3.13 is needed." in done.stderr
    assert not (tmp_path / ".venv").exists()


def test_the_development_server_shows_the_traceback_of_a_failed_prediction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert DevServer().create().settings.inference.handler_errors == "traceback"
