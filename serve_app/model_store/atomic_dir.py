"""Atomic creation of directories: written to a temporary directory, and moved to their directory by one
rename.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

log = logging.getLogger(__name__)

STALE_AFTER = 3600.0  # seconds without a write, after which partial work of any process is removed


@contextlib.contextmanager
def temporary_dir(partial: Path) -> Iterator[Path]:
    """Create a directory of this process below ``partial``, and remove it afterwards."""
    directory = Path(tempfile.mkdtemp(prefix=f"{socket.gethostname()}-{os.getpid()}-", dir=partial))
    try:
        yield directory
    finally:
        remove_tree(directory)


def remove_tree(directory: Path) -> None:
    """Remove a directory with its contents; what cannot be removed is logged, and nothing is raised.

    Its depth does not matter: an inner directory is moved up before its own contents are removed.
    ``shutil.rmtree`` recurses, and raised RecursionError at 1,000 levels.
    """
    top = os.fspath(directory)
    problems: list[OSError] = []
    moved = 0
    pending = [top]
    while pending:
        folder = pending.pop()
        for path, is_directory in _list_entries(folder, problems):
            try:
                if not is_directory:
                    os.unlink(path)
                elif folder == top:
                    pending.append(path)
                else:
                    moved += 1
                    raised = os.path.join(top, f".removed-{os.getpid()}-{moved}")
                    _rename(path, raised)
                    pending.append(raised)
            except OSError as error:
                problems.append(error)
        if folder != top:
            _remove_empty(folder, problems)
    _remove_empty(top, problems)
    if problems:
        log.warning("%s could not be removed wholly (%d entries): %s", top, len(problems), problems[0])


def _list_entries(folder: str, problems: list[OSError]) -> list[tuple[str, bool]]:
    """Return a folder's paths, each with whether it is a directory itself; a closed folder is opened."""
    try:
        with contextlib.suppress(OSError):
            if not os.access(folder, os.R_OK | os.W_OK | os.X_OK, follow_symlinks=False):
                os.chmod(folder, 0o700)
        with os.scandir(folder) as entries:
            return [(entry.path, entry.is_dir(follow_symlinks=False)) for entry in entries]
    except FileNotFoundError:
        return []
    except OSError as error:
        problems.append(error)
        return []


def _rename(path: str, target: str) -> None:
    """Move a directory; the owner of a directory without write permission may not move it before."""
    try:
        os.rename(path, target)
    except PermissionError:
        os.chmod(path, 0o700)
        os.rename(path, target)


def _remove_empty(folder: str, problems: list[OSError]) -> None:
    try:
        os.rmdir(folder)
    except FileNotFoundError:
        pass
    except OSError as error:
        problems.append(error)


def move_into_place(directory: Path, final: Path) -> None:
    """Rename a complete directory to its final path, unless another process has done so.

    Its files are synced before, so that a directory with the final name is complete after a power failure.
    """
    _sync_tree(directory)
    try:
        directory.rename(final)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    sync(final.parent)


def sync(path: Path | str) -> None:
    """Sync a file, or the entries of a directory, to disk, so that it survives a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_tree(directory: Path) -> None:
    pending = [os.fspath(directory)]
    while pending:
        folder = pending.pop()
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)
                elif entry.is_file(follow_symlinks=False):
                    sync(entry.path)
        sync(folder)


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
            remove_tree(directory)


def _pid_exists(pid: int) -> bool:
    # The client and the commands have no psutil.
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def _is_stale(directory: Path) -> bool:
    host, _, owner = directory.name.rpartition("-")[0].rpartition("-")
    if host == socket.gethostname() and owner.isdecimal() and not _pid_exists(int(owner)):
        return True
    newest = 0.0
    pending = [os.fspath(directory)]
    while pending:  # os.walk recurses before Python 3.12
        # Of a path that is too long or closed, the directory above counts.
        with contextlib.suppress(OSError):
            folder = pending.pop()
            newest = max(newest, os.lstat(folder).st_mtime)
            with os.scandir(folder) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(entry.path)
                    else:
                        newest = max(newest, entry.stat(follow_symlinks=False).st_mtime)
    return 0.0 < newest < time.time() - STALE_AFTER
