"""The entry point of inference: one request in, one response out, in replicas and gateways alike.

The data plane selects a version by the routing table, finds the backend that runs it, and measures the
request once. It knows neither protocols nor Ray: backends are passed to its constructor.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from random import randrange
from types import MappingProxyType
from typing import Protocol

from serve_app.dataplane import workflow_signature
from serve_app.dataplane.access_limits import Admission, KeyLimiter, count_rows, counts_tokens
from serve_app.dataplane.experiment_collector import ExperimentCollector
from serve_app.dataplane.response_cache import ResponseCache
from serve_app.dataplane.routing import version_router
from serve_app.dataplane.routing.version_router import VersionSelection
from serve_app.dataplane.running_request import RequestRecorder, RunningRequest
from serve_app.dataplane.shadow.mirror import ShadowMirror
from serve_app.dataplane.workflow_executor import WorkflowExecutor
from serve_app.domain import tensors
from serve_app.domain.access import AccessTable, KeyGrant
from serve_app.domain.model import ModelRef
from serve_app.domain.request import (
    Cancel,
    InferenceRequest,
    InferenceResponse,
    InputPart,
    OnDone,
    ResponseStream,
)
from serve_app.domain.routing_table import RoutingTable, VersionRoute
from serve_app.domain.signature import Signature
from serve_app.domain.tensors import Tensor
from serve_app.domain.traffic_policy import BUCKET_COUNT
from serve_app.errors import (
    DeadlineExceeded,
    ModelLoading,
    ModelNotFound,
    NoReplica,
    NotFound,
    QueueFull,
    RelayError,
    WorkflowNotFound,
)
from serve_app.runtime.backends import Backend, TaskBackend, infer
from serve_app.telemetry.metrics import Meters

_STARTING = ("idle", "loading")
_NONE_REQUESTED = "no replica is configured"


class SequenceAffinity(Protocol):
    """A router to the one replica that holds the state of a sequence."""

    async def __call__(
        self, request: InferenceRequest, selection: VersionSelection, /
    ) -> tuple[VersionSelection, Backend]:
        """Return the version and the backend for a request to a stateful model. Raises RelayError."""


class RoutingTableReader:
    """The process's copy of the routing table; ``on_table`` is called with each new one."""

    def __init__(
        self,
        table: RoutingTable = RoutingTable(),
        on_table: Callable[[RoutingTable], None] = lambda table: None,
    ) -> None:
        self.table = table
        self._changed = asyncio.Event()
        self._on_table = on_table

    def update(self, table: RoutingTable) -> None:
        self.table = table
        self._on_table(table)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    @property
    def changed(self) -> asyncio.Event:
        """An event that is set when the next table arrives.

        Get it before reading the table, so that no update is missed.
        """
        return self._changed


@dataclass(frozen=True)
class DataPlaneLimits:
    """Limits of one request."""

    loading_timeout: float = 30.0  # seconds that a request waits for a version that is loading
    max_workflow_items: int = 1000  # of one step of a workflow
    gateways: int = 1  # which receive requests of every key
    max_cache_bytes: int = 256 << 20  # of stored responses of all versions; 0: none is stored


class DataPlane:
    """The entry point of inference in one process.

    ``local`` has the versions that this process runs itself, by name and version; ``remote`` reaches the
    others. ``wake`` requests a replica for a version that is scaled to zero, while requests wait here.
    ``sequence_affinity`` locates the sequences of stateful models. ``mirror`` sends copies to shadows.
    """

    def __init__(
        self,
        reader: RoutingTableReader,
        meters: Meters,
        remote: Callable[[ModelRef, VersionRoute], Backend],
        local: Mapping[tuple[str, str], Backend] = MappingProxyType({}),
        wake: Callable[[ModelRef, VersionRoute], None] = lambda ref, route: None,
        mirror: ShadowMirror | None = None,
        sequence_affinity: SequenceAffinity | None = None,
        limits: DataPlaneLimits = DataPlaneLimits(),
    ) -> None:
        self._reader = reader
        self._meters = meters
        self._remote = remote
        self._local = local
        self._wake = wake
        self._sequence_affinity = sequence_affinity
        self._limits = limits
        self._response_cache = ResponseCache(meters, limits.max_cache_bytes)
        self.experiment_collector = ExperimentCollector()
        self._recorder = RequestRecorder(meters, self.experiment_collector, mirror)
        self.key_limiter = KeyLimiter(lambda: reader.table, limits.gateways)
        self._waiting: dict[ModelRef, int] = {}
        self._bucket_cursor = randrange(BUCKET_COUNT)  # of the last request

    @property
    def table(self) -> RoutingTable:
        return self._reader.table

    @property
    def access(self) -> AccessTable | None:
        """The grants of all keys; None where no key is required."""
        return self._reader.table.access

    @property
    def on_loopback(self) -> bool:
        """Whether the inference port is reachable from its own machine only."""
        return self._reader.table.on_loopback

    def admit_key(self, grant: KeyGrant | None, rows: int = 1) -> Admission | None:
        """Count a request of several calls, or one that is answered later. Raises RateLimited.

        The caller releases the admission, if there is one, and passes no grant to ``infer``.
        """
        return None if grant is None else self.key_limiter.admit(grant, rows, counts_tokens=True)

    def submit(
        self,
        request: InferenceRequest,
        on_done: OnDone,
        grant: KeyGrant | None = None,
        workflow_table: RoutingTable | None = None,
    ) -> Cancel:
        """Run a request at the version that the routing table selects; ``on_done`` receives its outcome.

        The outcome may be there before this method returns. The returned function withdraws the request of
        a client that disconnected. Raises RateLimited, with nothing counted.

        ``grant`` is that of the client's key, whose limits apply; None where no key is required, and for the
        calls that a request causes.
        ``workflow_table`` is the table at the start of the workflow whose step this request is. A version
        that was removed since then still serves the steps of workflows that started before.
        """
        admission = None
        if grant is not None:
            rows, has_tokens = count_rows(request, self._reader.table), counts_tokens(request, grant)
            admission = self.key_limiter.admit(grant, rows, has_tokens)
        running = RunningRequest(request, on_done, self._recorder, admission)
        try:
            running.start(self._select_backend(running, workflow_table))
        except Exception as error:  # also a fault of this server, which must end the admission
            running.complete(error)
        return running.cancel

    async def infer(
        self,
        request: InferenceRequest,
        grant: KeyGrant | None = None,
        workflow_table: RoutingTable | None = None,
    ) -> InferenceResponse | ResponseStream:
        """Return the response to a request; see ``submit``. Raises RelayError."""
        submit = partial(self.submit, grant=grant, workflow_table=workflow_table)
        return await infer(submit, request)

    def _select_backend(self, running: RunningRequest, workflow_table: RoutingTable | None) -> Backend:
        """Select the version of a request, and return the backend that runs it. Raises RelayError."""
        request = running.request
        if request.expired:
            self.find_version(request.model, request.version)  # an unknown model comes first
            raise DeadlineExceeded(request.model, 0.0)
        selection = running.selection = self._select(request, workflow_table)
        route = selection.route
        running.version = route.version
        if request.kind == "tensors" and route.signature is not None:
            route.signature.check(map(_to_tensor, request.inputs))
        if route.client_timeout:
            self._limit_deadline(running, route)
        backend = self._find_backend(running, route)
        if route.response_cache is None:
            return backend
        return self._response_cache.wrap(running.request, selection, self._reader.table, backend)

    def _find_backend(self, running: RunningRequest, route: VersionRoute) -> Backend:
        request = running.request
        if route.stateful and self._sequence_affinity is not None:
            return TaskBackend(partial(self._infer_sequence, running, self._sequence_affinity))
        if (local := self._local.get((request.model, route.version))) is not None:
            if route.phase == "stopped":  # HAProxy may still send requests to a replica that drains
                raise NoReplica(request.model, request.version, _NONE_REQUESTED)
            return local
        ref = ModelRef(request.model, route.version)
        if route.graph is not None:
            return self._create_workflow(ref, route)
        return self._find_replicas(ref, route)

    def _find_replicas(self, ref: ModelRef, route: VersionRoute) -> Backend:
        if self._reader.table.accepts_requests(route):
            return self._remote(ref, route)
        return TaskBackend(partial(self._infer_when_ready, ref, route))

    async def _infer_when_ready(
        self, ref: ModelRef, route: VersionRoute, request: InferenceRequest
    ) -> InferenceResponse | ResponseStream:
        route = await self._wait_until_ready(request, ref, route)
        return await self._remote(ref, route).infer(request)

    async def _infer_sequence(
        self, running: RunningRequest, locate: SequenceAffinity, request: InferenceRequest
    ) -> InferenceResponse | ResponseStream:
        selection = running.selection
        assert selection is not None
        route = selection.route
        if not self._reader.table.accepts_requests(route):
            route = await self._wait_until_ready(request, ModelRef(request.model, route.version), route)
        selection, backend = await locate(request, selection._replace(route=route))
        running.selection, running.version = selection, selection.route.version
        return await backend.infer(request)

    def _limit_deadline(self, running: RunningRequest, route: VersionRoute) -> None:
        """Apply the model's timeout to the deadline of a request."""
        request, deadline = running.request, time.time() + route.client_timeout / 1000
        if request.deadline is None or request.deadline > deadline:
            running.model_timeout = True
            running.request = replace(request, deadline=deadline)

    def _select(self, request: InferenceRequest, workflow_table: RoutingTable | None) -> VersionSelection:
        cursor = self._bucket_cursor = version_router.next_bucket_cursor(self._bucket_cursor)
        try:
            return version_router.select_version(self._reader.table, request, cursor)
        except NotFound:
            if workflow_table is None:
                raise
            return version_router.select_version(workflow_table, request, cursor)

    def _create_workflow(self, ref: ModelRef, route: VersionRoute) -> Backend:
        assert route.graph is not None

        async def infer_function(request: InferenceRequest) -> InferenceResponse | ResponseStream:
            return await self._find_replicas(ref, route).infer(request)

        infer_model = partial(self.infer, workflow_table=self._reader.table)
        executor = WorkflowExecutor(
            ref, route.graph, infer_model, infer_function, self._meters, self._limits.max_workflow_items
        )
        return TaskBackend(executor.infer)

    async def _wait_until_ready(
        self, request: InferenceRequest, ref: ModelRef, route: VersionRoute
    ) -> VersionRoute:
        """Hold a request while its version loads or wakes up.

        The number of waiting requests is limited by the version's queue size, their time by the deadline and
        by the wake-up or loading timeout.
        """
        if route.phase in _STARTING and self._waiting.get(ref, 0) >= route.job_queue_size:
            error = QueueFull(ref.name, request.version, "the version is loading and its queue is full")
            raise self._with_start_time(error, route)
        # On the monotonic clock: a clock that is set back by an hour must not hold a request for an hour.
        timeout = route.wake_timeout or self._limits.loading_timeout
        left = timeout if request.deadline is None else request.deadline - time.time()
        until = time.monotonic() + min(timeout, left)
        self._waiting[ref] = self._waiting.get(ref, 0) + 1
        try:
            while True:
                changed = self._reader.changed
                route = self.find_version(ref.name, ref.version)
                if route.phase not in _STARTING or self._reader.table.accepts_requests(route):
                    break
                if route.phase == "idle":
                    with suppress(ModelLoading):
                        self._wake(ref, route)
                try:
                    await asyncio.wait_for(changed.wait(), until - time.monotonic())
                except asyncio.TimeoutError:
                    if left < timeout:
                        raise self._with_start_time(DeadlineExceeded(request.model, 0.0), route) from None
                    loading = ModelLoading(ref.name, request.version, "its replicas are still loading")
                    raise self._with_start_time(loading, route) from None
        finally:
            self._waiting[ref] -= 1
            if not self._waiting[ref]:
                del self._waiting[ref]
        if route.phase in ("stopped", "failed") and route.replicas == 0:
            raise NoReplica(ref.name, request.version, route.last_error or _NONE_REQUESTED)
        return route

    def _with_start_time(self, error: RelayError, route: VersionRoute) -> RelayError:
        """Set ``retry_after`` to the duration of the version's last start, and return the error."""
        seconds = route.start_seconds or route.wake_timeout or self._limits.loading_timeout
        error.retry_after = max(1, ceil(seconds))
        return error

    def find_version(self, model: str, version: str | None = None) -> VersionRoute:
        """Return the version that such a request would get. Raises ModelNotFound and VersionNotFound."""
        return version_router.select_version(self._reader.table, InferenceRequest(model, version)).route

    def describe(self, model: str, version: str | None = None) -> VersionRoute:
        """Return the version with its signature; that of a workflow is derived from its models.

        Raises ModelNotFound and VersionNotFound.
        """
        route = self.find_version(model, version)
        if route.graph is None:
            return route
        return replace(route, signature=workflow_signature.derive_signature(route.graph, self._signature))

    def _signature(self, model: str, version: str | None) -> Signature | None:
        try:
            return self.describe(model, version).signature
        except NotFound:
            return None

    def find_workflow(self, name: str) -> None:
        """Raise WorkflowNotFound unless ``name`` is a workflow; a model is not one."""
        try:
            if self.find_version(name).graph is not None:
                return
        except ModelNotFound:
            pass
        raise WorkflowNotFound(name)

    def splits_traffic(self, model: str) -> bool:
        """Return whether requests that name no version may get different ones."""
        route = self._reader.table.models.get(model)
        return route is not None and version_router.sole_version(route) is None

    @property
    def startup_model(self) -> str | None:
        """The model that was loaded at startup, where there is exactly one."""
        models = self._reader.table.models.items()
        names = [name for name, model in models if any(v.loaded_at_startup for v in model.versions.values())]
        return names[0] if len(names) == 1 else None

    @property
    def ready(self) -> bool:
        """Return whether a table is here, and every version loaded at startup is ready or has failed."""
        return self._reader.table.generation > 0 and self._reader.table.startup_complete

    def serves_startup_models(self, count: int) -> bool:
        """Return whether at least ``count`` versions were loaded at startup, and each of them can answer.

        A version that starts with its next request can answer, too.
        """
        table = self._reader.table
        routes = [
            route
            for model in table.models.values()
            for route in model.versions.values()
            if route.loaded_at_startup
        ]
        return (
            self.ready
            and len(routes) >= count
            and all(
                table.accepts_requests(route) or (route.wake_timeout > 0 and route.phase != "failed")
                for route in routes
            )
        )

    @property
    def healthy(self) -> bool:
        """Return whether every default version has its replicas, or still has time to recover them."""
        models = self._reader.table.models.values()
        return all(
            route.healthy
            for model in models
            for version, route in model.versions.items()
            if version == model.default
        )


def _to_tensor(part: InputPart) -> Tensor:
    return tensors.from_content_type(part.name, part.value, part.content_type or "")
