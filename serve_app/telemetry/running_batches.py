"""The batches that run in a process, in a file that outlives it: they identify what crashed it.

The file has a slot of 512 bytes for each loaded version: the number of its running batches, the thread that
began the last one, and the version's name. Writing a slot is a store into mapped memory, not a system call.
"""

from __future__ import annotations

import contextlib
import mmap
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_SLOT_BYTES = 512
_HEAD = struct.Struct("<QQH")  # running batches, thread, bytes of the name
_MAX_SLOTS = 4096


@dataclass(frozen=True)
class RunningBatch:
    """A version that ran a batch, or loaded, when its process ended; ``thread`` ran its handler."""

    app: str
    thread: int


class BatchSlot:
    """The slot of one version."""

    def __init__(self, view: memoryview, app: str) -> None:
        self._view = view
        self._running = 0
        self._lock = threading.Lock()
        name = app.encode()
        view[_HEAD.size : _HEAD.size + len(name)] = name
        self._name_bytes = len(name)
        self._write(0)

    def enter(self, thread: int) -> None:
        """Record that a batch begins in a thread."""
        with self._lock:
            self._running += 1
            self._write(thread)

    def leave(self) -> None:
        """Record that a batch has ended."""
        with self._lock:
            self._running -= 1
            if not self._running:
                self._write(0)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Record a batch for the duration of the block."""
        self.enter(threading.get_ident())
        try:
            yield
        finally:
            self.leave()

    def clear(self) -> None:
        """Record that nothing runs."""
        with self._lock:
            self._running = 0
            self._write(0)

    def _write(self, thread: int) -> None:
        _HEAD.pack_into(self._view, 0, self._running, thread, self._name_bytes)


class RunningBatches:
    """The file of one process, which records up to 4,096 loaded versions."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w+b") as file:
            file.truncate(_SLOT_BYTES * _MAX_SLOTS)  # sparse: a page of it exists once it is written
            self._map = mmap.mmap(file.fileno(), 0)
        self._free = list(range(_MAX_SLOTS - 1, -1, -1))
        self._taken: dict[BatchSlot, int] = {}

    def open_slot(self, app: str) -> BatchSlot:
        """Return a slot for a version."""
        number = self._free.pop()
        start = number * _SLOT_BYTES
        slot = BatchSlot(memoryview(self._map)[start : start + _SLOT_BYTES], app)
        self._taken[slot] = number
        return slot

    def close_slot(self, slot: BatchSlot) -> None:
        """Free the slot of an evicted version."""
        slot.clear()
        self._free.append(self._taken.pop(slot))

    def close(self) -> None:
        """Remove the file: the process ends normally."""
        self.path.unlink(missing_ok=True)


def read_running(path: Path) -> list[RunningBatch]:
    """Return the batches that ran when the process of a file ended; none where there is no such file."""
    try:
        content = path.read_bytes()
    except OSError:
        return []
    found = []
    for start in range(0, len(content) - _SLOT_BYTES + 1, _SLOT_BYTES):
        running, thread, length = _HEAD.unpack_from(content, start)
        if running:
            name = content[start + _HEAD.size : start + _HEAD.size + length]
            found.append(RunningBatch(name.decode(errors="replace"), thread))
    return found
