"""What HAProxy answers when a replica died over a request: TorchServe's words rather than Ray Serve's.

On the fast path nobody of ours stands between the client and the replica. When the replica's process ends in the
midst of an answer, HAProxy says so with the error page of its configuration, which Ray Serve writes once, and which
HAProxy reads again whenever a route or a replica changes. So whoever starts on a node puts ours in its place.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from serve_app.doors.torchserve import errors
from serve_app.errors import WorkerDied

# Where Ray Serve keeps HAProxy's files, and its own default.
_SETTING = ("RAY_SERVE_HAPROXY_CONFIG_FILE_LOC", "/tmp/haproxy-serve/haproxy.cfg")
_FILE = "500.http"


def worker_died() -> bytes:
    """The whole answer, as it goes over the wire."""
    error = WorkerDied()
    status, _ = errors.look_up(error)
    body = errors.pretty(errors.document(error))
    head = (
        f"HTTP/1.1 {status} Internal Server Error\r\n"
        "content-type: application/json\r\n"
        f"content-length: {len(body)}\r\n"
        "cache-control: no-cache; no-store, must-revalidate, private\r\n"
        f"x-torchrelay-reason: {error.reason}\r\n"
        "\r\n"
    )
    return head.encode() + body


def put_up(node: str) -> None:
    """Replace the page of this node's HAProxy, where there is one; what keeps us from it costs only the words."""
    page = Path(os.environ.get(*_SETTING)).parent / node / _FILE
    with contextlib.suppress(OSError):
        if page.is_file() and page.read_bytes() != worker_died():
            new = page.with_suffix(f".{os.getpid()}")
            new.write_bytes(worker_died())
            new.replace(page)
