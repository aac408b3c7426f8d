"""A port of this process's own, bound before anything is served there."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket

from serve_app.errors import ConfigurationError
from serve_app.ports import holder

log = logging.getLogger("torchrelay.listener")

PATIENCE = 15.0  # seconds for which a port that a predecessor still holds is waited for


async def bind(host: str, port: int, setting: str, patience: float = PATIENCE, shared: bool = False) -> socket.socket:
    """A socket that is bound to ``host:port``; ``setting`` is where an operator changes the port.

    A port that is taken is waited for, ``patience`` seconds at most, but where it is ``shared``: then others may be
    bound to it too, such as the process that this one replaces, and the kernel deals connections out among them.
    Raises ConfigurationError, which names who holds the port and which setting moves it.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + patience
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    waited = False
    while True:
        try:
            alone = _bound(host, port)
        except OSError as error:
            trouble = error
        else:
            if not shared:
                return alone
            alone.close()  # who shares it must say so before binding
            return _bound(host, port, shared)
        if shared and trouble.errno == errno.EADDRINUSE:
            try:
                beside = _bound(host, port, shared)
            except OSError as error:
                trouble = error
            else:
                log.warning("%s is shared with another process%s", where, holder(port))
                return beside
        if trouble.errno != errno.EADDRINUSE or loop.time() > deadline:
            cure = f"set {setting} to another one"
            raise ConfigurationError(where, f"{trouble.strerror}{holder(port)}; {cure}") from None
        if not waited:
            log.warning("%s is in use%s; waiting for it", where, holder(port))
            waited = True
        await asyncio.sleep(0.1)


def _bound(host: str, port: int, shared: bool = False) -> socket.socket:
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
