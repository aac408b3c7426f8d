"""Lines go to a thread, and from there to a file or a stream: nobody who says something waits for a disk."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import logging
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Protocol

PERIOD = 0.5  # seconds between two writes, at least
ROOM = 32 << 20  # characters that may wait for a slow disk; what comes beyond is lost, and counted

_log = logging.getLogger("torchrelay.logs")


class Sink(Protocol):
    """Where blocks of whole lines end up."""

    def write(self, text: str) -> None:
        """Raises OSError or ValueError where it cannot."""

    def close(self) -> None: ...


class Stream:
    """A stream of somebody else's."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()

    def close(self) -> None:
        """It is not ours to close."""


class File:
    """A file that many processes append to: each block is one write, so no line is torn.

    Its folder is made where it is missing. A file of ``limit`` bytes (0: none) is put aside as ``path.1``, and
    whoever moves it away finds a new one begun.
    """

    def __init__(self, path: Path, limit: int = 0) -> None:
        self._path, self._limit = path, limit
        self._descriptor: int | None = None
        self._torn = False  # the last write ended in mid-line

    def write(self, text: str) -> None:
        descriptor = self._follow()
        block = memoryview(("\n" + text if self._torn else text).encode(errors="backslashreplace"))
        while block:
            written = os.write(descriptor, block)
            block = block[written:]
            self._torn = bool(block)

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def _open(self) -> int:
        self.close()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
        return self._descriptor

    def _follow(self) -> int:
        """Put the file aside where it is full, and go over to the new one where anybody has done so."""
        descriptor = self._descriptor
        if descriptor is None:
            return self._open()
        here = os.fstat(descriptor)
        if self._limit and here.st_size >= self._limit:
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # of several that find it full, one moves it
            with contextlib.suppress(FileNotFoundError):
                if os.stat(self._path).st_ino == here.st_ino:
                    os.replace(self._path, f"{self._path}.1")
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        try:
            moved = os.stat(self._path).st_ino != here.st_ino
        except FileNotFoundError:
            moved = True
        return self._open() if moved else descriptor


class Drain:
    """Takes lines from any thread, for about a microsecond each, and lets one of its own write them to ``sink``.

    What was put is out after ``period`` seconds, and when the drain is closed or the interpreter ends. ``name`` is
    what a failure to write is reported under, once until a write succeeds again. With ``form`` records are put that
    are no text yet: it makes the text of one, in the thread, where many in a row cost a fraction of one at a time.
    """

    def __init__(
        self, sink: Sink, name: str, period: float | None = None, form: Callable[[Any], str] | None = None
    ) -> None:
        self._sink = sink
        self._form = form
        self._name = name
        self._period = PERIOD if period is None else period
        self._lines: list[Any] = []
        self._size = 0
        self._lost = 0
        self._complained = False
        self._forked = False
        self._writing = threading.Lock()
        self._some = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        atexit.register(self.close)
        _drains.add(self)

    def put(self, line: Any, size: int | None = None) -> None:
        """One record, without its line end; ``size`` is about what its text will take, where it is none yet."""
        if self._size > ROOM:
            self._lost += 1
            return
        self._size += len(line) if size is None else size
        lines = self._lines
        lines.append(line)
        if len(lines) == 1:
            self._some.set()
        if self._forked:  # no thread came along, and no event loop waits here
            self.flush()

    def flush(self) -> None:
        """Write what is there."""
        with self._writing:
            self._write()

    def _write(self) -> None:
        count = len(self._lines)
        block = self._lines[:count]
        del self._lines[:count]  # lines that come meanwhile stand behind these
        if not block:
            return
        self._size = 0
        if self._form is not None:
            block = [self._form(record) for record in block]
        lost, self._lost = self._lost, 0
        if lost:
            block.append(f"({lost} lines are lost: they came faster than they could be written)")
        try:
            self._sink.write("\n".join(block) + "\n")
            self._complained = False
        except (OSError, ValueError) as error:  # a full disk, a folder that is read-only, a stream that was closed
            if not self._complained:
                self._complained = True
                _log.error("the %s cannot be written (%s); its lines are lost until it can", self._name, error)

    def close(self) -> None:
        """Write what is left and end the thread."""
        if not self._closing.is_set():
            atexit.unregister(self.close)
            self._closing.set()
            self._some.set()
            if not self._forked:
                self._thread.join()
            self.flush()
            self._sink.close()

    def _run(self) -> None:
        while not self._closing.is_set():
            self._some.wait()
            self._some.clear()
            self._closing.wait(self._period)
            self.flush()

    def _reborn(self) -> None:
        """In a child that an author's code forked: what the parent had not written is the parent's to write."""
        self._forked = True
        self._writing = threading.Lock()
        self._lines = []
        self._size = self._lost = 0


_drains: weakref.WeakSet[Drain] = weakref.WeakSet()


def _after_fork() -> None:
    for drain in _drains:
        drain._reborn()


os.register_at_fork(after_in_child=_after_fork)

