"""The notebook runs against a server, and its experiment ends with a verdict, as in its stored outputs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.support.notebooks import execute, read_output
from tests.support.server import ROOT, Server

EXAMPLE = ROOT / "examples/25_notebook"
pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("nothing_stays"), pytest.mark.nightly]


def test_25_notebook(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("01_first_model", EXAMPLE.name):
        shutil.copytree(ROOT / "examples" / folder, tmp_path / folder)
    monkeypatch.chdir(tmp_path / EXAMPLE.name)
    monkeypatch.setenv("TORCHRELAY_INFERENCE", server.process.inference)
    monkeypatch.setenv("TORCHRELAY_MANAGEMENT", server.process.management)
    monkeypatch.setenv("TORCHRELAY_MODEL_STORE", str(server.store))
    stored = json.loads((EXAMPLE / "ab_test.ipynb").read_text())
    executed = execute(Path("ab_test.ipynb"))
    for before, after in zip(stored["cells"], executed["cells"], strict=True):
        assert before["source"] == after["source"]
        assert bool(before.get("outputs")) == bool(after.get("outputs"))
    for document in (stored, executed):
        texts = "\n".join(read_output(cell) for cell in document["cells"] if cell["cell_type"] == "code")
        assert "users: few 0." in texts and ": better\n" in texts
        assert "many is better than few on right: " in texts
        assert texts.endswith("'2.0'")
