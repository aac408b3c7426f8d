"""The inference port of one replica in this process, with a connection that is answered by callbacks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

from serve_app.dataplane.data_plane import DataPlane, RoutingTableReader
from serve_app.domain.model import ModelRef
from serve_app.domain.request import InferenceRequest, InferenceResponse
from serve_app.domain.routing_table import ModelRoute, RoutingTable, VersionRoute
from serve_app.protocols.http_app import inference_app
from serve_app.runtime.batching.admission_control import ConcurrencyLimit
from serve_app.runtime.batching.batcher import Batcher
from serve_app.settings import InferenceSettings, Settings
from serve_app.telemetry.metrics import Meters
from tests.support.protocol_fakes import RecordingAccessLog
from tests.support.wire_client import RecordingTransport, connect, parse_response, use_callbacks, wait_until

HEAD = b"POST /predictions/m HTTP/1.1\r\nhost: localhost\r\n"
ROUTE = VersionRoute("1.0", "ready", 1)
Talk = Callable[["Port"], Awaitable[None]]


def message(body: bytes = b"x", headers: bytes = b"") -> bytes:
    return HEAD + headers + b"content-length: %d\r\n\r\n%s" % (len(body), body)


class Port:
    """The inference port of a replica whose handler is ``run``, with one connection."""

    def __init__(
        self, run: Any, batch_size: int = 1, table: RoutingTable | None = None, **settings: Any
    ) -> None:
        ref, self.meters, self.log = ModelRef("m", "1.0"), Meters(), RecordingAccessLog()
        self.batcher = Batcher(run, ref, self.meters, max_batch_size=batch_size, queue_size=100)
        limit = ConcurrencyLimit(self.batcher, ref)
        models = {"m": ModelRoute("1.0", {"1.0": ROUTE})}
        self.reader = RoutingTableReader(table or RoutingTable(1, models, True))
        self.plane = DataPlane(
            self.reader, self.meters, lambda ref, route: None, {(ref.name, ref.version): limit}
        )
        self.app = inference_app(
            self.plane, Settings(inference=InferenceSettings(**settings)), self.meters, self.log
        )
        self.transport = RecordingTransport()
        self.protocol: Any = None

    def send(self, data: bytes) -> None:
        self.protocol.data_received(data)

    @property
    def responses(self) -> list[Any]:
        """The whole responses so far."""
        found, data = [], bytes(self.transport.written)
        while data:
            response = parse_response(data, "POST")
            if response is None or response["transfer-encoding"] or len(response.chunks) > 1:
                return [*found, response]
            _, _, rest = data.partition(b"\r\n\r\n")
            length = int(response["content-length"] or 0)
            response.chunks, data = [rest[:length]], rest[length:]
            found.append(response)
        return found

    async def answered(self, count: int) -> list[Any]:
        await wait_until(lambda: len(self.transport.writes) >= count)  # a response is one write at least
        await wait_until(lambda: self.transport.written.count(b"HTTP/1.1 ") == count)
        await wait_until(lambda: len(self.responses) == count)
        return self.responses


def talk(conversation: Talk, run: Any = None, **options: Any) -> Port:
    """Hold a conversation on one connection of a port with callbacks, and return the port."""

    async def hold() -> Port:
        port = Port(run or echo, **options)
        with use_callbacks(port.app):
            port.protocol = connect(port.app, port.transport)
            await asyncio.wait_for(conversation(port), 60)
            await port.batcher.close()
        return port

    return asyncio.run(hold())


def echo(requests: list[InferenceRequest], emit: Any) -> list[Any]:
    return [InferenceResponse(request.inputs[0].value, version="1.0") for request in requests]


class Gate:
    """A handler that waits until the test opens it."""

    def __init__(self) -> None:
        self.opened, self.batches = threading.Event(), 0

    def __call__(self, requests: list[InferenceRequest], emit: Any) -> list[Any]:
        self.batches += 1
        assert self.opened.wait(60)
        return echo(requests, emit)
