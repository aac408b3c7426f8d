"""The key that commands read from the server's key file."""

from __future__ import annotations

from pathlib import Path

import pytest

from serve_app.cli.api_client import key_file

LOCAL = "http://127.0.0.1:8081"


def test_the_key_file_is_in_this_folder_or_in_the_server_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, home = tmp_path / "here", tmp_path / "home"
    for folder in (here, home):
        folder.mkdir()
        (folder / "key_file.json").touch()
    monkeypatch.chdir(here)
    monkeypatch.setenv("TORCHRELAY_HOME", str(home))
    assert key_file(LOCAL) == Path("key_file.json")
    (here / "key_file.json").unlink()
    assert key_file(LOCAL) == home / "key_file.json"
    assert key_file("https://server.example:8081") is None
