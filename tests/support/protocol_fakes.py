"""Fakes for tests of protocols: an ASGI client, an inference backend, an access log and a control API."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from serve_app.control.archive_ingestion import ArchiveIngestor
from serve_app.control.operations import ControlAPI
from serve_app.domain.audit import AuditQuery
from serve_app.domain.model import (
    EventQuery,
    ModelRef,
    ModelSpec,
    ModelStatus,
    Registration,
    ReplicaInfo,
    ScalingProgress,
    VersionDescription,
)
from serve_app.domain.request import Cancel, InferenceRequest, InferenceResponse, OnDone, ResponseStream
from serve_app.domain.routing_table import ModelRoute, RoutingTable, VersionRoute
from serve_app.domain.workflow_graph import WorkflowGraph
from serve_app.errors import (
    CannotRemoveDefault,
    DefaultVersionNotFound,
    ModelNotFound,
    VersionExists,
    VersionNotFound,
)
from serve_app.protocols.http_app import ASGIApp
from serve_app.runtime.backends import Backend, TaskRequest
from serve_app.telemetry.audit_log import get_actor

# The usage and a tool call of a chat completion.
USAGE = {
    "prompt_tokens": 5,
    "completion_tokens": 2,
    "total_tokens": 7,
    "prompt_tokens_details": {"cached_tokens": 4},
}
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}

Infer = Callable[[InferenceRequest], Awaitable["InferenceResponse | ResponseStream"]]
Chunk = bytes | Callable[[], bytes]


@dataclass
class RecordedResponse:
    """A response as the app sent it; each of ``chunks`` is a body message."""

    status: int = 0
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    chunks: list[bytes] = field(default_factory=list)
    ended: bool = False
    error: BaseException | None = None

    @property
    def body(self) -> bytes:
        return b"".join(self.chunks)

    def __getitem__(self, name: str) -> str | None:
        values = [value.decode("latin-1") for key, value in self.headers if key == name.encode()]
        assert len(values) <= 1, f"{name} was sent {len(values)} times"
        return values[0] if values else None


def send_request(
    app: ASGIApp,
    method: str,
    target: str,
    body: bytes | list[Chunk] = b"",
    headers: dict[str, str] | None = None,
    *,
    loop: asyncio.AbstractEventLoop | None = None,
    **options: Any,
) -> RecordedResponse:
    """Send one request over the bare ASGI interface; a list of bodies is sent as that many chunks.

    A function in the list is called when the server reads its chunk, and returns it.
    The client stays connected until it has its response. Options are ``scope`` (more keys of the ASGI scope),
    ``raises`` (record an exception of the app), and ``disconnects`` (close the connection after the body).
    """
    run = asyncio.run if loop is None else loop.run_until_complete
    return run(_send_request(app, method, target, body, headers or {}, **options))


async def _send_request(
    app: ASGIApp,
    method: str,
    target: str,
    body: bytes | list[Chunk],
    headers: dict[str, str],
    scope: dict[str, Any] | None = None,
    raises: bool = False,
    disconnects: bool = False,
) -> RecordedResponse:
    response = RecordedResponse()
    chunks = list(body) if isinstance(body, list) else [body]
    disconnected = asyncio.Event()
    if disconnects:
        disconnected.set()

    async def receive() -> dict[str, Any]:
        if not chunks:
            await disconnected.wait()
            return {"type": "http.disconnect"}
        chunk = chunks.pop(0)
        if not isinstance(chunk, bytes):
            chunk = chunk()
        return {"type": "http.request", "body": chunk, "more_body": bool(chunks)}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            assert not response.status
            response.status, response.headers = message["status"], list(message["headers"])
        else:
            assert response.status
            assert not response.ended
            response.chunks.append(message.get("body", b""))
            response.ended = not message.get("more_body", False)
            if response.ended:
                disconnected.set()

    path, _, query = target.partition("?")
    full_scope = {
        "type": "http",
        "method": method,
        "path": path,
        "root_path": "",
        "query_string": query.encode(),
        "headers": [(k.lower().encode("latin-1"), v.encode("latin-1")) for k, v in headers.items()],
        "http_version": "1.1",
        "client": ("127.0.0.1", 40000),
        **(scope or {}),
    }
    try:
        await app(full_scope, receive, send)
    except Exception as error:
        if not raises:
            raise
        response.error = error
    return response


class FakeBackend(Backend):
    """A backend that answers with a function, and records its requests."""

    def __init__(self, infer: Infer) -> None:
        self._infer = infer
        self.requests: list[InferenceRequest] = []
        self.ref: ModelRef | None = None  # the version of the last request

    def at(self, ref: ModelRef) -> FakeBackend:
        self.ref = ref
        return self

    def submit(self, request: InferenceRequest, on_done: OnDone) -> Cancel:
        self.requests.append(request)
        return TaskRequest(self._infer(request), on_done).cancel


async def echo(request: InferenceRequest) -> InferenceResponse:
    return InferenceResponse(
        request.inputs[0].value if request.inputs else b"", version=request.version or "1.0"
    )


def two_versions() -> RoutingTable:
    versions = {version: VersionRoute(version, "ready", 1) for version in ("1.0", "2.0")}
    return RoutingTable(1, {"m": ModelRoute("1.0", versions)}, startup_complete=True)


class RecordingAccessLog:
    """An access log that records its lines."""

    json = False

    def __init__(self) -> None:
        self.lines: list[tuple] = []

    def write(self, *line: Any) -> None:
        self.lines.append(line)


class FakeControlAPI(ControlAPI):
    """A control API in memory: the URL of an archive is ``NAME-VERSION.mar``.

    With an ``ingestor`` it reads real archives.
    """

    def __init__(self) -> None:
        self.specs: dict[str, dict[str, ModelSpec]] = {}
        self.defaults: dict[str, str] = {}
        self.status: dict[ModelRef, ModelStatus] = {}
        self.metadata: Any = None  # returned by the handlers
        self.error: Exception | None = None
        self.state: str = "done"
        self.bounds: tuple[int, int] | None = None  # set where autoscaling starts
        self.previous_bounds: tuple[int, int] | None = None  # set where autoscaling ends
        self.ingestor: ArchiveIngestor | None = None
        self.operations: list[tuple] = []
        self.refusals: list[tuple] = []  # actor, action, subject and reason
        self.audit_queries: list[tuple] = []

    async def record_refusal(self, action: str, subject: str, reason: str) -> None:
        self.refusals.append((get_actor(), action, subject, reason))

    async def list_audit_records(self, query: AuditQuery, allowed_models: tuple[str, ...]) -> list[Any]:
        self.audit_queries.append((query, allowed_models))
        return []

    async def list_events(self, query: EventQuery, allowed_models: tuple[str, ...]) -> list[Any]:
        return []

    def _spec(self, model: str, version: str | None) -> ModelSpec:
        if model not in self.specs:
            raise ModelNotFound(model)
        version = version or self.defaults[model]
        if version not in self.specs[model]:
            raise VersionNotFound(model, version)
        return self.specs[model][version]

    def _progress(self, ref: ModelRef, count: int, wait: bool) -> ScalingProgress:
        if self.error is not None:
            raise self.error
        state = self.state if wait else "processing"
        return ScalingProgress(ref, count, state if count else "done")

    async def register(self, registration: Registration) -> ScalingProgress:
        self.operations.append(("register", registration))
        if self.ingestor is not None:
            ingested = await asyncio.to_thread(self.ingestor.ingest, registration)
            registration = replace(registration, url=f"{ingested.name}-{ingested.version}.mar")
        name, _, version = registration.url.removesuffix(".mar").partition("-")
        name, version = registration.model_name or name, version or "1.0"
        if version in self.specs.get(name, {}):
            raise VersionExists(name, version)
        count = max(0, registration.initial_workers or 0)
        progress = self._progress(ModelRef(name, version), count, registration.wait)
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
        self,
        model: str,
        version: str | None,
        min_workers: int | None,
        max_workers: int | None,
        wait: bool,
        autoscaling: Mapping[str, Any] | None = None,
    ) -> ScalingProgress:
        scaling = [] if autoscaling is None else [autoscaling]
        self.operations.append(("scale", model, version, min_workers, max_workers, wait, *scaling))
        spec = self._spec(model, version)
        min_workers, max_workers = (
            spec.min_workers if min_workers is None else min_workers,
            spec.max_workers if max_workers is None else max_workers,
        )
        return replace(
            self._progress(spec.ref, min_workers, wait),
            bounds=self.bounds,
            previous_bounds=self.previous_bounds,
        )

    async def set_default(self, model: str, version: str) -> ModelRef:
        if version not in self.specs.get(model, {version: None}):
            raise DefaultVersionNotFound(model, version)
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

    async def describe(self, model: str, version: str | None) -> VersionDescription:
        spec = self._spec(model, version)
        status = self.status.get(spec.ref, ModelStatus())
        return VersionDescription(spec, status, spec.version == self.defaults[model])

    async def get_metadata(self, model: str, version: str | None) -> Any:
        if isinstance(self.metadata, Exception):
            raise self.metadata
        return self.metadata

    async def _invoke(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Record an operation of another feature; its result is empty."""
        self.operations.append((name, *args))
        return {}

    async def register_workflow(self, registration: Registration, graph: WorkflowGraph | None) -> ModelRef:
        self.operations.append(("register_workflow", registration, graph))
        return ModelRef(registration.model_name or (graph.name if graph is not None else "w"), "1.0")

    async def renew_key(self, kind: str) -> None:
        self.operations.append(("renew_key", kind))

    async def list_versions(self, model: str) -> list[str]:
        self._spec(model, None)
        return list(self.specs[model])

    async def list_models(self) -> list[tuple[str, str]]:
        return [(name, versions[self.defaults[name]].url) for name, versions in sorted(self.specs.items())]

    def put(self, spec: ModelSpec, *workers: ReplicaInfo, **status: Any) -> None:
        """Add a registered version."""
        self.specs.setdefault(spec.name, {})[spec.version] = spec
        self.defaults.setdefault(spec.name, spec.version)
        phase = "ready" if workers else "stopped"
        self.status[spec.ref] = replace(ModelStatus(phase, len(workers), workers=workers), **status)


def read_typed_events(response: Any) -> list[dict[str, Any]]:
    """Return the objects of a stream of server-sent events, whose ``type`` is the name of the event."""
    assert (response.status, response["content-type"]) == (200, "text/event-stream")
    events = []
    for text in response.body.decode().removesuffix("\n\n").split("\n\n"):
        name, data = text.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events
