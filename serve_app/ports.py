"""Who holds a port: so that an error can name the process and not only the number."""

from __future__ import annotations

import contextlib

import psutil


def holder(port: int) -> str:
    """`` by pid 12 (name)`` of the process that listens on ``port``, or nothing where that cannot be seen."""
    with contextlib.suppress(psutil.Error):
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
                return f" by pid {connection.pid} ({psutil.Process(connection.pid).name()})"
    return ""
