"""`torchrelay tune`: invalid input has no side effect; a whole run on a real server."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from serve_app.cli.app import app
from serve_app.cli.commands.tune import parse_duration
from serve_app.cli.variant_search import promising_variants
from tests.support.archives import ECHO, make_archive

pytestmark = pytest.mark.integration

DESCRIPTION = {
    "modelName": "echo", "modelVersion": "1.0", "modelUrl": "echo-1.0.mar", "minWorkers": 1, "batchSize": 1,
    "maxBatchDelay": 100, "workers": [],
}  # fmt: skip


class FakeApi:
    """A management and inference API with the model echo, whose statistics grow by ``traffic`` each time."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.traffic = self.count = 0
        self.refusal: tuple[int, Any] = (404, {"message": "Model not found"})

    def __call__(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        self.calls.append((method, path))
        if method == "DELETE":
            return self.refusal
        if path.startswith("/v2/models/echo/stats"):
            self.count += self.traffic
            stats = {"success": {"count": self.count}, "fail": {"count": 0}}
            return 200, {"model_stats": [{"inference_stats": stats}]}
        if path.startswith("/models/echo"):
            return 200, [DESCRIPTION]
        return (200, {"models": []}) if path.startswith("/models?") else (404, {"message": f"No {path}"})


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "model_store"
    folder.mkdir()
    make_archive(folder, "echo", ECHO, files={"x.txt": "x"}, config={"samples": ["x.txt"]})
    monkeypatch.chdir(tmp_path)
    return folder


@pytest.fixture
def api() -> FakeApi:
    return FakeApi()


@pytest.fixture
def tune(store: Path, api: FakeApi, serve_json: Callable[..., str]) -> Callable[..., str]:
    """Run the command, which must fail and leave the folder as it is; return its output."""
    url = serve_json(api)

    def run(*arguments: str) -> str:
        before = sorted(store.parent.rglob("*"))
        command = ["tune", *arguments, "--management", url, "--inference", url]
        result = CliRunner().invoke(app, command, env={"COLUMNS": "300"})
        assert result.exit_code in (1, 2), result.output
        assert sorted(store.parent.rglob("*")) == before
        assert ("POST", "/models") not in [(m, path.partition("?")[0]) for m, path in api.calls]
        return " ".join(result.output.split())

    return run


@pytest.mark.parametrize(
    ("text", "seconds"), [("100ms", 0.1), ("0.5s", 0.5), (" 2s ", 2.0), (".5ms", 0.0005)]
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["100", "ms", "-5ms", "0ms", "1e3ms", "601s", "5 ms", "5m"])
def test_a_malformed_limit_is_refused(tune: Callable[..., str], text: str) -> None:
    assert f"--p99 is '{text}'; write a duration" in tune("echo", f"--p99={text}")


def test_invalid_arguments_are_reported(tune: Callable[..., str], store: Path) -> None:
    bare = make_archive(store, "bare", ECHO)
    (store / "a.png").touch()
    several = ["--data", str(store / "echo-1.0.mar"), "--data", str(store / "a.png")]
    for arguments, message in (
        (["gone"], "No /models/gone"),
        (["gone.mar"], "There is no archive gone.mar"),
        ([str(bare)], "no sample requests. Pass some with --data FILE"),
        (["echo", "--data", "gone.json"], "There is no sample gone.json"),
        (["echo", *several], "The samples are of several types (application/octet-stream, image/png)"),
        (["echo", "--try", "int4"], "Unknown variant 'int4'"),
        (["echo", "--model-store", "gone"], "There is no model store gone"),
        (["echo", "--output", str(bare)], "is a file; choose a folder with --output"),
        (["echo", "--minutes", "0"], "'--minutes'"),
    ):
        assert message in tune(*arguments, "--p99", "9ms")


def test_a_model_with_live_traffic_is_left_alone(tune: Callable[..., str], api: FakeApi) -> None:
    api.traffic = 3
    assert "echo has live traffic: 3 requests" in tune("echo", "--p99", "9ms")


def test_a_server_without_the_model_api_is_reported(tune: Callable[..., str], api: FakeApi) -> None:
    api.refusal = 405, {"message": "Requested method is not allowed, please refer to API document."}
    assert "method is not allowed" in tune("echo", "--p99", "9ms")


def test_another_active_run_is_reported(tune: Callable[..., str], store: Path) -> None:
    other = store / ".tune" / "0123abcd"
    other.mkdir(parents=True)
    descriptor = os.open(other / "lock", os.O_CREAT | os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        assert "Another run of torchrelay tune uses" in tune("echo", "--p99", "9ms")
    finally:
        os.close(descriptor)


def test_a_server_that_does_not_respond_is_reported(store: Path) -> None:
    for arguments in (["echo"], [str(store / "echo-1.0.mar")]):
        command = ["tune", *arguments, "--p99", "9ms", "--management", "http://127.0.0.1:1"]
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 1 and "No server responds at http://127.0.0.1:1" in result.output
    assert sorted(path.name for path in store.parent.iterdir()) == ["model_store"]


def test_variants_that_cannot_win_are_not_tried() -> None:
    variants = [
        {"name": name, "ms": {"1": one, "8": eight}, "outside": outside}
        for name, one, eight, outside in (
            ("plain", 1.0, 4.0, ""),
            ("slower", 1.2, 4.3, ""),
            ("onnx", 1.5, 3.0, ""),
            ("int8", 0.5, 2.0, "a number differs"),
        )
    ]
    assert promising_variants({"variants": variants, "failed": {}}) == ["onnx"]
    assert promising_variants({"variants": [], "failed": {"onnx": "no"}}) == []
