"""`torchrelay optimize` beside a server: a model's name in, its faster version registered.

And the gate refuses one.
"""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from serve_app.cli.app import app
from tests.support.server import Server
from tests.support.variant_timings import fix_timings

pytestmark = [pytest.mark.cluster, pytest.mark.nightly]
MODEL = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(32, 2048)
        self.second = torch.nn.Linear(2048, 2048)
        self.last = torch.nn.Linear(2048, 4)

    def forward(self, x):
        return self.last(torch.relu(self.second(torch.relu(self.first(x)))))
"""
HANDLER = "from handlers.base import BaseHandler\n\nclass Handler(BaseHandler):\n    pass\n"
ROW = torch.randn(32, generator=torch.Generator().manual_seed(1)).tolist()


def archive(server: Server, name: str, config: dict[str, Any]) -> None:
    torch.manual_seed(3)
    shapes = {"first": (32, 2048), "second": (2048, 2048), "last": (2048, 4)}
    net = torch.nn.ModuleDict({name: torch.nn.Linear(*shape) for name, shape in shapes.items()})
    weights = io.BytesIO()
    torch.save(net.state_dict(), weights)
    model = {
        "modelName": name,
        "handler": "handler.py",
        "modelFile": "model.py",
        "serializedFile": "weights.pth",
    }
    files = {
        "MAR-INF/MANIFEST.json": json.dumps({"model": {**model, "configFile": "model-config.yaml"}}),
        "model-config.yaml": json.dumps(config),
        "handler.py": HANDLER,
        "model.py": MODEL,
        "weights.pth": weights.getvalue(),
        "samples/a.json": json.dumps(ROW),
        "rows.json": json.dumps([ROW]),
    }
    with zipfile.ZipFile(server.store / f"{name}.mar", "w") as packed:
        for file, content in files.items():
            packed.writestr(file, content)


def test_the_faster_version_is_registered_beside_the_first(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fix_timings(monkeypatch)
    archive(server, "net", {"batchSize": 2})
    answer = server.management.post("/models?url=net.mar&initial_workers=1&synchronous=true")
    assert answer.status_code == 200, answer.text
    try:
        plain = server.http.post("/predictions/net", json=ROW).json()
        words = [
            "--try",
            "int8",
            "--rounds",
            "1",
            "--threads",
            "1",
            "--rtol",
            "0.05",
            "--atol",
            "0.05",
            "--register",
        ]
        places = ["--output", str(tmp_path), "--model-store", str(server.store)]
        done = CliRunner().invoke(
            app, ["optimize", "net", *words, *places, "--management", server.process.management]
        )
        assert done.exit_code == 0, done.output
        assert "net 1.1, int8" in done.output
        found = {version["modelVersion"]: version for version in server.client.describe("net", "all")}
        assert found.keys() == {"1.0", "1.1"}
        assert [worker["status"] for worker in found["1.1"]["workers"]] == ["READY"]
        assert server.http.post("/predictions/net", json=ROW).json() == plain, "callers stay where they were"
        faster = server.http.post("/predictions/net/1.1", json=ROW).json()
        assert faster != plain and faster == pytest.approx(plain, abs=0.1)
    finally:
        for version in ("1.1", "1.0"):
            server.management.delete(f"/models/net/{version}")


def test_a_version_outside_of_its_accuracy_is_never_ready(server: Server) -> None:
    gate = {"samples": "rows.json", "rtol": 0, "atol": 1e-9}
    archive(server, "strict", {"optimize": {"quantize": "int8"}, "accuracy": gate})
    answer = server.management.post("/models?url=strict.mar&initial_workers=1&synchronous=true")
    assert answer.status_code == 500, answer.text
    result = answer.json()["detail"]
    assert "with optimize: {quantize: int8} the model is outside of accuracy (rtol 0, atol 1e-09)" in result
    assert "Take that option out of optimize, or allow more under accuracy." in result
    assert server.management.get("/models/strict").status_code == 404, (
        "a version that never started is not kept"
    )
