"""The service that registers, scales, describes and removes models."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import orjson

from serve_app.control import placement_check, registry_changes
from serve_app.control.archive_ingestion import ArchiveIngestor
from serve_app.control.cancellation import run_to_end
from serve_app.control.cluster_metrics import ClusterMetrics
from serve_app.control.lifecycle_events import EventHistory, EventLog
from serve_app.control.placement_check import find_node_type
from serve_app.control.pools.service import PoolService
from serve_app.control.reconcile_loop import PLACEMENT_REPORT_S, ReconcileLoop
from serve_app.control.registry import find_version, has_version, is_workflow
from serve_app.control.replica_health import PLACEMENT_TIMEOUT_S
from serve_app.control.scaling import check_policy
from serve_app.control.state import StateStore
from serve_app.domain import limits
from serve_app.domain.access import matches
from serve_app.domain.model import (
    EventQuery,
    ModelEvent,
    ModelRef,
    ModelSpec,
    Registration,
    ScalingProgress,
    VersionDescription,
)
from serve_app.domain.request import InferenceResponse, ResponseStream
from serve_app.domain.routing_table import VersionRoute
from serve_app.domain.urls import redact_url
from serve_app.errors import (
    ConfigurationError,
    Conflict,
    HandlerFailed,
    InsufficientResources,
    ModelNotAllowed,
    NoReplica,
    RelayError,
    StartFailed,
    StartOutOfMemory,
)
from serve_app.model_store.archive import HUGGING_FACE, archive_stem
from serve_app.runtime.package_envs import PackageEnvs
from serve_app.settings import Settings

log = logging.getLogger(__name__)

# Sends a ``describe`` request to one of the replicas of a version.
DescribeHandler = Callable[[ModelRef, VersionRoute], Awaitable[InferenceResponse | ResponseStream]]

_QUEUE_MAX_AGE_S = 1.0  # of the length of a queue that a description shows
# For which a description waits for it. A process that loads a model may take 0.2 s; samples also arrive with
# its next long poll, which takes at most 5 s.
_QUEUE_TIMEOUT_S = 0.03
_REMOVAL_TIMEOUT_S = 60.0  # for which a removal waits, with control.external_eviction
_STORE_RETRY_S = 10.0  # after which an unreadable model store is read again
_MAX_LINE_LENGTH = 300  # characters of an installer's line in an event


class ModelService:
    """The operations of ``ControlAPI`` on models, in the process that owns the registry.

    ``pools`` is set before the first operation.
    """

    pools: PoolService

    def __init__(
        self,
        state: StateStore,
        reconcile_loop: ReconcileLoop,
        metrics: ClusterMetrics,
        ingestor: ArchiveIngestor,
        environments: PackageEnvs,
        events: EventLog,
        describe_handler: DescribeHandler,
        settings: Settings,
    ) -> None:
        self._state = state
        self._reconcile_loop = reconcile_loop
        self._metrics = metrics
        self._ingestor = ingestor
        self._environments = environments
        self._events = events
        self._describe_handler = describe_handler
        self._settings = settings
        self._watchers: set[asyncio.Task[None]] = set()  # of histories whose callers did not wait

    def close(self) -> None:
        for task in self._watchers:
            task.cancel()

    # Changes

    async def register(self, registration: Registration) -> ScalingProgress:
        history = self.open_history(registration)
        with self._events.record_failure(history):
            return await self._register(registration, history)

    async def _register(self, registration: Registration, history: EventHistory) -> ScalingProgress:
        state = self._state
        async with self.ingest(registration, history) as spec:
            if not matches(spec.name, registration.allowed_models):
                raise ModelNotAllowed(spec.name)
            registry_changes.register(state.registry, spec)  # refused before anything is installed for it
            await self.check_placement(spec)
            await self.install_requirements(spec, history)
            while self._reconcile_loop.is_draining(spec.ref):
                await self._reconcile_loop.wait_for_round()
            async with state.exclusive():
                # A reader without the new version returns an error for it a little longer.
                await state.commit_with_status(registry_changes.register(state.registry, spec))
        check = self._reconcile_loop.watch_registration(spec.ref)
        advice = "" if registration.handler else _advice(spec)
        if spec.min_workers == 0:
            self._events.append(history, "ready", workers=0)
            bounds = _autoscaling_bounds(spec)
            return ScalingProgress(spec.ref, 0, "done", bounds, advice=advice, on_demand=spec.is_pooled)
        if not registration.wait:
            self.watch(history, spec)
            return ScalingProgress(spec.ref, 0, "processing", _autoscaling_bounds(spec), advice=advice)
        try:
            return replace(await self.wait_until_started(history, spec, check), advice=advice)
        except StartFailed:
            await self._undo_registration(spec, check)
            raise

    async def _undo_registration(self, spec: ModelSpec, check: Callable[[], None]) -> None:
        state = self._state
        async with state.exclusive():
            # A version that was registered again stays, and so does one that a traffic policy names or that
            # is the default of several; its start is retried.
            try:
                check()
                after = registry_changes.unregister(state.registry, spec.name, spec.version)[0]
                await state.commit_with_status(after)
            except RelayError as error:
                log.warning("%s could not be started, and is not removed: %s", spec.ref.app, error)

    async def scale(
        self,
        model: str,
        version: str | None,
        min_workers: int | None,
        max_workers: int | None,
        wait: bool,
        autoscaling: Mapping[str, Any] | None = None,
    ) -> ScalingProgress:
        state = self._state
        async with state.exclusive():
            before = find_version(state.registry, model, version)
            after, ref = registry_changes.scale(
                state.registry, model, version, min_workers, max_workers, autoscaling
            )
            spec = find_version(after, ref.name, ref.version)
            self._check_scale(spec)
            await self.check_placement(spec, before.min_workers)
            self._reconcile_loop.reset_backoff(ref)
            await state.commit(after)
        history = self._events.open(ref.name, version=ref.version, workers=spec.min_workers)
        previous_bounds = None if spec.scaling else _autoscaling_bounds(before)
        if not wait:
            self.watch(history, spec)
            running = self._reconcile_loop.count_running(ref)
            return ScalingProgress(ref, running, "processing", _autoscaling_bounds(spec), previous_bounds)
        with self._events.record_failure(history):
            check = self._reconcile_loop.watch_registration(ref)
            progress = await self.wait_until_started(history, spec, check)
            return replace(progress, previous_bounds=previous_bounds)

    async def check_placement(self, spec: ModelSpec, accepted: int = 0) -> None:
        """Raise InsufficientResources where the cluster cannot hold a version, or the hosts of its pool."""
        claiming = self.pools.find_claiming_spec(spec) if spec.is_pooled else spec
        try:
            await self._reconcile_loop.check_placement(claiming, accepted)
        except InsufficientResources as error:
            if not self._settings.control.external_eviction:
                raise
            raise StartOutOfMemory(spec.name, spec.version, str(error)) from None

    def _check_scale(self, spec: ModelSpec) -> None:
        """Raise LimitExceeded where workers or autoscaling are beyond a limit, and as ``check_policy``."""
        workers = {"min_worker": spec.min_workers, "max_worker": spec.max_workers}
        limits.check(workers, self._settings.limits, "the request")
        if spec.autoscaling is not None:
            limits.check(spec.autoscaling, self._settings.limits, "the request")
        check_policy(spec, self._settings.control)

    def watch_isolated(self, spec: ModelSpec, reason: str) -> None:
        """Record that a version has left its pool, and the start of its own replicas."""
        history = self._events.open(spec.name, version=spec.version, workers=max(1, spec.min_workers))
        self._events.append(history, "isolated", pool=spec.pool, reason=reason)
        self.watch(history, find_version(self._state.registry, spec.name, spec.version))

    async def set_default(self, model: str, version: str) -> ModelRef:
        async with self._state.exclusive():
            after, ref = registry_changes.set_default(self._state.registry, model, version)
            await self._state.commit(after)
        return ref

    async def unregister(self, model: str, version: str | None) -> ModelRef:
        async with self._state.exclusive():
            after, ref = registry_changes.unregister(self._state.registry, model, version)
            try:
                await self._state.commit(after)
            finally:  # it may be stored, and a reader late
                if not has_version(self._state.registry, ref):
                    self.finish_history(ref)
        if self._settings.control.external_eviction:
            await self._wait_until_ended(ref)
        return ref

    async def _wait_until_ended(self, ref: ModelRef) -> None:
        """Wait until the replicas of a removed version have ended, but for 60 seconds at most."""
        deadline = time.monotonic() + _REMOVAL_TIMEOUT_S
        while self._reconcile_loop.is_draining(ref) and time.monotonic() < deadline:
            await self._reconcile_loop.wait_for_round()

    def finish_history(self, ref: ModelRef) -> None:
        """Finish the history of a version that was removed while it started."""
        if (history := self._events.find_unfinished(ref.name, ref.version)) is not None:
            message = f"{ref.name} {ref.version} was removed."
            self._events.append(history, "failed", reason="removed", message=message)

    async def renew_key(self, kind: Literal["inference", "management"]) -> None:
        await self._state.renew_key(kind)

    async def load_model_store(self, on_loaded: Callable[[], Awaitable[None]]) -> None:
        """Register the new and the changed archives of the model store, then call ``on_loaded``.

        With an unreadable model store and without registered models, the server is not ready: it would
        serve nothing.
        """
        while (registrations := await self._list_model_store()) is None:
            await asyncio.sleep(_STORE_RETRY_S)
        for registration in registrations:
            await self._load(registration)
        try:
            await on_loaded()
        finally:
            self._reconcile_loop.startup_loaded = True
            self._reconcile_loop.trigger()

    async def _list_model_store(self) -> list[Registration] | None:
        """Return what start-up loads, or None where that is unknown and nothing is registered either."""
        try:
            return await asyncio.to_thread(self._ingestor.startup_registrations)
        except ConfigurationError as error:
            log.error("%s", error)
            return [] if self._state.registry.models else None

    async def _load(self, registration: Registration) -> None:
        url = redact_url(registration.url)
        history = self.open_history(registration)
        try:
            with self._events.record_failure(history):
                spec = await self.apply_archive(registration, history)
            if spec is not None:
                self.watch(history, spec)
        except RelayError as error:
            log.error("%s was not loaded: %s\n%s", url, error, getattr(error, "detail", ""))
        except Exception:  # a broken archive must not keep the others from loading
            log.exception("%s was not loaded", url)

    async def apply_archive(
        self,
        registration: Registration,
        history: EventHistory,
        check: Callable[[ModelSpec], Awaitable[None]] | None = None,
        loaded_at_startup: bool = True,
    ) -> ModelSpec | None:
        """Register an archive of the operator's where it is new or has changed.

        ``check`` is awaited with the spec, and raises to refuse it. Return the registered spec, or None where
        the version was removed before.
        """
        state = self._state
        async with self.ingest(registration, history, at_startup=True) as spec:
            spec = spec.with_(loaded_at_startup=loaded_at_startup)
            if check is not None:
                await check(spec)
            version_settings = self._settings.control.models.get(spec.name, {}).get(spec.version)
            default = version_settings is not None and version_settings.default_version
            if registry_changes.apply_archive(state.registry, spec, default) is not state.registry:
                await self.install_requirements(spec, history)
            while self._reconcile_loop.is_draining(spec.ref):
                await self._reconcile_loop.wait_for_round()
            async with state.exclusive():
                after = registry_changes.apply_archive(state.registry, spec, default)
                if after is not state.registry:
                    await state.commit_with_status(after)
        registered = next((known for known in state.registry if known.ref == spec.ref), None)
        if registered is None:
            self._events.discard(history)
        return registered

    # Queries

    async def describe(self, model: str, version: str | None) -> VersionDescription:
        find_version(self._state.registry, model, version)
        await self._metrics.collect(_QUEUE_MAX_AGE_S, _QUEUE_TIMEOUT_S)
        spec = find_version(self._state.registry, model, version)  # it may have been removed meanwhile
        pending = self._metrics.total("torchrelay_queue_depth", model=spec.name, version=spec.version)
        is_default = self._state.registry.models[model].default == spec.version
        status = self._reconcile_loop.get_status(spec.ref)
        status = replace(status, workers=self._metrics.add_memory(spec.ref, status.workers))
        return VersionDescription(spec, status, is_default, pending)

    async def get_metadata(self, model: str, version: str | None) -> dict[str, Any]:
        """Return one replica's response to a ``describe`` request; empty where it is no JSON object."""
        ref = find_version(self._state.registry, model, version).ref
        if not self._reconcile_loop.count_running(ref):
            raise NoReplica(ref.name, version, "no replica runs that could describe it")
        route = self._state.table.models[ref.name].versions[ref.version]
        try:
            response = await self._describe_handler(ref, route)
        except HandlerFailed as error:
            # Most handlers do not implement ``describe`` and fail on its empty row; that is no fault.
            log.info("%s describes nothing of itself: %s", ref.app, error)
            return {}
        if isinstance(response, ResponseStream):
            await response.aclose()
            return {}
        try:
            metadata = orjson.loads(response.body)
        except orjson.JSONDecodeError:
            return {}
        return metadata if isinstance(metadata, dict) else {}

    async def list_versions(self, model: str) -> list[str]:
        find_version(self._state.registry, model, None)
        record = self._state.registry.models[model]
        return sorted(record.versions, key=lambda version: (version != record.default, version))

    async def list_models(self) -> list[tuple[str, str]]:
        models = self._state.registry.models.items()
        records = sorted((name, record) for name, record in models if not is_workflow(record))
        return [(name, record.versions[record.default].url) for name, record in records]

    async def poll_events(
        self, model: str, registration: str | None, since: int | None, timeout: float
    ) -> list[ModelEvent]:
        if registration is None and not self._events.has_events(model):
            spec = find_version(self._state.registry, model, None)
            history = self._events.open(model, version=spec.version, workers=spec.min_workers)
            self.watch(history, spec)
        return await self._events.wait_for_events(model, registration, since, timeout)

    async def list_events(self, query: EventQuery, allowed_models: tuple[str, ...]) -> list[ModelEvent]:
        return self._events.list_events(query, allowed_models)

    # From an archive to a spec

    @contextlib.asynccontextmanager
    async def ingest(
        self, registration: Registration, history: EventHistory, at_startup: bool = False
    ) -> AsyncIterator[ModelSpec]:
        """Fetch and check an archive; yield its spec, and keep the archive until the end of the block."""
        async with self._reconcile_loop.hold_archives():
            on_progress = self._events.progress_callback(history)
            spec = await run_to_end(
                asyncio.to_thread(self._ingestor.ingest, registration, at_startup, on_progress)
            )
            self._events.set_model(history, spec.name, spec.version)
            yield spec

    async def install_requirements(self, spec: ModelSpec, history: EventHistory) -> None:
        """Install the archive's requirements on this node before a change. Raises InstallFailed.

        Source builds run the archive's code, so only the processes of its replicas run them.
        """
        if spec.requirements and not self._settings.runtime.pip_allow_source_builds:
            on_progress = self._events.progress_callback(history)
            directory = await asyncio.to_thread(self._ingestor.directory, spec)
            await asyncio.to_thread(
                self._environments.build,
                spec.name,
                directory,
                spec.requirements,
                spec.digest,
                lambda line: on_progress("installing", line=line[:_MAX_LINE_LENGTH]),
            )

    # Event histories

    def open_history(self, registration: Registration) -> EventHistory:
        """Open the event history of a registration."""
        archive = re.split("[?#]", registration.url)[0].rstrip("/").rpartition("/")[2]
        name = (registration.model_name or archive_stem(archive))[:_MAX_LINE_LENGTH]
        return self._events.open(name, registration.id, url=redact_url(registration.url)[:_MAX_LINE_LENGTH])

    def watch(self, history: EventHistory, spec: ModelSpec) -> None:
        """Complete a history for a caller that does not wait."""
        check = self._reconcile_loop.watch_registration(spec.ref)

        async def watch() -> None:
            with contextlib.suppress(RelayError), self._events.record_failure(history):
                await self.wait_until_started(history, spec, check)

        task = asyncio.create_task(watch())
        self._watchers.add(task)
        task.add_done_callback(self._watchers.discard)

    async def wait_until_started(
        self, history: EventHistory, spec: ModelSpec, check: Callable[[], None]
    ) -> ScalingProgress:
        """Wait until a version has the workers of ``spec``, and append events meanwhile.

        ``check`` is that of ``ReconcileLoop.watch_registration``. Raises StartFailed and Conflict.
        """
        self._events.append(history, "starting", workers=spec.min_workers)
        timeout = spec.startup_timeout + (self._settings.runtime.install_timeout if spec.requirements else 0)
        try:
            if spec.is_pooled:
                count = await self.pools.load(spec, timeout + PLACEMENT_TIMEOUT_S, check)
                progress = ScalingProgress(spec.ref, count, "done")
            else:
                report = partial(self._report_missing_resources, history, spec)
                progress = await self._reconcile_loop.wait_until_running(spec, timeout, report, check)
        except Conflict as error:
            self._events.append(history, "failed", reason="removed", message=str(error))
            raise
        self._events.append(history, "ready", workers=progress.replicas)
        return replace(progress, bounds=_autoscaling_bounds(spec))

    async def _report_missing_resources(self, history: EventHistory, spec: ModelSpec) -> None:
        """Append an event with the resources that a version without a place waits for.

        Raises StartOutOfMemory where another program evicts models: it waits for this answer.
        """
        # Resources that a replica has just been given count as not free.
        if time.time() - history.events[-1].time < PLACEMENT_REPORT_S:
            return
        if missing := await self._reconcile_loop.find_missing_resources(spec):
            node_type = find_node_type(spec, self._settings.control.node_types)
            details = {"node_type": node_type} if node_type else {}
            self._events.append(history, "starting", workers=spec.min_workers, waiting_for=missing, **details)
            if self._settings.control.external_eviction:
                raise StartOutOfMemory(spec.name, spec.version, placement_check.explain(spec, missing))


def _advice(spec: ModelSpec) -> str:
    """Return a hint where most callers of such a model need another handler than a folder's default."""
    if spec.handler == HUGGING_FACE and spec.config.get("task") == "text-generation":
        return (
            "It answers as transformers' pipeline; registered with handler=llm it streams, and "
            "has OpenAI's API"
        )
    return ""


def _autoscaling_bounds(spec: ModelSpec) -> tuple[int, int] | None:
    """Return the bounds between which autoscaling applies."""
    return (spec.min_workers, spec.max_workers) if spec.scaling is not None else None
