"""The listing of a repository of models: which paths are versions, and when an entry changes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from serve_app.errors import DownloadFailed
from serve_app.model_store import object_stores
from serve_app.model_store.repository import Repository, RepositoryVersion
from serve_app.settings import ModelStoreSettings, RepositorySettings


def create(root: Path, *files: str) -> None:
    for file in files:
        path = root / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(file.encode())


def repository(root: Path, marker: str = "") -> Repository:
    return Repository(RepositorySettings(url=str(root), marker=marker), ModelStoreSettings(), root)


def entries(root: Path, marker: str = "") -> dict[str, RepositoryVersion]:
    """Return the entries by their path below the repository."""
    found = repository(root, marker).list().entries
    return {os.path.relpath(url, root): entry for url, entry in found.items()}


def test_folders_and_archives_are_versions(tmp_path: Path) -> None:
    create(
        tmp_path,
        "digits/1.0/MAR-INF/MANIFEST.json",
        "digits/2.0/anything.mar",
        "digits/2.0/README.md",
        "digits/3.0/handler.py",
        "digits/other.tar.gz",
        "digits/notes.txt",
        "folder/config.json",
        "folder/model.safetensors",
        "top.mar",
        "top.mar.sig",
        "README.md",
        ".git/config",
        "digits/.cache/x.mar",
        ".hidden.mar",
    )
    found = entries(tmp_path)
    assert {path: (entry.model, entry.version) for path, entry in found.items()} == {
        "digits/1.0": ("digits", "1.0"),
        "digits/2.0/anything.mar": ("digits", "2.0"),
        "digits/3.0": ("digits", "3.0"),
        "digits/other.tar.gz": ("digits", None),
        "folder": (None, None),
        "top.mar": (None, None),
    }


def test_fingerprint_changes_with_any_file_of_its_entry_only(tmp_path: Path) -> None:
    create(tmp_path, "m/1/MAR-INF/MANIFEST.json", "m/1/deep/weights.pt", "m/2/a.mar", "top.mar")

    def fingerprints() -> dict[str, str]:
        return {path: entry.fingerprint for path, entry in entries(tmp_path).items()}

    before = fingerprints()
    unchanged = entries(tmp_path)
    os.utime(tmp_path / "m/1/deep/weights.pt", (1, 1))
    after = fingerprints()
    assert {path for path in before if before[path] != after[path]} == {"m/1"}
    changed = {path: not repository(tmp_path).is_unchanged(entry) for path, entry in unchanged.items()}
    assert changed == {"m/1": True, "m/2/a.mar": False, "top.mar": False}
    create(tmp_path, "top.mar.sig")
    assert fingerprints()["top.mar"] != after["top.mar"]


def test_marker_completes_an_upload(tmp_path: Path) -> None:
    create(tmp_path, "m/1/a.mar", "m/2/MAR-INF/MANIFEST.json", "m/b.mar", "top.mar")
    assert not any(entry.is_complete for entry in entries(tmp_path, "READY").values())
    create(tmp_path, "m/1/READY", "m/2/READY", "m/b.mar.READY", "top.mar.READY")
    assert all(entry.is_complete for entry in entries(tmp_path, "READY").values())
    assert all(entry.is_complete for entry in entries(tmp_path).values())


def test_links_between_folders_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"d{number}" for number in range(10)]
    for name in names:
        (tmp_path / name).mkdir()
    for name in names:
        for other in names:
            (tmp_path / name / other).symlink_to(tmp_path / other)
    create(tmp_path, "digits/1.0/a.mar", "zebra/1.0/a.mar")
    monkeypatch.setattr(object_stores, "MAX_LISTED", 1_000)
    listing = repository(tmp_path).list()
    assert [entry.model for entry in listing.entries.values()] == ["digits", "zebra"]
    assert {os.path.relpath(url, tmp_path) for url in listing.problems} == set(names)
    assert all("more than 1,000 files and folders" in problem for problem in listing.problems.values())
    monkeypatch.setattr(object_stores, "MAX_LISTED", 5)
    with pytest.raises(DownloadFailed) as error:
        entries(tmp_path)
    assert "more than 5 files and folders" in error.value.detail


def test_links_are_followed_and_loops_end(tmp_path: Path) -> None:
    create(tmp_path / "outside", "1.0/a.mar")
    root = tmp_path / "root"
    root.mkdir()
    (root / "m").symlink_to(tmp_path / "outside")
    (tmp_path / "outside/1.0/again").symlink_to(root)
    (root / "nothing.mar").symlink_to(tmp_path / "missing")
    assert list(entries(root)) == ["m/1.0/a.mar"]


def test_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DownloadFailed) as error:
        repository(tmp_path / "none").list()
    assert error.value.detail == "No such file or directory"
    unknown = Repository(RepositorySettings(url="ftp://host/models"), ModelStoreSettings(), tmp_path)
    with pytest.raises(DownloadFailed) as error:
        unknown.list()
    assert "ftp:// is no object store" in error.value.detail


def test_versions_of_any_characters_are_listed(tmp_path: Path) -> None:
    versions = ["1", "1\u00b2", "2", "10", "\u2460"]
    create(tmp_path, *(f"digits/{version}/m.mar" for version in versions))
    found = [entry.version for entry in entries(tmp_path).values()]
    assert sorted(filter(None, found)) == sorted(versions)
    assert [version for version in found if version in ("1", "2", "10")] == ["1", "2", "10"]
