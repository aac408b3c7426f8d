"""Both apps in process: a real DataPlane over a target that the test writes, a real ControlPlane over
a keeper in memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import pytest
import uvicorn
from parts import free_port

from serve_app.control.admission import Admission
from serve_app.controlplane import ControlPlane, Keeper
from serve_app.dataplane import DataPlane, TableReader
from serve_app.deployments.grpc_listener import GrpcListener
from serve_app.doors.app import App, inference_app, management_app
from serve_app.doors.grpc.app import inference_server, management_server
from serve_app.errors import CannotRemoveDefault, ModelNotFound, UnknownDefault, VersionExists, VersionNotFound
from serve_app.graph import Graph
from serve_app.settings import ControlSettings, InferenceSettings, Settings, load
from serve_app.telemetry.metrics import Meters
from serve_app.types import (
    Access,
    Call,
    Description,
    ModelRef,
    ModelRow,
    ModelSpec,
    ModelStatus,
    Progress,
    Registration,
    Reply,
    ReplyStream,
    Table,
    VersionRow,
    Worker,
)

Infer = Callable[[Call], Awaitable["Reply | ReplyStream"]]


@dataclass
class Answer:
    """What the app sent: ``pieces`` are the body messages, one each."""

    status: int = 0
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    pieces: list[bytes] = field(default_factory=list)
    ended: bool = False
    error: BaseException | None = None

    @property
    def body(self) -> bytes:
        return b"".join(self.pieces)

    def __getitem__(self, name: str) -> str | None:
        values = [value.decode("latin-1") for key, value in self.headers if key == name.encode()]
        assert len(values) <= 1, f"{name} was sent {len(values)} times"
        return values[0] if values else None


def ask(
    app: App,
    method: str,
    target: str,
    body: bytes | list[bytes] = b"",
    headers: dict[str, str] | None = None,
    scope: dict[str, Any] | None = None,
    raises: bool = False,
    loop: asyncio.AbstractEventLoop | None = None,
    leaves: bool = False,
) -> Answer:
    """One request over the bare ASGI interface; a body that is a list comes in as many pieces.

    The caller stays until it has its answer; one that ``leaves`` is gone when it has sent its body.
    """
    run = asyncio.run if loop is None else loop.run_until_complete
    return run(_ask(app, method, target, body, headers or {}, scope or {}, raises, leaves))


async def _ask(app, method, target, body, headers, scope, raises, leaves) -> Answer:
    answer = Answer()
    pieces = list(body) if isinstance(body, list) else [body]
    gone = asyncio.Event()
    if leaves:
        gone.set()

    async def receive() -> dict[str, Any]:
        if not pieces:
            await gone.wait()
            return {"type": "http.disconnect"}
        piece = pieces.pop(0)
        return {"type": "http.request", "body": piece, "more_body": bool(pieces)}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            assert not answer.status
            answer.status, answer.headers = message["status"], list(message["headers"])
        else:
            assert answer.status
            assert not answer.ended
            answer.pieces.append(message.get("body", b""))
            answer.ended = not message.get("more_body", False)
            if answer.ended:
                gone.set()

    path, _, query = target.partition("?")
    full = {
        "type": "http",
        "method": method,
        "path": path,
        "root_path": "",
        "query_string": query.encode(),
        "headers": [(k.lower().encode("latin-1"), v.encode("latin-1")) for k, v in headers.items()],
        "http_version": "1.1",
        "client": ("127.0.0.1", 40000),
        **scope,
    }
    try:
        await app(full, receive, send)
    except Exception as error:
        if not raises:
            raise
        answer.error = error
    return answer


class Says:
    """A target that answers with a function, and keeps the calls it got."""

    def __init__(self, infer: Infer) -> None:
        self._infer = infer
        self.calls: list[Call] = []
        self.ref: ModelRef | None = None  # the version that the last call was given

    def at(self, ref: ModelRef) -> Says:
        self.ref = ref
        return self

    async def infer(self, call: Call) -> Reply | ReplyStream:
        self.calls.append(call)
        return await self._infer(call)


async def echo(call: Call) -> Reply:
    return Reply(call.inputs[0].value if call.inputs else b"", version=call.version or "1.0")


def two_versions() -> Table:
    rows = {version: VersionRow(version, "ready", 1) for version in ("1.0", "2.0")}
    return Table(1, {"m": ModelRow("1.0", rows)}, settled=True)


@dataclass
class Inference:
    app: App
    target: Says
    meters: Meters
    access: list[tuple]
    reader: TableReader
    plane: DataPlane

    def __call__(self, method: str, target: str, *args: Any, **named: Any) -> Answer:
        return ask(self.app, method, target, *args, **named)


class Lines:
    """An access log that keeps its lines."""

    json = False

    def __init__(self) -> None:
        self.lines: list[tuple] = []

    def write(self, *line: Any) -> None:
        self.lines.append(line)


@pytest.fixture
def inference() -> Callable[..., Inference]:
    def build(infer: Infer = echo, table: Table | None = None, keeper: Any = None, **settings_: Any) -> Inference:
        target, meters, access = Says(infer), Meters(), Lines()
        settings = Settings(inference=InferenceSettings(**settings_))
        reader = TableReader(two_versions() if table is None else table)
        plane = DataPlane(
            reader, meters, lambda ref, row: target.at(ref), most_items=settings.inference.max_workflow_items
        )
        control = ControlPlane(keeper or Shelf(), settings, lambda: None)
        app = inference_app(plane, settings, meters, access, control)
        return Inference(app, target, meters, access.lines, reader, plane)

    return build


class Shelf:
    """A keeper in memory: every archive is called after its URL, and its version stands behind a dash.

    With an ``admission`` it takes real archives.
    """

    def __init__(self) -> None:
        self.specs: dict[str, dict[str, ModelSpec]] = {}
        self.defaults: dict[str, str] = {}
        self.status: dict[ModelRef, ModelStatus] = {}
        self.said: Any = None  # what handlers say of themselves
        self.fails: Exception | None = None
        self.state: str = "done"
        self.between: tuple[int, int] | None = None  # autoscaling begins
        self.was_between: tuple[int, int] | None = None  # autoscaling ends
        self.admission: Admission | None = None
        self.asked: list[tuple] = []

    def _spec(self, model: str, version: str | None) -> ModelSpec:
        if model not in self.specs:
            raise ModelNotFound(model)
        version = version or self.defaults[model]
        if version not in self.specs[model]:
            raise VersionNotFound(model, version)
        return self.specs[model][version]

    def _under_way(self, ref: ModelRef, count: int, wait: bool) -> Progress:
        if self.fails is not None:
            raise self.fails
        state = self.state if wait else "processing"
        return Progress(ref, count, state if count else "done")

    async def register(self, registration: Registration) -> Progress:
        self.asked.append(("register", registration))
        if self.admission is not None:
            admitted = await asyncio.to_thread(self.admission.admit, registration)
            registration = replace(registration, url=f"{admitted.name}-{admitted.version}.mar")
        name, _, version = registration.url.removesuffix(".mar").partition("-")
        name, version = registration.model_name or name, version or "1.0"
        if version in self.specs.get(name, {}):
            raise VersionExists(name, version)
        count = max(0, registration.initial_workers or 0)
        progress = self._under_way(ModelRef(name, version), count, registration.wait)
        spec = ModelSpec(
            name,
            version,
            registration.url,
            "sha256",
            "archive",
            min_workers=count,
            max_workers=count,
            batch_size=registration.batch_size or 1,
            max_batch_delay=registration.max_batch_delay,
        )
        self.specs.setdefault(name, {})[version] = spec
        self.defaults.setdefault(name, version)
        return progress

    async def scale(
        self, model: str, version: str | None, low: int | None, high: int | None, wait: bool, *scaling: Any
    ) -> Progress:
        self.asked.append(("scale", model, version, low, high, wait, *scaling))
        spec = self._spec(model, version)
        low, high = spec.min_workers if low is None else low, spec.max_workers if high is None else high
        return replace(self._under_way(spec.ref, low, wait), between=self.between, was_between=self.was_between)

    async def set_default(self, model: str, version: str) -> ModelRef:
        if version not in self.specs.get(model, {version: None}):
            raise UnknownDefault(model, version)
        ref = self._spec(model, version).ref
        self.defaults[model] = version
        return ref

    async def unregister(self, model: str, version: str | None) -> ModelRef:
        ref = self._spec(model, version).ref
        if ref.version == self.defaults[model] and len(self.specs[model]) > 1:
            raise CannotRemoveDefault(model)
        del self.specs[model][ref.version]
        if not self.specs[model]:
            del self.specs[model]
        return ref

    async def describe(self, model: str, version: str | None) -> Description:
        spec = self._spec(model, version)
        status = self.status.get(spec.ref, ModelStatus())
        return Description(spec, status, spec.version == self.defaults[model])

    async def metadata(self, model: str, version: str | None) -> Any:
        if isinstance(self.said, Exception):
            raise self.said
        return self.said

    def __getattr__(self, question: str) -> Callable[..., Awaitable[dict]]:
        """What is no question about models is somebody else's: heard, and answered with nothing."""
        if question not in vars(Keeper):
            raise AttributeError(question)

        async def answer(*args: Any) -> dict:
            self.asked.append((question, *args))
            return {}

        return answer

    async def register_workflow(self, registration: Registration, graph: Graph | None) -> ModelRef:
        self.asked.append(("register_workflow", registration, graph))
        return ModelRef(registration.model_name or (graph.name if graph is not None else "w"), "1.0")

    async def renew_key(self, kind: str) -> None:
        self.asked.append(("renew_key", kind))

    async def versions(self, model: str) -> list[str]:
        self._spec(model, None)
        return list(self.specs[model])

    async def models(self) -> list[tuple[str, str]]:
        return [(name, versions[self.defaults[name]].url) for name, versions in sorted(self.specs.items())]

    def put(self, spec: ModelSpec, *workers: Worker, **status: Any) -> None:
        """A version that stands already."""
        self.specs.setdefault(spec.name, {})[spec.version] = spec
        self.defaults.setdefault(spec.name, spec.version)
        phase = "ready" if workers else "stopped"
        self.status[spec.ref] = replace(ModelStatus(phase, len(workers), workers=workers), **status)


@dataclass
class Management:
    """``loop``: where something behind the door outlives a request."""

    app: App
    shelf: Shelf
    loop: asyncio.AbstractEventLoop | None = None

    def __call__(self, method: str, target: str, *args: Any, **named: Any) -> Answer:
        return ask(self.app, method, target, *args, loop=self.loop, **named)


@pytest.fixture
def management() -> Callable[..., Management]:
    def build(enable_model_api: bool = True, access: Access | None = None, **inference: Any) -> Management:
        shelf = Shelf()
        control_ = ControlSettings(enable_model_api=enable_model_api)
        settings = Settings(control=control_, inference=InferenceSettings(**inference))
        control = ControlPlane(shelf, settings, lambda: access)
        return Management(management_app(control, settings), shelf)

    return build


@pytest.fixture
def over_http() -> Iterator[Callable[..., str]]:
    """Puts an app on a port of its own, in a thread, and says its URL; more is for uvicorn."""
    with contextlib.ExitStack() as stack:
        yield lambda app, **more: stack.enter_context(_over_http(app, **more))


@contextlib.contextmanager
def _over_http(app: App, **more: Any) -> Iterator[str]:
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_config=None, lifespan="off", **more))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()))
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            thread.join(0.005)
        yield f"{'https' if more.get('ssl_certfile') else 'http'}://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


@contextlib.contextmanager
def listening(make: Callable[[], Any], tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """A gRPC server on a port of its own, in a thread; gives its address."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def run(coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(30)

    async def open_() -> GrpcListener:
        listener = GrpcListener(make(), "127.0.0.1", 0, "grpc.port", tls)
        await listener.open()
        return listener

    try:
        listener = run(open_())
        yield f"127.0.0.1:{listener.port}"
        run(listener.close(0))
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.fixture
def grpc_listening() -> Callable[[Callable[[], Any]], contextlib.AbstractContextManager[str]]:
    return listening


@dataclass
class GrpcInference:
    """``address`` is where it listens; ``channel`` is open to it."""

    address: str
    channel: grpc.Channel
    target: Says
    meters: Meters
    access: list[tuple]
    reader: TableReader


@dataclass
class GrpcManagement:
    address: str
    channel: grpc.Channel
    shelf: Shelf
    access: list[tuple]


@pytest.fixture
def over_grpc() -> Iterator[Callable[..., GrpcInference]]:
    """The inference port's gRPC server over a target that the test writes; settings as an app.yaml has them."""
    with contextlib.ExitStack() as stack:

        def build(infer: Infer = echo, table: Table | None = None, keeper: Any = None, **said: Any) -> GrpcInference:
            target, meters, access, settings = Says(infer), Meters(), Lines(), load(said)
            reader = TableReader(two_versions() if table is None else table)
            plane = DataPlane(reader, meters, lambda ref, row: target.at(ref))
            control = ControlPlane(keeper or Shelf(), settings, lambda: reader.table.access)
            address = stack.enter_context(listening(lambda: inference_server(plane, control, settings, meters, access)))
            channel = stack.enter_context(grpc.insecure_channel(address))
            return GrpcInference(address, channel, target, meters, access.lines, reader)

        yield build


@pytest.fixture
def managed_by_grpc() -> Iterator[Callable[..., GrpcManagement]]:
    """The management port's gRPC server over a keeper in memory; settings as an app.yaml has them."""
    with contextlib.ExitStack() as stack:

        def build(access: Access | None = None, **said: Any) -> GrpcManagement:
            shelf, settings, log = Shelf(), load(said), Lines()
            control = ControlPlane(shelf, settings, lambda: access)
            address = stack.enter_context(listening(lambda: management_server(control, settings, Meters(), log)))
            channel = stack.enter_context(grpc.insecure_channel(address))
            return GrpcManagement(address, channel, shelf, log.lines)

        yield build
