"""One life of a server whose predictions are answered later, without a cluster; and one life after the other."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from serve_app.control.database import Database
from serve_app.control.deferrals import StoredDeferrals
from serve_app.control.results import Results
from serve_app.control.webhooks import Webhooks
from serve_app.controlplane import ControlPlane
from serve_app.dataplane import DataPlane, TableReader
from serve_app.deployments.deferrals import Deferrals
from serve_app.doors.app import inference_app, replay
from serve_app.settings import Settings, load
from serve_app.telemetry.metrics import Meters
from serve_app.types import Access, Call, ModelRow, Reply, ReplyStream, Table, VersionRow

ASYNC = {"prefer": "respond-async"}


def table(*models: str, access: Access | None = None) -> Table:
    rows = {version: VersionRow(version, "ready", 1) for version in ("1.0", "2.0")}
    return Table(1, {model: ModelRow("1.0", rows) for model in models or ("m",)}, settled=True, access=access)


class Server:
    """One life of a server: a door in front, the owner of what is put aside behind, a database that stays."""

    def __init__(self, home: Path, loop: Any, infer: Any, table: Table, environ: dict, said: dict) -> None:
        self.loop = loop
        self._threads = ThreadPoolExecutor()
        loop.set_default_executor(self._threads)
        self.settings: Settings = load({"home": str(home), **said})
        self.calls: list[Call] = []
        self.meters = Meters()
        asynchronous = self.settings.asynchronous

        class Target:
            async def infer(_, call: Call) -> Reply | ReplyStream:
                self.calls.append(call)
                return await infer(call)

        def plane(shown: Table) -> DataPlane:
            return DataPlane(TableReader(shown), self.meters, lambda ref, row: Target())

        behind = replay(plane(replace(table, access=None)), self.settings)
        self.database = Database(self.settings.database_url)
        stored = StoredDeferrals(self.database, Results(self.settings), asynchronous.inline)
        hooks = Webhooks(asynchronous, environ)

        async def make() -> Deferrals:
            owner = Deferrals(stored, behind, hooks, asynchronous, self.meters)
            await owner.load()
            return owner

        self.owner = loop.run_until_complete(make())
        self._running = loop.create_task(self.owner.run())
        front = plane(table)
        control = ControlPlane(self.owner, self.settings, lambda: front.access)
        self.app = inference_app(front, self.settings, self.meters, None, control)

    def __call__(self, method: str, target: str, body: bytes = b"", headers: dict[str, str] | None = None) -> Any:
        return self.loop.run_until_complete(self.ask(method, target, body, headers))

    async def ask(self, method: str, target: str, body: bytes = b"", headers: dict[str, str] | None = None) -> Said:
        return await _ask(self.app, method, target, body, headers or {})

    def later(self, target: str = "/predictions/m", body: bytes = b"x", **headers: str) -> str:
        """Where an accepted prediction is."""
        said = {name.replace("_", "-"): value for name, value in headers.items()}
        answer = self("POST", target, body, {**ASYNC, **said})
        assert answer.status == 202, answer.body
        return answer["location"]

    def until(self, where: str, *states: str) -> dict[str, Any]:
        """The status document as soon as it is in one of these states."""

        async def look() -> dict[str, Any]:
            while (said := await self.owner.deferral(where.rpartition("/")[2], ("*",)))["state"] not in states:
                await asyncio.sleep(0.002)
            return said

        return self.loop.run_until_complete(asyncio.wait_for(look(), 60))

    def wait(self, condition: Callable[[], Awaitable[bool]]) -> None:
        async def look() -> None:
            while not await condition():
                await asyncio.sleep(0.005)

        self.loop.run_until_complete(asyncio.wait_for(look(), 60))

    def until_is(self, condition: Callable[[], bool]) -> None:
        """Let it run until ``condition()``, which is asked in a thread: it may block."""
        self.wait(lambda: asyncio.to_thread(condition))

    def result(self, where: str) -> Any:
        self.until(where, "done", "failed")
        return self("GET", f"{where}/result")

    def end(self) -> None:
        self._running.cancel()
        self.loop.run_until_complete(asyncio.wait({self._running}))
        self.loop.run_until_complete(self.owner.close())
        self._threads.shutdown()  # what they still write goes on when its task is cancelled
        self.database.close()


async def _ask(app: Any, method: str, target: str, body: bytes, headers: dict[str, str]) -> Said:
    sent: list[Any] = []
    pieces = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        return pieces.pop() if pieces else {"type": "http.disconnect"}

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
    return Said(sent)


class Said:
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


async def echo(call: Call) -> Reply:
    body = b"&".join(part.value for part in call.inputs)
    return Reply(body, "text/plain", headers=(("x-of-handler", "yes"),), version=call.version or "1.0")


@contextlib.contextmanager
def lives(home: Path) -> Iterator[Callable[..., Server]]:
    """Begins lives of a server, one after the other or beside one another; they end when it is left."""
    loop = asyncio.new_event_loop()
    begun: list[Server] = []

    def begin(infer: Any = None, shown: Table | None = None, environ: dict | None = None, **said: Any) -> Server:
        begun.append(Server(home, loop, infer or echo, shown or table(), environ or {}, said))
        return begun[-1]

    try:
        yield begin
    finally:
        for life in begun:
            life.end()
        loop.close()
