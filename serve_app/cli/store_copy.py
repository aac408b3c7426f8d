"""Copies of local archives in the server's model store, from which every server accepts them."""

from __future__ import annotations

import filecmp
import shutil
from pathlib import Path

from serve_app.cli.terminal import fail
from serve_app.model_store.sources import file_path


def add_to_store(url: str, model_store: Path) -> str:
    """Return the name in the model store of a local path (absolute, ``./``, ``../`` or ``file://``).

    A path outside it is copied there. Every other URL, and any where there is no such store, is returned
    unchanged: the server decides about it. Exits where the store has another model of that name.
    """
    path = file_path(url) if url.startswith("file://") else Path(url)
    is_path = url.startswith(("/", "./", "../", "file://"))
    if not is_path or path is None or not path.exists() or not model_store.is_dir():
        return url
    path, store = path.resolve(), model_store.resolve()
    if path.is_relative_to(store):
        return path.relative_to(store).as_posix()
    target = store / path.name
    if not target.exists():
        if path.is_dir():
            shutil.copytree(path, target)
        else:
            shutil.copyfile(path, target)
    elif path.is_dir() or target.is_dir() or not filecmp.cmp(path, target, shallow=False):
        fail(f"{target} is another model; remove it, or register {target.name}.")
    signature = path.with_name(f"{path.name}.sig")
    if signature.is_file():
        shutil.copyfile(signature, store / signature.name)
    return target.name
