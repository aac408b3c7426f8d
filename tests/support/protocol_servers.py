"""Fixtures with both apps in process.

A real DataPlane runs over a backend that the test writes, a real ControlPlane over a control API in memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
import pytest
import uvicorn

from serve_app.control.api import ControlPlane
from serve_app.dataplane.data_plane import DataPlane, DataPlaneLimits, RoutingTableReader
from serve_app.deployments.listeners.grpc import GrpcListener, ManagementGrpcListener
from serve_app.domain.access import AccessTable
from serve_app.domain.routing_table import RoutingTable
from serve_app.http2.server import Http2Server
from serve_app.protocols.grpc_app import inference_server, management_server
from serve_app.protocols.http_app import ASGIApp, inference_app, management_app
from serve_app.settings import ControlSettings, InferenceSettings, ManagementSettings, Settings, load
from serve_app.telemetry.metrics import Meters
from tests.support import wire_client
from tests.support.ports import free_port
from tests.support.protocol_fakes import (
    Chunk,
    FakeBackend,
    FakeControlAPI,
    Infer,
    RecordedResponse,
    RecordingAccessLog,
    echo,
    send_request,
    two_versions,
)

# The bytes of the responses to a test's requests on the path of tasks, to compare those of callbacks with.
_task_responses: dict[str, list[bytes]] = {}


@dataclass
class Inference:
    """The inference port's app.

    A request reaches it over a connection that is answered by tasks or by callbacks; with ``options``, or
    where ``path`` is ``asgi``, without a connection. The same test runs with tasks and then with callbacks,
    and its responses are compared byte by byte.
    """

    app: ASGIApp
    backend: FakeBackend
    meters: Meters
    access_log: list[tuple]
    reader: RoutingTableReader
    plane: DataPlane
    path: str = "asgi"
    test: str = ""
    compares: bool = True  # its responses are the same each time

    def __call__(
        self,
        method: str,
        target: str,
        body: bytes | list[Chunk] = b"",
        headers: dict[str, str] | None = None,
        **options: Any,
    ) -> RecordedResponse:
        if self.path == "asgi" or options:
            return send_request(self.app, method, target, body, headers, **options)
        request = wire_client.encode_request(method, target, body, headers or {})
        with wire_client.use_callbacks(self.app, self.path == "callbacks"):
            raw = asyncio.run(wire_client.exchange(self.app, request, method))
        self._compare(method, target, raw)
        response = wire_client.parse_response(raw, method)
        assert response is not None
        return response

    def _compare(self, method: str, target: str, raw: bytes) -> None:
        responses = _task_responses.setdefault(self.test, [])
        if self.path == "tasks":
            responses.append(raw)
        elif responses and self.compares:
            expected, actual = wire_client.mask(responses.pop(0)), wire_client.mask(raw)
            assert actual == expected, f"{method} {target}"


@pytest.fixture(params=["tasks", "callbacks"])
def inference(request: pytest.FixtureRequest) -> Callable[..., Inference]:
    path, test = request.param, f"{request.path}:{request.function.__name__}:{_other_parameters(request)}"
    if path == "tasks":
        _task_responses.pop(test, None)
    return partial(_create_inference, path, test)


@pytest.fixture
def asgi_inference() -> Callable[..., Inference]:
    """Return the builder of ``inference`` for tests of what is the same on every path."""
    return partial(_create_inference, "asgi", "")


def _create_inference(
    path: str,
    test: str,
    infer: Infer = echo,
    table: RoutingTable | None = None,
    control_api: Any = None,
    control: ControlSettings | None = None,
    **settings_: Any,
) -> Inference:
    backend, meters, access_log = FakeBackend(infer), Meters(), RecordingAccessLog()
    settings = Settings(control=control or ControlSettings(), inference=InferenceSettings(**settings_))
    reader = RoutingTableReader(two_versions() if table is None else table)
    plane = DataPlane(
        reader,
        meters,
        lambda ref, row: backend.at(ref),
        limits=DataPlaneLimits(max_workflow_items=settings.inference.max_workflow_items),
    )
    control_plane = ControlPlane(control_api or FakeControlAPI(), settings, lambda: plane.access)
    app = inference_app(plane, settings, meters, access_log, control_plane)
    return Inference(app, backend, meters, access_log.lines, reader, plane, path, test)


def _other_parameters(request: pytest.FixtureRequest) -> str:
    """Return the parameters of a test without that of this fixture."""
    parameters = request.node.callspec.params
    return repr([(name, value) for name, value in parameters.items() if name != "inference"])


@dataclass
class Management:
    """The management app over a fake control API; ``loop`` is set where tasks outlive a request."""

    app: ASGIApp
    control_api: FakeControlAPI
    loop: asyncio.AbstractEventLoop | None = None

    def __call__(self, method: str, backend: str, *args: Any, **named: Any) -> RecordedResponse:
        return send_request(self.app, method, backend, *args, loop=self.loop, **named)


@pytest.fixture
def management() -> Callable[..., Management]:
    def build(
        enable_model_api: bool = True,
        access: AccessTable | None = None,
        allowed_hosts: tuple[str, ...] = (),
        **inference: Any,
    ) -> Management:
        control_api = FakeControlAPI()
        settings = Settings(
            control=ControlSettings(enable_model_api=enable_model_api),
            management=ManagementSettings(allowed_hosts=allowed_hosts),
            inference=InferenceSettings(**inference),
        )
        control = ControlPlane(control_api, settings, lambda: access)
        return Management(management_app(control, settings), control_api)

    return build


@pytest.fixture
def over_http() -> Iterator[Callable[..., str]]:
    """Serve apps on ports of their own, in threads; calling it returns a URL, and options are uvicorn's."""
    with contextlib.ExitStack() as stack:
        yield lambda app, **options: stack.enter_context(serve_app_over_http(app, **options))


@contextlib.contextmanager
def serve_app_over_http(app: ASGIApp, **options: Any) -> Iterator[str]:
    port = free_port()
    options.setdefault("timeout_keep_alive", 600)  # clients reuse idle connections, however late
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_config=None, lifespan="off", **options))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()))
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            thread.join(0.005)
        yield f"{'https' if options.get('ssl_certfile') else 'http'}://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


@contextlib.contextmanager
def serve_grpc(make: Callable[[], Any], tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """Serve gRPC on a port of its own, in a thread; yield the address."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def run(coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(30)

    async def open_() -> GrpcListener | ManagementGrpcListener:
        server = make()  # gRPC's own server belongs to the running loop
        listener: GrpcListener | ManagementGrpcListener
        if isinstance(server, Http2Server):
            listener = GrpcListener(server, "127.0.0.1", 0, "grpc.port", tls)
        else:
            listener = ManagementGrpcListener(server, "127.0.0.1", 0, "grpc.management_port")
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
    return serve_grpc


@dataclass
class GrpcInference:
    """A gRPC server of the inference API; ``channel`` is open to ``address``."""

    address: str
    channel: grpc.Channel
    backend: FakeBackend
    meters: Meters
    access_log: list[tuple]
    reader: RoutingTableReader


@dataclass
class GrpcManagement:
    address: str
    channel: grpc.Channel
    control_api: FakeControlAPI
    access_log: list[tuple]


@pytest.fixture
def over_grpc() -> Iterator[Callable[..., GrpcInference]]:
    """Serve the inference port's gRPC APIs over a backend of the test, with settings as in app.yaml."""
    with contextlib.ExitStack() as stack:

        def build(
            infer: Infer = echo, table: RoutingTable | None = None, control_api: Any = None, **settings_: Any
        ) -> GrpcInference:
            backend, meters, access_log, settings = (
                FakeBackend(infer),
                Meters(),
                RecordingAccessLog(),
                load(settings_),
            )
            reader = RoutingTableReader(two_versions() if table is None else table)
            plane = DataPlane(reader, meters, lambda ref, row: backend.at(ref))
            control = ControlPlane(control_api or FakeControlAPI(), settings, lambda: reader.table.access)
            address = stack.enter_context(
                serve_grpc(lambda: inference_server(plane, control, settings, meters, access_log))
            )
            channel = stack.enter_context(grpc.insecure_channel(address))
            return GrpcInference(address, channel, backend, meters, access_log.lines, reader)

        yield build


@pytest.fixture
def managed_by_grpc() -> Iterator[Callable[..., GrpcManagement]]:
    """Serve the management port's gRPC API over a fake control API, with settings as in app.yaml."""
    with contextlib.ExitStack() as stack:

        def build(access: AccessTable | None = None, **settings_: Any) -> GrpcManagement:
            control_api, settings, log = FakeControlAPI(), load(settings_), RecordingAccessLog()
            control = ControlPlane(control_api, settings, lambda: access)
            address = stack.enter_context(
                serve_grpc(lambda: management_server(control, settings, Meters(), log))
            )
            channel = stack.enter_context(grpc.insecure_channel(address))
            return GrpcManagement(address, channel, control_api, log.lines)

        yield build
