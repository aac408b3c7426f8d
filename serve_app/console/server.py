"""The console's process: uvicorn over a port or a Unix socket."""

from __future__ import annotations

import asyncio
import os
import ssl
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from serve_app.console.app import MAX_MESSAGE_BYTES, ConsoleApp
from serve_app.console.sessions import ServerAddresses, SessionStore
from serve_app.net.request_origin import CrossSitePolicy

_CHECK_INTERVAL_S = 1.0


@dataclass(frozen=True)
class ConsoleListener:
    """A Unix socket, or a host and a port; ``idle_timeout`` seconds without use end the process, 0 never."""

    socket: str = ""
    host: str = "127.0.0.1"
    port: int = 8088
    idle_timeout: float = 0.0
    allowed_hosts: tuple[str, ...] = ()


def serve(addresses: ServerAddresses, listener: ConsoleListener, ends_with_stdin: bool = False) -> None:
    """Serve the console until a signal, ``idle_timeout``, or with ``ends_with_stdin`` the end of stdin.

    The parent process holds the other end of stdin, so that the console ends with it.
    """
    is_proxied = bool(listener.socket)  # then the proxy has checked the host
    policy = CrossSitePolicy(
        "console", listener.allowed_hosts, lambda: not is_proxied, bound_host=listener.host
    )
    app = ConsoleApp(SessionStore(addresses), policy.check)
    config = uvicorn.Config(
        app,
        uds=listener.socket or None,
        host=listener.host,
        port=listener.port,
        log_level="warning",
        access_log=False,
        ws_max_size=MAX_MESSAGE_BYTES,
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    if ends_with_stdin:
        threading.Thread(target=_wait_for_end, args=(server,), daemon=True).start()
    asyncio.run(_run(server, app, listener.idle_timeout))


async def _run(server: uvicorn.Server, app: ConsoleApp, idle_timeout: float) -> None:
    async def end_when_idle() -> None:
        while app.idle_s < idle_timeout:
            await asyncio.sleep(min(_CHECK_INTERVAL_S, idle_timeout))
        server.should_exit = True

    task = asyncio.create_task(end_when_idle()) if idle_timeout else None
    try:
        await server.serve()
    finally:
        if task is not None:
            task.cancel()


def _wait_for_end(server: uvicorn.Server) -> None:
    while sys.stdin.buffer.read(1):
        pass
    server.should_exit = True


def trust_certificate(path: Path) -> ssl.SSLContext:
    """Return a TLS context that accepts exactly this certificate, whatever name it is reached by."""
    context = ssl.create_default_context(cafile=str(path))
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


def main() -> None:
    """Serve the console of a parent process, which passes the addresses in the environment."""
    certificate = os.environ.get("TORCHRELAY_CONSOLE_CERTIFICATE")
    addresses = ServerAddresses(
        os.environ["TORCHRELAY_CONSOLE_INFERENCE"],
        os.environ["TORCHRELAY_CONSOLE_MANAGEMENT"],
        os.environ["TORCHRELAY_CONSOLE_METRICS"],
        trust_certificate(Path(certificate)) if certificate else True,
    )
    socket, idle_timeout = sys.argv[1:]
    serve(addresses, ConsoleListener(socket, idle_timeout=float(idle_timeout)), ends_with_stdin=True)


if __name__ == "__main__":
    main()
