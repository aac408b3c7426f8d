"""The error page of HAProxy for a replica that died during a request: TorchServe's text, not Ray Serve's.

On the fast path only HAProxy is between the client and the replica. When the replica's process ends during a
response, HAProxy sends the error page of its configuration. Ray Serve writes that page once, and HAProxy
reads it again whenever a route or a replica changes. So each process that starts on a node replaces the page.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from serve_app.errors import ReplicaDied
from serve_app.protocols.torchserve import errors

# Where Ray Serve keeps HAProxy's files, and its own default.
_SETTING = ("RAY_SERVE_HAPROXY_CONFIG_FILE_LOC", "/tmp/haproxy-serve/haproxy.cfg")
_FILE = "500.http"


def replica_died() -> bytes:
    """Return the whole response, as it is sent."""
    error = ReplicaDied()
    status, _ = errors.look_up(error)
    body = errors.encode_json(errors.to_document(error))
    head = (
        f"HTTP/1.1 {status} Internal Server Error\r\n"
        "content-type: application/json\r\n"
        f"content-length: {len(body)}\r\n"
        "cache-control: no-cache; no-store, must-revalidate, private\r\n"
        f"x-torchrelay-reason: {error.reason}\r\n"
        "\r\n"
    )
    return head.encode() + body


def install_page(node: str) -> None:
    """Replace the error page of this node's HAProxy, if it has one; an error leaves Ray's own text."""
    page = Path(os.environ.get(*_SETTING)).parent / node / _FILE
    with contextlib.suppress(OSError):
        if page.is_file() and page.read_bytes() != replica_died():
            new = page.with_suffix(f".{os.getpid()}")
            new.write_bytes(replica_died())
            new.replace(page)
