"""The inference ports over a real handler with its batcher, served from a thread of this process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import handlers
from serve_app.control.api import ControlPlane
from serve_app.control.archive_ingestion import build_spec
from serve_app.dataplane.data_plane import DataPlane, RoutingTableReader
from serve_app.domain.model import Registration
from serve_app.domain.request import InferenceRequest, InferenceResponse, ResponseStream
from serve_app.domain.routing_table import ModelRoute, RoutingTable, VersionRoute
from serve_app.model_store.archive import Archive
from serve_app.model_store.model_check import check_model
from serve_app.protocols.grpc_app import inference_server
from serve_app.protocols.http_app import inference_app
from serve_app.runtime.batching.row_batcher import create_row_batcher
from serve_app.runtime.handler_thread import HandlerThread
from serve_app.runtime.runner import Runner
from serve_app.settings import Settings, load
from serve_app.telemetry.metrics import Meters
from tests.support.protocol_fakes import FakeBackend, FakeControlAPI, RecordingAccessLog
from tests.support.protocol_servers import serve_app_over_http, serve_grpc


@contextlib.contextmanager
def serve_handler(name: str, handler: str, folder: Path, **sections: Any) -> Iterator[str]:
    """Serve the model of a folder, as one of the start-up; yield the URL. ``sections`` are settings."""
    settings, meters = load(sections), Meters()
    with load_handler(name, handler, folder, settings, meters) as plane:
        app = inference_app(plane, settings, meters, RecordingAccessLog())
        with serve_app_over_http(app) as url:
            yield url


@contextlib.contextmanager
def serve_handler_over_grpc(name: str, handler: str, folder: Path, **sections: Any) -> Iterator[str]:
    """Serve the model of a folder over gRPC; yield the address. ``sections`` are settings."""
    settings, meters = load(sections), Meters()
    with load_handler(name, handler, folder, settings, meters) as plane:
        control = ControlPlane(FakeControlAPI(), settings, lambda: plane.access)
        with serve_grpc(lambda: inference_server(plane, control, settings, meters)) as address:
            yield address


@contextlib.contextmanager
def load_handler(
    name: str, handler: str, folder: Path, settings: Settings, meters: Meters
) -> Iterator[DataPlane]:
    """Load the model of a folder, and yield a data plane with it as the model of the start-up."""
    archive = Archive.read(folder, name, handler).with_names(model_name=name, handler=handler)
    config = check_model(archive, trusted=True)
    spec = build_spec(Registration(name), archive, config, settings, at_startup=True)
    runner = Runner(spec, folder, {}, settings.runtime, metrics=meters.torchserve.cache(name))
    entry = handlers.load(spec.handler, folder, {})
    thread = HandlerThread()
    thread.submit(runner.load, entry).result()
    batcher = create_row_batcher(runner, runner.run, spec, meters, thread, lambda reason: None)

    async def infer(request: InferenceRequest) -> InferenceResponse | ResponseStream:
        return await batcher.infer(request)

    route = VersionRoute(spec.version, "ready", 1, loaded_at_startup=True)
    table = RoutingTable(1, {name: ModelRoute(spec.version, {spec.version: route})}, True)
    backend = FakeBackend(infer)
    plane = DataPlane(RoutingTableReader(table), meters, lambda ref, row: backend.at(ref))
    try:
        yield plane
    finally:
        if runner.loop is not None and (engine := getattr(entry.instance, "engine", None)) is not None:
            asyncio.run_coroutine_threadsafe(engine.shutdown(), runner.loop).result(60)
        asyncio.run(batcher.close())
        thread.shutdown()
