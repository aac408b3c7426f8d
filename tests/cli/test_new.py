"""`torchrelay new`: the project's own tests pass, and its class can be archived."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from serve_app.cli.app import app

pytestmark = pytest.mark.integration  # the project's tests are a process


@pytest.mark.nightly
def test_the_project_passes_its_tests_and_is_archived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["new", "spam"])
    assert result.exit_code == 0, result.output
    assert "torchrelay serve model.py --name spam --reload" in result.output
    folder = tmp_path / "spam"
    assert "--model-name spam" in (folder / "Dockerfile").read_text()
    assert "NAME" not in (folder / "README.md").read_text()
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    tests = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert "2 passed" in tests.stdout, tests.stdout + tests.stderr
    monkeypatch.chdir(folder)
    result = CliRunner().invoke(app, ["archive", "model.py", "--model-name", "spam"])
    assert result.exit_code == 0, result.output
    assert (folder / "spam.mar").is_file()


def test_an_existing_folder_and_an_invalid_name_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/file").touch()
    result = CliRunner().invoke(app, ["new", "taken"])
    assert (result.exit_code, list((tmp_path / "taken").iterdir())) == (1, [tmp_path / "taken/file"])
    assert CliRunner().invoke(app, ["new", "a b"]).exit_code == 1
    assert not (tmp_path / "a b").exists()
