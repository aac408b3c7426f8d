"""Atomic creation of directories: written to a temporary directory, and moved to their directory by one
rename.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

STALE_AFTER = 3600.0  # seconds without a write, after which partial work of any process is removed


@contextlib.contextmanager
def temporary_dir(partial: Path) -> Iterator[Path]:
    """Create a directory of this process below ``partial``, and remove it afterwards."""
    directory = Path(tempfile.mkdtemp(prefix=f"{socket.gethostname()}-{os.getpid()}-", dir=partial))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def move_into_place(directory: Path, final: Path) -> None:
    """Rename a complete directory to its final path, unless another process has done so."""
    try:
        directory.rename(final)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise


@contextlib.contextmanager
def file_lock(file: Path) -> Iterator[None]:
    """Hold an advisory file lock, so that one process per node does the work.

    It only saves work: without locks in a file system, the work is repeated, and the result is the same.
    """
    with file.open("ab") as handle:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)  # the kernel releases it when this process ends
        yield


def remove_stale(partial: Path) -> None:
    """Remove partial work of dead processes, and of those that wrote nothing for an hour."""
    for directory in partial.iterdir():
        if _is_stale(directory):
            shutil.rmtree(directory, ignore_errors=True)


def _is_stale(directory: Path) -> bool:
    host, _, owner = directory.name.rpartition("-")[0].rpartition("-")
    if host == socket.gethostname() and owner.isdecimal() and not psutil.pid_exists(int(owner)):
        return True
    newest = 0.0
    for folder, _, files in os.walk(directory):
        for path in (folder, *(os.path.join(folder, name) for name in files)):
            with contextlib.suppress(FileNotFoundError):
                newest = max(newest, os.lstat(path).st_mtime)
    return 0.0 < newest < time.time() - STALE_AFTER
