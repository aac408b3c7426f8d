"""Copies of local archives in the server's model store, from which every server accepts them."""

from __future__ import annotations

import contextlib
import filecmp
import shutil
from collections.abc import Iterator
from pathlib import Path

from serve_app.cli.terminal import fail
from serve_app.client import ServerError
from serve_app.model_store.sources import file_path


def add_to_store(url: str, model_store: Path) -> str:
    """Return the name in the model store of a local path (absolute, ``./``, ``../`` or ``file://``).

    A path outside it is copied there. Every other URL, and any where there is no such store, is returned
    unchanged: the server decides about it. Exits where a relative path does not exist, or where the store has
    another model of that name.
    """
    if url.startswith(("./", "../")) and not Path(url).exists():
        fail(f"{url} does not exist in {Path.cwd()}.")
    path, name = _locate(url, model_store)
    if path is None or path.is_relative_to(store := model_store.resolve()):
        return name
    target = store / name
    if not target.exists():
        if path.is_dir():
            shutil.copytree(path, target)
        else:
            shutil.copyfile(path, target)
    elif not _are_equal(path, target):
        fail(f"{target} is another model; remove it, or register {target.name}.")
    signature = path.with_name(f"{path.name}.sig")
    if signature.is_file():
        shutil.copyfile(signature, store / signature.name)
    return target.name


@contextlib.contextmanager
def stored_copy(url: str, model_store: Path) -> Iterator[str]:
    """Yield what ``add_to_store`` returns; remove its copy where the server refuses the registration.

    A refused archive that stays would be loaded at the next start, and be in the way of the corrected one.
    """
    names = (name := _locate(url, model_store)[1], f"{name}.sig")
    absent = [path for path in (model_store / name for name in names) if not path.exists()]
    url = add_to_store(url, model_store)
    copies = [path for path in absent if path.exists()]
    try:
        yield url
    except ServerError:
        for path in copies:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        raise


def name_in_store(url: str, model_store: Path) -> str:
    """Return what ``add_to_store`` returns, without a copy."""
    return _locate(url, model_store)[1]


def find_local(url: str, model_store: Path) -> Path | None:
    """Return the file or folder of this machine that a URL is, or that the model store has by this name."""
    path, name = _locate(url, model_store)
    if path is None and not name.startswith("/") and "://" not in name:
        stored = model_store / name
        path = stored if stored.exists() else None
    return path


def _locate(url: str, model_store: Path) -> tuple[Path | None, str]:
    """Return the local path that a URL is, or None, and its name in the model store, or the URL."""
    path = file_path(url) if url.startswith("file://") else Path(url)
    is_path = url.startswith(("/", "./", "../", "file://"))
    if not is_path or path is None or not path.exists() or not model_store.is_dir():
        return None, url
    path, store = path.resolve(), model_store.resolve()
    return path, path.relative_to(store).as_posix() if path.is_relative_to(store) else path.name


def _are_equal(path: Path, other: Path) -> bool:
    """Return whether two files, or the files of two folders, have the same names and contents."""
    if not path.is_dir() or not other.is_dir():
        return path.is_file() and other.is_file() and filecmp.cmp(path, other, shallow=False)
    names = [
        sorted(file.relative_to(folder) for file in folder.rglob("*") if file.is_file())
        for folder in (path, other)
    ]
    return names[0] == names[1] and all(
        filecmp.cmp(path / name, other / name, shallow=False) for name in names[0]
    )
