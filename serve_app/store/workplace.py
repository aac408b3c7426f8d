"""Things that appear whole: made in a place of one's own, and put where they belong by one rename."""

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

LEFTOVER = 3600.0  # seconds without a write, after which anybody's partial work is left over


@contextlib.contextmanager
def workplace(partial: Path) -> Iterator[Path]:
    """A directory of this process alone below ``partial``; gone afterwards."""
    place = Path(tempfile.mkdtemp(prefix=f"{socket.gethostname()}-{os.getpid()}-", dir=partial))
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


def settle(made: Path, final: Path) -> None:
    """Put a whole directory in its place, unless another process was quicker."""
    try:
        made.rename(final)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise


@contextlib.contextmanager
def locked(file: Path) -> Iterator[None]:
    """Of a node's processes that would do the same work at once, one does it.

    An economy only: a file system without locks costs work, not correctness.
    """
    with file.open("ab") as held:
        with contextlib.suppress(OSError):
            fcntl.flock(held, fcntl.LOCK_EX)  # the kernel lets go when this process dies
        yield


def sweep(partial: Path) -> None:
    """Remove partial work of processes that are dead, or that wrote nothing for an hour."""
    for place in partial.iterdir():
        if _left_over(place):
            shutil.rmtree(place, ignore_errors=True)


def _left_over(place: Path) -> bool:
    host, _, owner = place.name.rpartition("-")[0].rpartition("-")
    if host == socket.gethostname() and owner.isdecimal() and not _alive(int(owner)):
        return True
    newest = 0.0
    for directory, _, files in os.walk(place):
        for path in (directory, *(os.path.join(directory, name) for name in files)):
            with contextlib.suppress(FileNotFoundError):
                newest = max(newest, os.lstat(path).st_mtime)
    return 0.0 < newest < time.time() - LEFTOVER


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
