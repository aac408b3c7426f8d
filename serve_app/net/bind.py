"""Binding of a port before requests are accepted there."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import random
import socket

import psutil

from serve_app.errors import ConfigurationError

log = logging.getLogger(__name__)

_FREE_PORTS = range(20_000, 29_000)  # outside the ranges that the kernel and Ray allocate from
BIND_TIMEOUT = 15.0  # seconds to wait for a port that a predecessor still holds


def free_port() -> int:
    """Return a port on which nothing listens."""
    for port in random.sample(_FREE_PORTS, len(_FREE_PORTS)):  # servers that start at once differ
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port
    raise OSError("no free port on loopback")


async def bind(
    host: str, port: int, setting: str, timeout: float = BIND_TIMEOUT, shared: bool = False
) -> socket.socket:
    """Return a socket that is bound to ``host:port``; ``setting`` is the setting of the port, for error
    messages.

    While the port is taken, ``bind`` retries for at most ``timeout`` seconds. A ``shared`` port may be bound
    by other processes too, such as the one that this process replaces, and the kernel distributes connections
    among them. Raises ConfigurationError, which names the process that holds the port and the setting.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    waited = False
    while True:
        try:
            sock = _bind_socket(host, port)
            if not shared:
                return sock
            sock.close()  # SO_REUSEPORT must be set before binding
            return _bind_socket(host, port, shared)
        except OSError as error:
            failure = error
        if shared and failure.errno == errno.EADDRINUSE:
            with contextlib.suppress(OSError):
                sock = _bind_socket(host, port, shared)
                log.warning("%s is shared with another process%s", where, describe_port_owner(port))
                return sock
        if failure.errno != errno.EADDRINUSE or loop.time() > deadline:
            remedy = f"set {setting} to another one"
            raise ConfigurationError(
                where, f"{failure.strerror}{describe_port_owner(port)}; {remedy}"
            ) from None
        if not waited:
            log.warning("%s is in use%s; waiting for it", where, describe_port_owner(port))
            waited = True
        await asyncio.sleep(0.1)


def _bind_socket(host: str, port: int, shared: bool = False) -> socket.socket:
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind((host, port))
    except OSError:
        sock.close()
        raise
    return sock


def find_port_owner(port: int) -> psutil.Process | None:
    """Return the process that listens on ``port``; None where it is not visible."""
    with contextlib.suppress(psutil.Error):
        for connection in psutil.net_connections("tcp"):
            address, pid = connection.laddr, connection.pid
            if connection.status == psutil.CONN_LISTEN and address and address.port == port and pid:
                return psutil.Process(pid)
    return None


def describe_process(process: psutil.Process | None) -> str:
    """Return `` by pid 12 (name)``; empty for None and for a process that has ended."""
    with contextlib.suppress(psutil.Error):
        return f" by pid {process.pid} ({process.name()})" if process is not None else ""
    return ""


def describe_port_owner(port: int) -> str:
    """Return `` by pid 12 (name)`` for the process that listens on ``port``, empty if it is not visible."""
    return describe_process(find_port_owner(port))
