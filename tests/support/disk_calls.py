"""A record of what a process syncs to disk and renames, in order: what a power failure would leave."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest


class DiskCall(NamedTuple):
    """A completed call: ``sync`` of an inode, or ``rename`` of one to ``path``."""

    kind: str
    inode: int
    path: str = ""


class DiskCalls(list[DiskCall]):
    """The calls of this process since they are recorded."""

    @classmethod
    def record(cls, monkeypatch: pytest.MonkeyPatch) -> DiskCalls:
        calls = cls()
        fsync = os.fsync

        def recorded_fsync(descriptor: int) -> None:
            fsync(descriptor)
            calls.append(DiskCall("sync", os.fstat(descriptor).st_ino))

        def recorded(move: Callable[..., None]) -> Callable[..., None]:
            def wrapped(source: Any, target: Any, **options: Any) -> None:
                move(source, target, **options)
                calls.append(DiskCall("rename", os.stat(target).st_ino, os.fspath(target)))

            return wrapped

        monkeypatch.setattr(os, "fsync", recorded_fsync)
        accessor = getattr(pathlib, "_NormalAccessor", None)  # Python 3.10's paths have its functions of os
        for name in ("rename", "replace"):
            monkeypatch.setattr(os, name, recorded(getattr(os, name)))
            if accessor is not None:
                monkeypatch.setattr(accessor, name, staticmethod(getattr(os, name)))
        return calls

    def check_durable(self, path: Path) -> None:
        """Check that a file or tree was synced before it got its name, and the name after that."""
        renames = [i for i, call in enumerate(self) if call.kind == "rename" and call.path == str(path)]
        named_at = renames[-1] if renames else len(self)
        before = {call.inode for call in self[:named_at] if call.kind == "sync"}
        for part in (path, *path.rglob("*")) if path.is_dir() else (path,):
            assert part.stat().st_ino in before, f"{part} is not synced before its rename"
        after = {call.inode for call in self[named_at if renames else 0 :] if call.kind == "sync"}
        assert path.parent.stat().st_ino in after, f"{path.parent} is not synced after the rename"
