"""Files, folders and sockets that only the server's own user may read."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

log = logging.getLogger(__name__)

_UMASK = 0o077
_RAY_TOKEN = "~/.ray/auth_token"  # Ray writes it with the umask of the process that creates it
_MAX_RAY_DIRECTORY = 35  # characters: the path of a Unix socket has 107, and Ray's own part up to 72


def restrict_umask() -> None:
    """Create all further files of this process, and of those that it starts, for this user alone."""
    os.umask(_UMASK)


@contextlib.contextmanager
def restricted_umask() -> Iterator[None]:
    """Restrict the umask in the block; processes that are started there keep it."""
    before = os.umask(_UMASK)
    try:
        yield
    finally:
        os.umask(before)


def make_private_directory(path: Path) -> None:
    """Create a folder for this user alone, or restrict an existing one. Raises OSError.

    A folder of another user, such as the root of a mounted volume, keeps its mode, with a warning.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.stat().st_mode & 0o077:
        try:
            path.chmod(0o700)
        except PermissionError:
            log.warning("%s belongs to another user: its mode stays, and others may be able to read it", path)


def get_runtime_directory() -> Path:
    """Return the folder of this user's sockets. Raises PermissionError where another user could enter it."""
    directory = Path(tempfile.gettempdir()) / f"torchrelay-{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{directory} must be a directory that only its owner can enter; remove it")
    return directory


def listen_at(path: Path, backlog: int = 100) -> socket.socket:
    """Return a Unix socket that listens at ``path``, in place of an earlier one. Raises OSError.

    It gets this name once it listens. A socket that is only bound refuses connections, as that of a killed
    process does, so another process would remove it.
    """
    unnamed = path.with_suffix(".new")
    unnamed.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(str(unnamed))
        listener.listen(backlog)
        unnamed.replace(path)
    except OSError:
        listener.close()
        raise
    return listener


def get_ray_directory() -> Path | None:
    """Return a folder for Ray's sessions; None where its path is too long for Ray's sockets.

    Ray gives its sessions mode 0777 whatever the umask: other users could replace its sockets and packages.
    The folder around them excludes these users.
    """
    directory = get_runtime_directory()
    return directory if len(str(directory)) <= _MAX_RAY_DIRECTORY else None


def restrict_ray_token(path: str = "") -> None:
    """Remove other users' access to Ray's token, which earlier versions created with mode 0644."""
    token = Path(path or _RAY_TOKEN).expanduser()
    with contextlib.suppress(OSError):
        if token.stat().st_mode & 0o077:
            token.chmod(0o600)
