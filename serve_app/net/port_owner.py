"""Lookup of the process that holds a port, for error messages."""

from __future__ import annotations

import contextlib

import psutil


def describe_port_owner(port: int) -> str:
    """Return `` by pid 12 (name)`` for the process that listens on ``port``; empty where it is not
    visible.
    """
    with contextlib.suppress(psutil.Error):
        for connection in psutil.net_connections("tcp"):
            address, pid = connection.laddr, connection.pid
            if connection.status == psutil.CONN_LISTEN and address and address.port == port and pid:
                return f" by pid {pid} ({psutil.Process(pid).name()})"
    return ""
