"""The least that a Python server can do for a model: a parser, a list, a thread, and one callback per batch.

``python -m tests.benchmarks.bare_parser ARCHIVE NAME PORT FRONT_PORT FOLDER`` serves the archive at
``/predictions/NAME``, on PORT itself and on FRONT_PORT behind Ray Serve's HAProxy. It has no ASGI, no task
and no future per request; it checks nothing and records nothing. A server's own cost is the difference.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import queue
import subprocess
import sys
import threading
from pathlib import Path

import httptools
import orjson
import uvloop

import handlers
from handlers.context import Context, Row
from handlers.torchserve_compat import names
from serve_app.model_store.cache import unpack
from serve_app.settings import ModelStoreSettings

BATCH = 16
_OK = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
_HEALTHY = _OK % (21, b'{"status": "Healthy"}')


class BareModel:
    """A handler in a thread of its own, which starts a batch as soon as it is idle."""

    def __init__(self, file: Path, folder: Path, loop: asyncio.AbstractEventLoop) -> None:
        directory = unpack(file, folder / file.stem, ModelStoreSettings())
        manifest = json.loads((directory / "MAR-INF" / "MANIFEST.json").read_text())
        self.context = Context(file.stem, str(directory), manifest, batch_size=BATCH)
        names.install()
        self.entry = handlers.load(manifest["model"]["handler"], directory, manifest)
        self.entry.initialize(self.context)
        self.loop, self.is_busy = loop, False
        self.waiting: list[tuple[BareConnection, bytes]] = []
        self.batches: queue.SimpleQueue[list[tuple[BareConnection, bytes]]] = queue.SimpleQueue()
        threading.Thread(target=self.run, daemon=True).start()

    def add(self, connection: BareConnection, body: bytes) -> None:
        """Append a request; its batch starts in this pass of the event loop where the thread is idle."""
        self.waiting.append((connection, body))
        if not self.is_busy:
            self.is_busy = True
            self.loop.call_soon(self.start)

    def start(self) -> None:
        batch, self.waiting = self.waiting[:BATCH], self.waiting[BATCH:]
        self.is_busy = bool(batch)
        if batch:
            self.batches.put(batch)

    def run(self) -> None:
        while True:
            batch = self.batches.get()
            rows = [Row({"body": orjson.loads(body)}) for _, body in batch]
            ids = [""] * len(rows)
            self.context.begin(ids, [{}] * len(rows), [{"body": {}}] * len(rows), None)
            bodies = [orjson.dumps(value) for value in self.entry(rows, self.context)]
            self.loop.call_soon_threadsafe(self.write, batch, bodies)

    def write(self, batch: list[tuple[BareConnection, bytes]], bodies: list[bytes]) -> None:
        """Start the next batch, then write the responses of this one."""
        self.start()
        for (connection, _), body in zip(batch, bodies):
            connection.transport.write(_OK % (len(body), body))


class BareConnection(asyncio.Protocol):
    """A keep-alive connection; each complete POST goes to the model, and everything else is healthy."""

    transport: asyncio.Transport

    def __init__(self, model: BareModel) -> None:
        self.model, self.body = model, b""
        self.parser = httptools.HttpRequestParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        if self.parser.get_method() == b"POST":
            self.model.add(self, self.body)
            self.body = b""
        else:
            self.transport.write(_HEALTHY)


async def serve(file: Path, name: str, port: int, front_port: int, folder: Path) -> None:
    """Serve until SIGINT, or until HAProxy has ended."""
    loop = asyncio.get_running_loop()
    model = BareModel(file, folder, loop)
    sys.setswitchinterval(0.001)  # as in a replica
    gc.collect()
    gc.freeze()
    server = await loop.create_server(lambda: BareConnection(model), "127.0.0.1", port, backlog=2048)
    command = [sys.executable, "-m", "tests.benchmarks.haproxy_front", name, str(port), str(front_port)]
    # A process group of its own: it ends with this process, and not by the SIGINT of a terminal.
    front = await loop.run_in_executor(None, lambda: subprocess.Popen([*command, str(folder)]))
    try:
        await loop.run_in_executor(None, front.wait)
    finally:
        server.close()
        front.kill()


if __name__ == "__main__":
    file, name, port, front_port, folder = sys.argv[1:]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(serve(Path(file), name, int(port), int(front_port), Path(folder)))
