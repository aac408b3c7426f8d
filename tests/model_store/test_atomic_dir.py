"""The removal of directories: of any depth, and with whatever their files allow."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from serve_app.model_store import atomic_dir
from serve_app.model_store.atomic_dir import remove_stale, remove_tree, temporary_dir


def make_deep(folder: Path, levels: int, name: str = "d") -> None:
    """Create nested directories, whose path may be longer than the system's limit."""
    descriptor = os.open(folder, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir(name, dir_fd=descriptor)
        inner = os.open(name, os.O_RDONLY, dir_fd=descriptor)
        os.close(descriptor)
        descriptor = inner
    os.close(os.open("file", os.O_CREAT, dir_fd=descriptor))
    os.close(descriptor)


@pytest.mark.parametrize("name", ["d", "d" * 100])
def test_a_tree_of_1500_levels_is_removed(tmp_path: Path, name: str) -> None:
    with temporary_dir(tmp_path) as folder:
        make_deep(folder, 1500, name)
    assert list(tmp_path.iterdir()) == []


def test_partial_work_of_a_dead_process_is_removed_whatever_its_depth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in (f"{socket.gethostname()}-999999999-x", "elsewhere-1-x"):
        (tmp_path / folder).mkdir()
        make_deep(tmp_path / folder, 1500)
    monkeypatch.setattr(atomic_dir, "STALE_AFTER", -1.0)
    remove_stale(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_links_are_removed_and_their_targets_kept(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").touch()
    tree = tmp_path / "tree"
    (tree / "inner").mkdir(parents=True)
    (tree / "link").symlink_to(kept)
    (tree / "inner/link").symlink_to(kept)
    (tree / "inner/dangling").symlink_to("nowhere")
    remove_tree(tree)
    assert not tree.exists() and (kept / "file").exists()


def test_directories_without_permission_are_removed_by_their_owner(tmp_path: Path) -> None:
    inner = tmp_path / "tree/a/b"
    inner.mkdir(parents=True)
    (inner / "file").touch()
    for folder in (inner, inner.parent):
        folder.chmod(0)
    remove_tree(tmp_path / "tree")
    assert not (tmp_path / "tree").exists()


def test_nothing_is_raised_for_what_does_not_exist(tmp_path: Path) -> None:
    remove_tree(tmp_path / "missing")
