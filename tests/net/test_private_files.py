import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from serve_app.net import private_files


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_files_of_processes_started_in_the_block_are_private(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        with private_files.restricted_umask():
            subprocess.run([sys.executable, "-c", f"open({str(tmp_path / 'in')!r}, 'w')"], check=True)
        (tmp_path / "after").touch()
    finally:
        os.umask(before)
    assert (mode(tmp_path / "in"), mode(tmp_path / "after")) == (0o600, 0o644)


def test_existing_directories_become_private(tmp_path: Path) -> None:
    state = tmp_path / "deep" / "state"
    private_files.make_private_directory(state)
    state.chmod(0o755)
    private_files.make_private_directory(state)
    assert mode(state) == 0o700


def test_runtime_directory_that_others_can_enter_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    directory = private_files.get_runtime_directory()
    assert mode(directory) == 0o700
    assert private_files.get_ray_directory() in (directory, None)
    directory.chmod(0o755)
    with pytest.raises(PermissionError, match="only its owner"):
        private_files.get_runtime_directory()


def test_token_of_an_earlier_version_becomes_private(tmp_path: Path) -> None:
    token = tmp_path / "auth_token"
    private_files.restrict_ray_token(str(token))
    token.write_text("secret")
    token.chmod(0o644)
    private_files.restrict_ray_token(str(token))
    assert mode(token) == 0o600
