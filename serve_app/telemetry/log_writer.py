"""A thread that writes log lines to a file or a stream, so that no caller waits for a disk.

``logging.handlers.QueueListener`` writes each record by itself: every write releases the interpreter lock and
waits for a busy event loop to get it back. One access-log line then costs 24 µs of CPU instead of 2, and the
99th percentile of 20 µs of work on the loop rises from 0.1 to 1.3 ms. Here a block of lines is one write.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import logging
import os
import stat
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Protocol

PERIOD = 0.5  # seconds between two writes, at least
MAX_PENDING = 32 << 20  # characters that may wait for a slow disk; further lines are dropped and counted

_log = logging.getLogger(__name__)


class LogSink(Protocol):
    """A destination of blocks of whole lines."""

    def write(self, text: str) -> None:
        """Write a block. Raises OSError or ValueError."""

    def close(self) -> None: ...


class StreamSink:
    """A stream that is owned by other code, and not closed here."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()

    def close(self) -> None:
        """Leave the stream open."""


class FileSink:
    """A file that many processes append to: each block is one write, so no line is torn.

    Its folder is created if necessary. A file of ``limit`` bytes (0: no limit) is renamed to ``path.1``.
    After any rename, also by another program, a new file is started. The file has ``mode``; a folder around
    files that the group may read is open to the group too.
    """

    def __init__(self, path: Path, limit: int = 0, mode: int = 0o600) -> None:
        self._path, self._limit, self._mode = path, limit, mode
        self._descriptor: int | None = None
        self._line_incomplete = False  # the last write ended within a line

    def write(self, text: str) -> None:
        descriptor = self._current_descriptor()
        block = memoryview(("\n" + text if self._line_incomplete else text).encode(errors="backslashreplace"))
        while block:
            try:
                written = os.write(descriptor, block)
            except OSError as error:  # which names no file
                raise OSError(error.errno, error.strerror, str(self._path)) from None
            block = block[written:]
            self._line_incomplete = bool(block)

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def _open(self) -> int:
        self.close()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._descriptor = os.open(self._path, flags, self._mode)
        if stat.S_ISREG(os.fstat(self._descriptor).st_mode):  # and no device, such as /dev/stdout
            self._set_modes(self._descriptor)
        return self._descriptor

    def _set_modes(self, descriptor: int) -> None:
        """Set the mode of the file, which a umask or an earlier version may have changed."""
        with contextlib.suppress(PermissionError):  # another user's
            os.fchmod(descriptor, self._mode)
            if self._mode & 0o040:
                self._path.parent.chmod(self._path.parent.stat().st_mode | 0o050)

    def _current_descriptor(self) -> int:
        """Return the descriptor of the current file, after renaming a full one."""
        descriptor = self._descriptor
        if descriptor is None:
            return self._open()
        status = os.fstat(descriptor)
        if self._limit and status.st_size >= self._limit:
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # of several processes, only one renames it
            with contextlib.suppress(FileNotFoundError):
                if os.stat(self._path).st_ino == status.st_ino:
                    os.replace(self._path, f"{self._path}.1")
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        try:
            moved = os.stat(self._path).st_ino != status.st_ino
        except FileNotFoundError:
            moved = True
        return self._open() if moved else descriptor


class AsyncWriter:
    """A thread that writes lines to ``sink``; ``put`` costs any other thread about a microsecond.

    A line is written within ``period`` seconds, and when the writer is closed or the interpreter ends. A
    failure to write is logged with ``name``, once until a write succeeds again. ``format_record`` converts
    records to text in the thread, where many in a row cost a fraction of one at a time.
    """

    def __init__(
        self,
        sink: LogSink,
        name: str,
        period: float | None = None,
        format_record: Callable[[Any], str] | None = None,
    ) -> None:
        self._sink = sink
        self._format_record = format_record
        self._name = name
        self._period = PERIOD if period is None else period
        self._lines: list[Any] = []
        self._size = 0
        self._lost = 0
        self._failure_logged = False
        self._forked = False
        self._write_lock = threading.Lock()
        self._has_lines = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        atexit.register(self.close)
        _writers.add(self)

    def put(self, line: Any, size: int | None = None) -> None:
        """Queue a record, without a line end; ``size`` is the approximate length of an unformatted one."""
        if self._size > MAX_PENDING:
            self._lost += 1
            return
        self._size += len(line) if size is None else size
        self._lines.append(line)
        if self._forked:  # the thread was not copied, and no event loop waits here
            self.flush()
        elif not self._has_lines.is_set():  # the number of lines would not show it: other threads append, too
            self._has_lines.set()

    def flush(self) -> None:
        """Write all queued lines."""
        with self._write_lock:
            self._write()

    def _write(self) -> None:
        count = len(self._lines)
        block = self._lines[:count]
        del self._lines[:count]  # other threads may have appended lines since
        if not block:
            return
        self._size = 0
        if self._format_record is not None:
            block = [self._format_record(record) for record in block]
        lost, self._lost = self._lost, 0
        if lost:
            block.append(f"({lost} lines are lost: they were logged faster than they could be written)")
        try:
            self._sink.write("\n".join(block) + "\n")
            self._failure_logged = False
        except (OSError, ValueError) as error:  # a full disk, a read-only folder, a closed stream
            if not self._failure_logged:
                self._failure_logged = True
                _log.error(
                    "the %s cannot be written (%s); its lines are lost until it can", self._name, error
                )

    def close(self) -> None:
        """Write the remaining lines and end the thread."""
        if not self._closing.is_set():
            atexit.unregister(self.close)
            self._closing.set()
            self._has_lines.set()
            if not self._forked:
                self._thread.join()
            self.flush()
            self._sink.close()

    def _run(self) -> None:
        while not self._closing.is_set():
            self._has_lines.wait()
            self._has_lines.clear()
            self._closing.wait(self._period)
            self.flush()

    def _reset_after_fork(self) -> None:
        """Drop the pending lines in a process forked by a handler: the parent writes them."""
        self._forked = True
        self._write_lock = threading.Lock()  # here and below: the thread may have held the lock
        self._has_lines = threading.Event()
        is_closing, self._closing = self._closing.is_set(), threading.Event()
        if is_closing:
            self._closing.set()
        self._lines = []
        self._size = self._lost = 0


_writers: weakref.WeakSet[AsyncWriter] = weakref.WeakSet()


def _after_fork() -> None:
    for writer in _writers:
        writer._reset_after_fork()


os.register_at_fork(after_in_child=_after_fork)
