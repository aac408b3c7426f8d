"""An HTTP server whose responses a test writes."""

from __future__ import annotations

import contextlib
import json
import ssl
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.support.certificates import make_pair


@contextlib.contextmanager
def serving(
    answer: Callable[[Any], None],
    version: str = "HTTP/1.0",
    port: int = 0,
    context: ssl.SSLContext | None = None,
) -> Iterator[str]:
    """Run an HTTP server that answers every request by ``answer(handler)``; yield its address.

    With a ``context`` it has TLS.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = version

        def do_GET(self) -> None:
            answer(self)

        do_HEAD = do_POST = do_PUT = do_DELETE = do_GET

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    if context is not None:
        server.socket = context.wrap_socket(server.socket, server_side=True)
    with running(server) as address:
        yield address if context is None else address.replace("http", "https")


@contextlib.contextmanager
def serving_folder(folder: Path) -> Iterator[str]:
    """Serve the files of a folder; yield the address."""

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

    with running(ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder)))) as address:
        yield address


@contextlib.contextmanager
def running(server: HTTPServer) -> Iterator[str]:
    """Run a server in a thread; yield its address."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def read_body(handler: BaseHTTPRequestHandler) -> bytes:
    return handler.rfile.read(int(handler.headers.get("content-length") or 0))


def respond(handler: BaseHTTPRequestHandler, status: int, body: Any = b"", **headers: str) -> None:
    """Send a response whose body is bytes or a JSON value; the names of ``headers`` have underscores."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    handler.send_response(status)
    handler.send_header("content-length", str(len(content)))
    for name, value in headers.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()
    handler.wfile.write(content)


@contextlib.contextmanager
def dripping(version: str = "HTTP/1.0", context: ssl.SSLContext | None = None) -> Iterator[str]:
    """Run an HTTP server that sends a header which never ends, byte by byte; yield its address."""
    ended = threading.Event()

    def answer(handler: Any) -> None:
        with contextlib.suppress(OSError):
            handler.wfile.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
            while not ended.wait(0.05):
                handler.wfile.write(b"x")

    with serving(answer, version, context=context) as address:
        try:
            yield address
        finally:
            ended.set()


def trusted_tls(folder: Path, monkeypatch: pytest.MonkeyPatch) -> ssl.SSLContext:
    """Return the context of a server for 127.0.0.1 whose certificate clients of this process trust."""
    make_pair(folder)
    monkeypatch.setenv("SSL_CERT_FILE", str(folder / "certificate.pem"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "certificate.pem", folder / "key.pem")
    return context
