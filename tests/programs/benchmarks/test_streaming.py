"""The benchmark of streams: each way reads every chunk of its handler's, over real servers."""

from __future__ import annotations

import asyncio
import json
import threading
import zipfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import grpc.aio
import pytest

from handlers.context import Context
from serve_app.dataplane.data_plane import DataPlane, RoutingTableReader
from serve_app.domain.request import InferenceRequest, InferenceResponse, InputPart, ResponseStream
from serve_app.domain.routing_table import ModelRoute, RoutingTable, VersionRoute
from serve_app.proto.inference_pb2 import PredictionResponse, PredictionsRequest
from serve_app.protocols.http_app import inference_app
from serve_app.settings import Settings
from serve_app.telemetry.metrics import Meters
from tests.benchmarks import streaming
from tests.benchmarks.models.chunks import Chunks
from tests.support.coroutine_backend import CoroutineBackend
from tests.support.protocol_servers import serve_app_over_http

pytestmark = pytest.mark.nightly


class Target(CoroutineBackend):
    """The handler, without a replica around it."""

    async def infer(self, call: InferenceRequest) -> ResponseStream:
        context, pieces = Context("chunks", "", {}), asyncio.Queue()
        context.begin(["id"], [dict(call.headers)], [{}], lambda index, piece: pieces.put_nowait(piece))

        async def reported() -> AsyncIterator[bytes]:
            handling = asyncio.ensure_future(Chunks().handle([{"body": call.inputs[0].value}], context))
            handling.add_done_callback(lambda done: pieces.put_nowait(None))
            while (piece := await pieces.get()) is not None:
                yield piece.encode()
            yield (await handling)[0].encode()

        return ResponseStream(InferenceResponse(b"", version="1.0"), reported())


@pytest.fixture
def address() -> Iterator[str]:
    table = RoutingTable(
        1, {"chunks": ModelRoute("1.0", {"1.0": VersionRoute("1.0", "ready", 1)})}, startup_complete=True
    )
    meters = Meters()
    app = inference_app(
        DataPlane(RoutingTableReader(table), meters, lambda ref, row: Target()), Settings(), meters
    )
    with serve_app_over_http(app) as address:
        yield address


@pytest.fixture
def grpc_address() -> Iterator[str]:
    """Serve the same bytes of a row as gRPC messages."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def chunks(data: bytes, context: grpc.aio.ServicerContext) -> None:
        output = PredictionsRequest.FromString(data).input["body"]
        call = InferenceRequest("chunks", inputs=(InputPart("body", output),))
        async for piece in await Target().infer(call):
            await context.write(PredictionResponse(prediction=piece).SerializeToString())

    async def start() -> tuple[grpc.aio.Server, int]:
        server = grpc.aio.server()
        methods = {"StreamPredictions": grpc.unary_stream_rpc_method_handler(chunks)}
        service = "org.pytorch.serve.grpc.inference.InferenceAPIsService"
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, methods),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        return server, port

    server, port = asyncio.run_coroutine_threadsafe(start(), loop).result(60)
    yield f"127.0.0.1:{port}"
    asyncio.run_coroutine_threadsafe(server.stop(0), loop).result(60)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def test_grpc_reads_all_chunks(grpc_address: str) -> None:
    values = streaming.measure(grpc_address, streaming.GRPC, 2, 5, 0.001)
    assert len(values) == 2 * 4
    assert all(0 < value < 10_000 for value in values)


@pytest.mark.parametrize("way", [way for way in streaming.WAYS if way != streaming.GRPC])
def test_each_way_reads_all_chunks(address: str, way: str) -> None:
    values = streaming.measure(address, way, 2, 5, 0.001)
    assert len(values) == 2 * 4
    assert all(0 < value < 10_000 for value in values)


def test_the_archive_holds_the_handler(tmp_path: Path) -> None:
    with zipfile.ZipFile(streaming.archive(tmp_path / "store")) as file:
        assert set(file.namelist()) == {"chunks.py", "MAR-INF/MANIFEST.json"}
        assert json.loads(file.read("MAR-INF/MANIFEST.json"))["model"]["handler"] == "chunks.py"
