"""The counts of a process that Management has not stored yet, in files that outlive the process.

Each counted request is appended before its response is sent: about 5 µs, without waiting for the disk. So the
counts survive the death of the process, though not that of the machine. Another process of the machine sends
them, under the numbers that Management would have seen, so that nothing is counted twice.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import marshal
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

MAX_BYTES = 64 << 20  # of counts that wait for Management: about 400,000 requests
_OPEN, _LOCK, _SOURCE = "open", "lock", "source"


class CountJournal:
    """The journal of one process, in a directory of its own that it keeps locked.

    ``append`` adds a record to the open part, ``seal`` closes that part as the report ``number``, and
    ``discard`` deletes it once the report is stored.
    """

    def __init__(self, directory: Path, source: str, max_bytes: int = MAX_BYTES) -> None:
        self.directory = directory  # with the journals of all processes of the machine
        self._source = source
        self._own = directory / source.replace("/", "_")
        self._max_bytes = max_bytes
        self._lock = self._file = -1  # opened by the first record
        self._size = 0
        self._is_complete = True

    def _open(self) -> None:
        self._own.mkdir(parents=True, exist_ok=True, mode=0o700)
        if self._lock < 0:
            self._lock = os.open(self._own / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            (self._own / _SOURCE).write_text(self._source)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._file = os.open(self._own / _OPEN, flags, 0o600)

    def append(self, record: tuple[Any, ...]) -> None:
        """Append a record of plain values. A full disk or journal is logged once, and raises nothing."""
        if self._size > self._max_bytes:
            return self._give_up("it is full")
        try:
            if self._file < 0:
                self._open()
            self._size += os.write(self._file, marshal.dumps(record))
        except OSError as error:
            self._give_up(error.strerror or "it cannot be written")

    def _give_up(self, reason: str) -> None:
        if self._is_complete:
            self._is_complete = False
            log.warning("%s: %s. Counts of experiments are lost if this process dies.", self._own, reason)

    def seal(self, number: int) -> None:
        """Keep the records since the last call as those of the report ``number``."""
        if not self._size:
            return
        with contextlib.suppress(OSError):  # a full disk: the open part goes on
            os.rename(self._own / _OPEN, self._own / str(number))
            os.close(self._file)
            self._file, self._size, self._is_complete = -1, 0, True

    def discard(self, number: int) -> None:
        """Delete the records of a stored report."""
        with contextlib.suppress(OSError):
            (self._own / str(number)).unlink()

    def close(self) -> None:
        """End the journal; nothing remains of it where every report is stored."""
        if self._lock >= 0 and not _parts(self._own):
            shutil.rmtree(self._own, ignore_errors=True)
        for opened in (self._file, self._lock):
            if opened >= 0:
                os.close(opened)
        self._file = self._lock = -1


@dataclass(frozen=True)
class AbandonedReport:
    """The records of a process that has ended, with the source and the number of their report."""

    source: str
    number: int
    records: list[tuple[Any, ...]]
    file: Path


def abandoned_reports(directory: Path) -> Iterator[AbandonedReport]:
    """Yield the reports of ended processes, the oldest of each first, and delete the directories without any.

    A process's open part was never sent, so it has a source of its own.
    """
    for folder in sorted(directory.glob("*/")):
        with contextlib.ExitStack() as stack:
            try:
                lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
                stack.callback(os.close, lock)
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                source = (folder / _SOURCE).read_text()
            except OSError:  # it runs, or another process sends its reports
                continue
            for file in _parts(folder):
                number = 1 if file.name == _OPEN else int(file.name)
                suffix = "/open" if file.name == _OPEN else ""
                yield AbandonedReport(source + suffix, number, _read(file), file)
            if not _parts(folder):
                shutil.rmtree(folder, ignore_errors=True)


def _parts(folder: Path) -> list[Path]:
    """Return the files with records, in the order in which they were written."""
    found = [file for file in folder.iterdir() if file.name == _OPEN or file.name.isdecimal()]
    written = [file for file in found if file.stat().st_size]
    return sorted(written, key=lambda file: (file.name == _OPEN, file.name.zfill(20)))


def _read(file: Path) -> list[tuple[Any, ...]]:
    """Return the records of a file up to the first incomplete one."""
    records: list[tuple[Any, ...]] = []
    with file.open("rb") as opened:
        while True:
            try:
                records.append(marshal.load(opened))
            except (EOFError, ValueError, TypeError):
                return records
