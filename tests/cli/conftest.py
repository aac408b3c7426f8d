"""Management APIs of tests, served over HTTP."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

Respond = Callable[[str, str, Any], tuple[int, Any]]


@pytest.fixture
def serve_json() -> Iterator[Callable[[Respond], str]]:
    """Serve a function in a thread; calling the fixture returns the URL.

    The function gets a request's method, path and JSON body, and returns a status and a JSON value.
    """
    with contextlib.ExitStack() as stack:
        yield lambda respond: stack.enter_context(_serve(respond))


@contextlib.contextmanager
def _serve(respond: Respond) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            received = self.rfile.read(int(self.headers.get("content-length") or 0))
            status, document = respond(self.command, self.path, json.loads(received) if received else None)
            body = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_PUT = do_DELETE = do_GET

        def log_message(self, *_: object) -> None:
            """Log nothing: tests read the recorded requests."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()
