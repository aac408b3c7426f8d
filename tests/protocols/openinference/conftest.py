"""A server of models with handlers of the test: the inference port's app over the real codecs."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from handlers.context import Context
from serve_app.control.api import ControlPlane
from serve_app.dataplane.data_plane import DataPlane, RoutingTableReader
from serve_app.domain import signature
from serve_app.domain.access import AccessTable
from serve_app.domain.model import (
    ModelRef,
    ModelSpec,
    ModelStatus,
    Registration,
    ScalingProgress,
    VersionDescription,
    VersionStats,
)
from serve_app.domain.request import InferenceRequest, InferenceResponse, ResponseStream
from serve_app.domain.routing_table import ModelRoute, RoutingTable, VersionRoute
from serve_app.domain.signature import Signature
from serve_app.errors import ModelNotFound
from serve_app.protocols.http_app import ASGIApp, inference_app
from serve_app.runtime.batch_execution import BatchExecution
from serve_app.runtime.codec import TensorRowCodec
from serve_app.settings import InferenceSettings, Settings
from serve_app.telemetry.metrics import Meters
from serve_app.telemetry.metrics_aggregator import MetricsAggregator
from tests.support.client_environments import client_python
from tests.support.coroutine_backend import CoroutineBackend
from tests.support.protocol_servers import serve_app_over_http

Handle = Callable[[list[Any], Context], Any]


class Model(CoroutineBackend):
    """A version in this process: ``handle`` receives each request as a batch of its own."""

    def __init__(self, ref: ModelRef, handle: Handle, tensor_codec: TensorRowCodec) -> None:
        self._ref = ref
        self._handle = handle
        self._tensor_codec = tensor_codec

    async def infer(self, request: InferenceRequest) -> InferenceResponse | ResponseStream:
        chunks: list[Any] = []
        execution = BatchExecution(
            Context(self._ref.name, ".", {}),
            [request],
            lambda _, chunk: chunks.append(chunk),
            self._ref.version,
            self._tensor_codec,
        )
        try:
            data = execution.open()
            [response] = execution.close(self._handle(data, execution.context) if data else [])
        except Exception as error:
            [response] = execution.fail(error)
        if not chunks:
            if isinstance(response, InferenceResponse):
                return response
            raise response
        head = chunks[0]

        async def stream() -> AsyncIterator[bytes]:
            for chunk in chunks:
                yield chunk.body if isinstance(chunk, InferenceResponse) else chunk
            if not isinstance(response, InferenceResponse):
                raise response
            yield response.body

        return ResponseStream(InferenceResponse(b"", head.content_type, version=head.version), stream())


@dataclass
class Models:
    """A routing table, its models, and a control API that scales them."""

    reader: RoutingTableReader = field(
        default_factory=lambda: RoutingTableReader(RoutingTable(1, startup_complete=True))
    )
    meters: Meters = field(default_factory=Meters)
    operations: list[tuple] = field(default_factory=list)
    _models: dict[ModelRef, Model] = field(default_factory=dict)

    def add(
        self,
        name: str,
        handle: Handle,
        version: str = "1.0",
        *,
        form: str = "values",
        ports: Signature | dict | None = None,
        tensors_only: bool = False,
        replicas: int = 1,
    ) -> None:
        declared = signature.read(ports) if isinstance(ports, dict) else ports
        ref = ModelRef(name, version)
        self._models[ref] = Model(ref, handle, TensorRowCodec(form, True, declared, tensors_only))  # type: ignore[arg-type]
        self.put(ref, VersionRoute(version, "ready" if replicas else "stopped", replicas, signature=declared))

    def put(self, ref: ModelRef, row: VersionRoute) -> None:
        table = self.reader.table
        route = table.models.get(ref.name) or ModelRoute(ref.version, {})
        model = ModelRoute(route.default, {**route.versions, ref.version: row})
        self.reader.update(
            RoutingTable(table.generation + 1, {**table.models, ref.name: model}, True, table.access)
        )

    def grant(self, access: AccessTable | None) -> None:
        table = self.reader.table
        self.reader.update(RoutingTable(table.generation + 1, table.models, True, access))

    def app(self, limit: int = 8 << 20) -> ASGIApp:
        settings = Settings(inference=InferenceSettings(max_request_size=limit))
        plane = DataPlane(self.reader, self.meters, lambda ref, row: self._models[ref])
        return inference_app(
            plane, settings, self.meters, None, ControlPlane(self, settings, lambda: self.reader.table.access)
        )

    # The operations of the control API that the repository and the statistics use

    def _spec(self, model: str, version: str | None) -> ModelSpec:
        row = self.reader.table.models.get(model)
        if row is None:
            raise ModelNotFound(model)
        version = version or row.default
        count = row.versions[version].replicas
        return ModelSpec(model, version, f"{model}.mar", "", "", min_workers=count, max_workers=count)

    async def describe(self, model: str, version: str | None) -> VersionDescription:
        spec = self._spec(model, version)
        return VersionDescription(spec, ModelStatus(), default=True)

    async def list_versions(self, model: str) -> Sequence[str]:
        self._spec(model, None)
        return list(self.reader.table.models[model].versions)

    async def scale(
        self, model: str, version: str | None, low: int | None, high: int | None, wait: bool
    ) -> ScalingProgress:
        self.operations.append(("scale", model, version, low, high, wait))
        spec = self._spec(model, version)
        if low is not None:
            declared = self.reader.table.models[model].versions[spec.version].signature
            self.put(
                spec.ref, VersionRoute(spec.version, "ready" if low else "stopped", low, signature=declared)
            )
        return ScalingProgress(spec.ref, low or 1, "done")

    async def register(self, registration: Registration) -> ScalingProgress:
        self.operations.append(
            ("register", registration.url, registration.model_name, registration.initial_workers)
        )
        self.add(str(registration.model_name), lambda data, context: [1 for _ in data])
        return ScalingProgress(ModelRef(str(registration.model_name), "1.0"), 1, "done")

    async def get_version_stats(self) -> list[VersionStats]:
        total = MetricsAggregator()
        total.put("here", self.meters.report())
        return total.version_stats()


@pytest.fixture(scope="session")
def kserve_python() -> Path:
    """Return the interpreter of an environment with KServe's clients."""
    return client_python("kserve")


@pytest.fixture
def models() -> Models:
    return Models()


@pytest.fixture
def listening() -> Callable[[Any], contextlib.AbstractContextManager[str]]:
    return _listening


@contextlib.contextmanager
def _listening(app: Any) -> Iterator[str]:
    """Serve the app on a port of its own, in a thread; yield its address without a scheme."""
    with serve_app_over_http(app, ws="none") as address:
        yield address.removeprefix("http://")


SUM_SIGNATURE = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 2]}]}


@pytest.fixture
def send_request(models: Any) -> Any:
    """Return a function that sends a request to the app of ``models``."""

    def send_request(
        method: str, path: str, body: Any = b"", limit: int = 1 << 20, **headers: str
    ) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        fields = {name.replace("_", "-"): value for name, value in headers.items()}

        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(models.app(limit))
            async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
                return await client.request(method, path, content=content, headers=fields)

        return asyncio.run(send())

    models.add("identity", lambda data, context: [dict(row) for row in data], form="arrays")
    models.add(
        "signed",
        lambda data, context: [{"y": r["x"].sum(axis=1)} for r in data],
        form="arrays",
        ports=SUM_SIGNATURE,
    )
    models.add("plain", lambda data, context: [row["data"] for row in data])
    return send_request
