"""The supervisor: the first process of a server, which deploys it, copies its logs, and ends it in order.

``python -m serve_app.cli.supervisor LOGS ADDRESS CONFIG``: the folder of Ray's logs, Ray's address, and the
configuration. Ray's processes are its children and end with it. It imports little and takes 8 MiB.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from serve_app.net import fork_client

_COPY_PERIOD_S = 0.5
_PROGRAM = "serve_app.deployments.ray_internals.deploy"
_LOG = re.compile(r"worker-[0-9a-f]+-[0-9a-f]+-(\d+)\.(?:out|err)|(raylet|gcs_server)\.err")
_MARK = re.compile(rb":(actor_name|task_name|job_id):(.*)")
_MAX_BYTES = 1 << 20  # of one file at once
_MAX_LOG_BYTES = 256 << 20  # of the server's log; a longer one is put aside


class LogCopier:
    """A copier of what Ray's workers write, line by line with the name of the actor, to a file descriptor."""

    def __init__(self, folder: Path, target: int) -> None:
        self._folder = folder
        self._target = target
        self._positions: dict[str, int] = {}
        self._names: dict[str, bytes] = {}  # of the actor, by the process's id

    def copy(self) -> None:
        """Copy the complete lines that were written since the last call."""
        with suppress(OSError), os.scandir(self._folder) as entries:
            for entry in entries:
                if match := _LOG.fullmatch(entry.name):
                    size, start = entry.stat().st_size, self._positions.get(entry.name, 0)
                    if size != start:
                        self._copy_file(entry, match[1] or "", start if start < size else 0)

    def _copy_file(self, entry: os.DirEntry[str], pid: str, start: int) -> None:
        """Copy a file from a position; a file that is shorter than before was rotated and starts anew."""
        with open(entry.path, "rb") as file:
            file.seek(start)
            data = file.read(_MAX_BYTES)
        end = len(data) if len(data) == _MAX_BYTES else data.rfind(b"\n") + 1
        self._positions[entry.name] = start + end
        lines = []
        for line in data[:end].splitlines():
            if mark := _MARK.fullmatch(line):
                if mark[1] != b"job_id":
                    self._names[pid] = mark[2]
            else:
                name = self._names.get(pid, entry.name.partition(".")[0].partition("-")[0].encode())
                lines.append(b"(%s pid=%s) %s\n" % (name, pid.encode(), line) if pid else line + b"\n")
        if lines:
            os.write(self._target, b"".join(lines))


def rotate(descriptor: int, limit: int = _MAX_LOG_BYTES) -> None:
    """Move the contents of a log that is longer than ``limit`` bytes to ``NAME.1``.

    Every process of the server holds the file, and appends to it, so it is truncated instead of renamed.
    """
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_size <= limit:
        return
    with suppress(OSError):  # a full disk: the log is truncated all the same
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        shutil.copyfile(path, f"{path}.1")
    with suppress(OSError):
        os.ftruncate(descriptor, 0)


class Program:
    """A run of the program that deploys and shuts down, in a fork of the fork server if there is one."""

    def __init__(self, *arguments: str) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        try:
            path = os.environ[fork_client.SOCKET]
            fork_client.wait_for_socket(path)
            _, self._connection = fork_client.request_fork(
                path, _PROGRAM, [_PROGRAM, *arguments], os.environ, wait=True
            )
        except OSError:
            self._process = subprocess.Popen([sys.executable, "-m", _PROGRAM, *arguments])

    def wait(self, timeout: float) -> int | None:
        """Return the exit code, or None where the program takes longer than ``timeout`` seconds."""
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                return self._process.wait(timeout)
            return None
        self._connection.settimeout(timeout)
        try:
            return int(self._connection.recv(16) or 1)  # 1 where it was killed
        except TimeoutError:
            return None


def has_children() -> bool:
    """Reap the processes of Ray that have ended; return whether one is left."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def main() -> int:
    """Supervise the server until a signal or the last process of Ray ends it; return the exit code."""
    folder, address, config = sys.argv[1:4]
    logs = LogCopier(Path(folder), sys.stdout.fileno())
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    signal.signal(
        signal.SIGHUP, signal.SIG_IGN
    )  # a request to reload a configuration, which must end nothing
    try:
        program = Program(address, config)
        while (code := program.wait(_COPY_PERIOD_S)) is None:
            logs.copy()
            rotate(sys.stdout.fileno())
        logs.copy()
        if code:
            return code
        while has_children():
            time.sleep(_COPY_PERIOD_S)
            logs.copy()
            rotate(sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        Program(address).wait(60)
        logs.copy()
        return 0


if __name__ == "__main__":
    sys.exit(main())
