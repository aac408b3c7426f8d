"""The group `oip` sends the bytes of the protocol, and counts no wrong response as a right one."""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from serve_app.load_test.profile import LoadProfile
from tests.benchmarks import open_inference
from tests.benchmarks.servers import PeerFailed
from tests.support.http_server import running

pytestmark = pytest.mark.nightly


@pytest.fixture
def server():
    """Send a request's tensors back as outputs; ``broken`` replaces the response."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        broken: bytes | None = None

        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            size = int(self.headers.get(open_inference.LENGTH, len(body)))
            output = json.loads(body[:size])
            head = self.broken or json.dumps({"outputs": output["inputs"]}).encode()
            self.send_response(200)
            if size < len(body):
                self.send_header(open_inference.LENGTH, str(len(head)))
            self.send_header("Content-Length", str(len(head) + len(body) - size))
            self.end_headers()
            self.wfile.write(head + body[size:])

        def log_message(self, *_):
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, *_):
            """Ignore the generator's disconnect during an answer."""

    with running(Server(("127.0.0.1", 0), Handler)) as address:
        yield address, Handler


def test_what_is_sent_comes_back(server, monkeypatch):
    monkeypatch.setattr(
        open_inference, "NUMBERS", 1 << 12
    )  # a MiB as JSON takes this server seconds on a busy machine
    address, _ = server
    for contender in (
        open_inference.echo("echo", address, "m"),
        open_inference.mebibyte("raw", address, "m", True),
        open_inference.mebibyte("json", address, "m", False),
    ):
        result = contender.measure(LoadProfile(connections=1, seconds=3, warmup=0.1))
        assert result.requests > 0
        assert result.failed == 0


def test_a_wrong_answer_is_none(server):
    address, handler = server
    handler.broken = b'{"outputs": [{"name": "x", "data": [1]}]}'
    with pytest.raises(PeerFailed, match="wrong answer"):
        open_inference.echo("echo", address, "m")
