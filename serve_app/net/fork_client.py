"""The client of the fork server (deployments/ray_internals/fork_server.py); it imports only what it needs."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

SOCKET = "TORCHRELAY_FORK_SERVER"  # the socket's path, in the environment of Ray's processes
MODEL_SUFFIX = ".model"  # of the path of the second socket, whose forks have torch

_TIMEOUT_S = 30.0  # for a fork; at the start it waits for imports of 3 CPU seconds
_SOCKET_TIMEOUT_S = 20.0  # for the first imports, which take a CPU second, on a busy machine
_SOCKET_PERIOD_S = 0.02


def wait_for_socket(path: str) -> None:
    """Return once the fork server, which has been started, has its socket, at the latest after 20 s."""
    deadline = time.monotonic() + _SOCKET_TIMEOUT_S
    while not os.path.exists(path) and time.monotonic() < deadline:
        time.sleep(_SOCKET_PERIOD_S)


def request_fork(
    path: str, script: str, arguments: Sequence[str], environment: Mapping[str, str], wait: bool = False
) -> tuple[int, socket.socket]:
    """Run a script or module in a fork of the server, with this process's folder, group and standard files.

    Return its process id and the connection, which is closed when the process ends; with ``wait``, its exit
    code is sent first. Raises OSError, also where the fork server does not answer in 30 s.
    """
    request = {
        "script": script,
        "arguments": list(arguments),
        "environment": dict(environment),
        "folder": os.getcwd(),
        "group": os.getpgid(0),
        "oom_score_adj": Path("/proc/self/oom_score_adj").read_text(),
        "wait": wait,
    }
    data = json.dumps(request).encode() + b"\n"
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(_TIMEOUT_S)
    try:
        connection.connect(path)
        sent = socket.send_fds(connection, [data], [0, 1, 2])
        connection.sendall(data[sent:])
        answer = connection.makefile("rb", buffering=0).readline()  # the exit code may already follow
        if not answer:
            raise OSError("the fork server has ended")
        connection.settimeout(None)
    except BaseException:
        connection.close()
        raise
    return int(answer), connection
