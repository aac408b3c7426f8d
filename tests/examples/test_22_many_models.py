"""The example of many models: archives are created, registered together, and all answer from one pool."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from serve_app.cli.app import app
from tests.support.server import Server

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("nothing_stays"), pytest.mark.nightly]


def test_22_many_models(server: Server, run) -> None:  # type: ignore[no-untyped-def]
    store = server.store / "many"
    try:
        printed = run("22_many_models/archives.py", "--models", "30", "--model-store", str(server.store))
        assert f"30 archives in {store}" in printed
        command = ["models", "--management", server.process.management, "register-all", str(store)]
        registered = CliRunner().invoke(app, [*command, "--model-store", str(server.store)])
        assert registered.exit_code == 0, registered.output
        assert "30 registered of 30" in registered.output
        again = CliRunner().invoke(app, [*command, "--model-store", str(server.store)])
        assert "30 skipped of 30" in again.output
        printed = run("22_many_models/load.py", "--seconds", "5")
    finally:
        shutil.rmtree(store, ignore_errors=True)
    assert "30 models are registered" in printed
    [(answered, failed)] = re.findall(r"(\d+) requests were answered, (\d+) failed", printed)
    assert int(answered) > 0
    assert int(failed) == 0
    [(loaded, mib)] = re.findall(r"(\d+) models are loaded in (\d+) MiB", printed)
    assert 0 < int(loaded) <= 30
    assert int(mib) > 0


def test_the_archives_differ_in_their_weights_alone(tmp_path: Path, run) -> None:  # type: ignore[no-untyped-def]
    run("22_many_models/archives.py", "--models", "2", "--model-store", str(tmp_path))
    first, second = sorted((tmp_path / "many").iterdir())
    assert first.stat().st_size > 100_000
    assert first.read_bytes() != second.read_bytes()
