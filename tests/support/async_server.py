"""A server with async predictions, in process and without a cluster; it can be started several times."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from serve_app.control.api import ControlPlane
from serve_app.control.async_predictions.blob_store import BlobStore
from serve_app.control.async_predictions.service import AsyncPredictionService
from serve_app.control.async_predictions.store import AsyncPredictionStore
from serve_app.control.async_predictions.webhooks import WebhookSender
from serve_app.control.persistence.database import Database
from serve_app.dataplane.data_plane import DataPlane, RoutingTableReader
from serve_app.domain.access import AccessTable
from serve_app.domain.request import InferenceRequest, InferenceResponse, ResponseStream
from serve_app.domain.routing_table import ModelRoute, RoutingTable, VersionRoute
from serve_app.protocols.http_app import build_replayer, inference_app
from serve_app.settings import Settings, load
from serve_app.telemetry.metrics import Meters
from tests.support.coroutine_backend import CoroutineBackend

ASYNC = {"prefer": "respond-async"}


def build_table(*models: str, access: AccessTable | None = None) -> RoutingTable:
    versions = {version: VersionRoute(version, "ready", 1) for version in ("1.0", "2.0")}
    return RoutingTable(
        1,
        {model: ModelRoute("1.0", versions) for model in models or ("m",)},
        startup_complete=True,
        access=access,
    )


class RecordingBackend(CoroutineBackend):
    """A backend that answers with a function, and appends its requests to a list."""

    def __init__(self, infer: Any, requests: list[InferenceRequest]) -> None:
        self._infer = infer
        self._requests = requests

    async def infer(self, request: InferenceRequest) -> InferenceResponse | ResponseStream:
        self._requests.append(request)
        return await self._infer(request)


class Server:
    """One run of a server: the inference app, the service of async predictions, and a persistent database."""

    def __init__(
        self, home: Path, loop: Any, infer: Any, table: RoutingTable, environ: dict, settings: dict
    ) -> None:
        self.loop = loop
        self._threads = ThreadPoolExecutor()
        loop.set_default_executor(self._threads)
        self.settings: Settings = load({"home": str(home), **settings})
        self.requests: list[InferenceRequest] = []
        self.meters = Meters()
        async_settings = self.settings.async_predictions

        def build_plane(table: RoutingTable) -> DataPlane:
            backend = RecordingBackend(infer, self.requests)
            return DataPlane(RoutingTableReader(table), self.meters, lambda ref, row: backend)

        replayer = build_replayer(build_plane(replace(table, access=None)), self.settings)
        self.database = Database(self.settings.database_url)
        store = AsyncPredictionStore(self.database, BlobStore(self.settings), async_settings.inline_max_bytes)
        webhooks = WebhookSender(async_settings, environ)

        async def build_service() -> AsyncPredictionService:
            service = AsyncPredictionService(
                store,
                replayer,
                webhooks,
                async_settings,
                self.meters,
                lambda: table.access is not None and table.access.has_several_owners,
            )
            await service.load()
            return service

        self.service = loop.run_until_complete(build_service())
        self._running = loop.create_task(self.service.run())
        plane = build_plane(table)
        control = ControlPlane(self.service, self.settings, lambda: plane.access)
        self.app = inference_app(plane, self.settings, self.meters, None, control)

    def __call__(
        self, method: str, target: str, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> ServerResponse:
        return self.loop.run_until_complete(self.send(method, target, body, headers))

    async def send(
        self, method: str, target: str, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> ServerResponse:
        return await _send(self.app, method, target, body, headers or {})

    def submit(self, target: str = "/predictions/m", body: bytes = b"x", **headers: str) -> str:
        """Submit an async prediction and return its location."""
        extra = {name.replace("_", "-"): value for name, value in headers.items()}
        response = self("POST", target, body, {**ASYNC, **extra})
        assert response.status == 202, response.body
        return response["location"] or ""

    def wait_for_state(self, location: str, *states: str) -> dict[str, Any]:
        """Return the status document as soon as it has one of these states."""
        id = location.rpartition("/")[2]

        async def poll() -> dict[str, Any]:
            while (document := await self.service.get_prediction(id, None))["state"] not in states:
                await asyncio.sleep(0.002)
            return document

        return self.loop.run_until_complete(asyncio.wait_for(poll(), 60))

    def wait_until(self, condition: Callable[[], Awaitable[bool]]) -> None:
        async def poll() -> None:
            while not await condition():
                await asyncio.sleep(0.005)

        self.loop.run_until_complete(asyncio.wait_for(poll(), 60))

    def wait_until_in_thread(self, condition: Callable[[], bool]) -> None:
        """Run the server until ``condition()``, which runs in a thread because it may block."""
        self.wait_until(lambda: asyncio.to_thread(condition))

    def result(self, location: str) -> ServerResponse:
        self.wait_for_state(location, "done", "failed")
        return self("GET", f"{location}/result")

    def stop(self) -> None:
        self._running.cancel()
        self.loop.run_until_complete(asyncio.wait({self._running}))
        self.loop.run_until_complete(self.service.close())
        self._threads.shutdown()  # threads finish their writes after their task is cancelled
        self.database.close()


async def _send(app: Any, method: str, target: str, body: bytes, headers: dict[str, str]) -> ServerResponse:
    sent: list[Any] = []
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        return messages.pop() if messages else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    path, _, query = target.partition("?")
    await app(
        {
            "type": "http",
            "method": method,
            "path": path,
            "query_string": query.encode(),
            "headers": [(k.lower().encode(), v.encode()) for k, v in headers.items()],
            "http_version": "1.1",
            "client": ("127.0.0.1", 40000),
        },
        receive,
        send,
    )
    return ServerResponse(sent)


class ServerResponse:
    """A response as its ASGI messages; indexing returns a header."""

    def __init__(self, messages: list[Any]) -> None:
        self.status = messages[0]["status"]
        self.headers = [(name.decode(), value.decode()) for name, value in messages[0]["headers"]]
        self.body = b"".join(message["body"] for message in messages[1:])

    def __getitem__(self, name: str) -> str | None:
        values = [value for key, value in self.headers if key == name]
        assert len(values) < 2, f"{name} was sent {len(values)} times"
        return values[0] if values else None

    @property
    def json(self) -> Any:
        return json.loads(self.body)


async def echo(request: InferenceRequest) -> InferenceResponse:
    body = b"&".join(part.value for part in request.inputs)
    return InferenceResponse(
        body, "text/plain", headers=(("x-of-handler", "yes"),), version=request.version or "1.0"
    )


@contextlib.contextmanager
def locked_database(home: Path) -> Iterator[None]:
    """Hold SQLite's lock, so that every write of the server waits."""
    with contextlib.closing(sqlite3.connect(home / "state/registry.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield
        other.execute("COMMIT")


@contextlib.contextmanager
def server_runs(home: Path) -> Iterator[Callable[..., Server]]:
    """Start servers over one database, one after the other or concurrently; stop them all at the end."""
    loop = asyncio.new_event_loop()
    servers: list[Server] = []

    def start(
        infer: Any = None, table: RoutingTable | None = None, environ: dict | None = None, **settings: Any
    ) -> Server:
        servers.append(Server(home, loop, infer or echo, table or build_table(), environ or {}, settings))
        return servers[-1]

    try:
        yield start
    finally:
        for server in servers:
            server.stop()
        loop.close()
