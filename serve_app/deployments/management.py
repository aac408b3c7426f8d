"""Management: the only writer. It owns the registry and reconciles the cluster with it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Coroutine, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import ray
from ray import serve
from ray.serve.context import _get_global_client

from serve_app.control.access.jwks import JwkSetSource
from serve_app.control.access.service import KeyService
from serve_app.control.access.store import KeyStore
from serve_app.control.access_keys import ApiKeys, create_keys
from serve_app.control.adapters import AdapterService
from serve_app.control.api import ControlPlane
from serve_app.control.archive_ingestion import ArchiveIngestor
from serve_app.control.async_predictions.blob_store import BlobStore
from serve_app.control.async_predictions.service import AsyncPredictionService
from serve_app.control.async_predictions.store import AsyncPredictionStore
from serve_app.control.async_predictions.webhooks import WebhookSender
from serve_app.control.audit import AuditTrail
from serve_app.control.cluster_metrics import ClusterMetrics
from serve_app.control.drift.service import DriftService
from serve_app.control.experiments.service import ExperimentService
from serve_app.control.gauge_export import export_periodically
from serve_app.control.key_shares import KeyShares
from serve_app.control.lifecycle_events import EventLog
from serve_app.control.metric_store import MetricStore
from serve_app.control.models import DescribeHandler, ModelService
from serve_app.control.persistence.database import Database
from serve_app.control.pools.service import PoolService
from serve_app.control.pools.tracker import PoolTracker
from serve_app.control.reconcile_loop import ReconcileLoop
from serve_app.control.reconciler import Reconciler
from serve_app.control.recycling import ReplicaRecycler
from serve_app.control.registry import find_version
from serve_app.control.replica_health import HealthTracker
from serve_app.control.repository_poller import RepositoryPoller
from serve_app.control.result_history import ResultHistory
from serve_app.control.rollouts.service import RolloutService
from serve_app.control.scaling import ReplicaScaler
from serve_app.control.shadow.service import ShadowService
from serve_app.control.state import AcknowledgementPolicy, StateStore
from serve_app.control.table_publisher import Nudge, TablePublisher
from serve_app.control.traffic import TrafficService
from serve_app.control.workflows.service import WorkflowService
from serve_app.dataplane.data_plane import RoutingTableReader
from serve_app.deployments.applications import model_application
from serve_app.deployments.cluster_data_plane import create_data_plane
from serve_app.deployments.listeners.grpc import load_credentials
from serve_app.deployments.listeners.management import ManagementListeners
from serve_app.deployments.management_client import ReportQueue
from serve_app.deployments.options import autoscaling_config, user_config
from serve_app.deployments.ray_internals import env_check
from serve_app.deployments.ray_internals.controller_memory import bound_controller_memory
from serve_app.deployments.ray_internals.replica_replacement import replace_replica
from serve_app.deployments.serving_process.adapters import load_in_replica
from serve_app.deployments.transport.control_rpc import ControlDispatcher
from serve_app.deployments.transport.pool_client import VersionClients, load_in_host
from serve_app.domain.access import KeyDemand, KeyShare
from serve_app.domain.audit import Actor
from serve_app.domain.model import ModelRef, ModelSpec, Stage
from serve_app.domain.pool import HostReport
from serve_app.domain.recycling import RecyclingReason
from serve_app.domain.request import InferenceRequest, InferenceResponse, ResponseStream
from serve_app.domain.routing_table import RoutingTable, TableDelta, VersionRoute
from serve_app.domain.signature import Signature
from serve_app.errors import NotFound, StartFailed, Unavailable
from serve_app.net import tls
from serve_app.net.private_files import make_private_directory, restrict_umask
from serve_app.protocols.http import json_web_tokens
from serve_app.protocols.http_app import build_replayer
from serve_app.runtime.package_envs import PackageEnvs
from serve_app.settings import INFERENCE_HOST, Settings, is_loopback
from serve_app.telemetry import crash_reports, host_metrics, logs, torchserve, tracing
from serve_app.telemetry.audit_log import run_as_server
from serve_app.telemetry.crash_reports import CrashReport
from serve_app.telemetry.descriptors import DescriptorCheck
from serve_app.telemetry.disk_space import DiskSpace
from serve_app.telemetry.metrics import Meters, MetricsReport
from serve_app.telemetry.metrics_aggregator import MetricsAggregator

log = logging.getLogger(__name__)

_POOL_PERIOD_S = 0.2  # seconds in which the changes of pools are collected


def _inference_addresses() -> tuple[list[str], int]:
    """Return the hosts and the port of Ray Serve's HTTP proxy, and of `torchrelay start` in front of it.

    An unknown host counts as 0.0.0.0.
    """
    http = _get_global_client().http_config
    in_front = os.environ.get(INFERENCE_HOST)
    return [http.host or "0.0.0.0", *([in_front] if in_front else [])], http.port


def _describe_handler(clients: VersionClients) -> DescribeHandler:
    """Return a function that sends a ``describe`` request to one of the replicas of a version."""

    async def describe(ref: ModelRef, route: VersionRoute) -> InferenceResponse | ResponseStream:
        request = InferenceRequest(ref.name, ref.version, kind="describe")
        return await clients(ref, route).infer(request)

    return describe


class Management:
    """The control plane: one replica on the head node. Every acknowledged change is in its database."""

    @logs.report_start_failure
    async def __init__(self, settings: Settings) -> None:  # type: ignore[misc]  # Serve awaits it
        restrict_umask()
        logs.configure(settings, logs.ProcessIdentity("Management"))
        tracing.configure(settings, "management")
        if warning := env_check.missing_settings_warning(os.environ):
            log.warning("%s", warning)
        self._settings = settings
        self._tasks: list[asyncio.Task[None]] = []
        self._descriptors = DescriptorCheck()
        self._results_are_stored = True
        self._pool_publication: asyncio.TimerHandle | None = None
        self._listeners: ManagementListeners | None = None
        management_tls = await asyncio.to_thread(tls.management_context, settings)
        grpc_credentials = await asyncio.to_thread(load_credentials, settings)
        make_private_directory(settings.state_dir)
        # Reports of an earlier process of Management are of no use any more.
        await asyncio.to_thread(crash_reports.collect_reports, settings.crash_reports_dir)
        self._events = EventLog()
        self._health = HealthTracker()
        self._key_shares = KeyShares()
        self._meters = Meters(torchserve.create_recorders(settings))
        self._metrics_aggregator = MetricsAggregator(self._meters.torchserve.initial)
        self._reader = RoutingTableReader()
        # Clients showed their key when they submitted an asynchronous prediction, so this table needs none.
        self._table_publisher = TablePublisher(
            self._metrics_aggregator,
            on_publish=lambda table: self._reader.update(replace(table, access=None)),
        )
        self._archive_ingestor = await asyncio.to_thread(ArchiveIngestor, settings)
        self._pool_tracker = PoolTracker(on_change=self._on_pool_change)
        self._scaler = ReplicaScaler(settings.control, self._health, self._events, self._meters)
        self._recycler = ReplicaRecycler(
            replace_replica, self._events, self._meters, self._health.record_note
        )
        self._reconcile_loop = ReconcileLoop(
            Reconciler(
                partial(model_application, settings), partial(user_config, settings), autoscaling_config
            ),
            self._health,
            self._archive_ingestor,
            self._meters,
            settings,
            self._pool_tracker,
            self._recycler,
            self._scaler,
        )
        self._scaler.on_change = self._reconcile_loop.trigger
        self._scaler.count_running = self._reconcile_loop.count_running
        inference_hosts, inference_port = await self._reconcile_loop.run_in_serve_thread(_inference_addresses)
        run = ray.get_runtime_context().get_session_name()
        keys = await asyncio.to_thread(create_keys, settings, inference_hosts, run)
        await self._create_services(keys)
        self._state.on_loopback = all(map(is_loopback, inference_hosts))
        self._table_publisher.expect_readers(
            await self._reconcile_loop.running_readers() - {serve.get_replica_context().replica_id.unique_id}
        )
        await self._keys.load()
        if self._jwk_set is not None:
            await self._jwk_set.refresh()
        self._state.publish()  # before any request: the table holds the access rules
        await self._async_predictions.load()
        control = ControlPlane(self._dispatcher, settings, lambda: self._table_publisher.table.access)
        self._listeners = ManagementListeners(control, settings, self._meters, self._cluster_metrics.render)
        await self._listeners.open(inference_port, management_tls, grpc_credentials)
        self._host_metrics = host_metrics.start(self._meters.torchserve, settings)
        log.info("Management has started (pid %d)", os.getpid())  # again, after it was killed
        self._start_tasks()

    async def _create_services(self, keys: ApiKeys | None) -> None:
        """Open the database and create the services of the control plane over it."""
        settings, reconcile_loop = self._settings, self._reconcile_loop
        database = await asyncio.to_thread(Database, settings.database_url)
        registry = await asyncio.to_thread(database.load)
        self._events.record_skipped(database.skipped)
        self._metric_store = await asyncio.to_thread(MetricStore, database)
        environments = await asyncio.to_thread(
            PackageEnvs, settings.state_dir / "environments", settings.runtime
        )
        acknowledgement = AcknowledgementPolicy(
            reconcile_loop.live_readers, settings.control.acknowledge_timeout
        )
        self._state = reconcile_loop.state = StateStore(
            database,
            registry,
            self._table_publisher,
            self._health,
            keys,
            acknowledgement,
            reconcile_loop.on_change,
            settings.runtime.header_key_sequence_id.lower(),
        )
        self._scaler.get_registry = lambda: self._state.registry
        self._state.pool_hosts = lambda: self._pool_tracker.hosts
        self._pools = PoolService(
            self._state,
            self._pool_tracker,
            self._health,
            load_in_host,
            reconcile_loop.wait_for_round,
            lambda spec, reason: self._models.watch_isolated(spec, reason),
            settings,
        )
        reconcile_loop.on_crash = self._pools.on_crash
        metrics = self._cluster_metrics = ClusterMetrics(
            self._table_publisher, self._metrics_aggregator, reconcile_loop.live_readers, self._meters
        )
        self._models = ModelService(
            self._state,
            reconcile_loop,
            metrics,
            self._archive_ingestor,
            environments,
            self._events,
            _describe_handler(VersionClients(self._reader, settings)),
            settings,
        )
        self._models.pools = self._pools
        self._repository = RepositoryPoller(self._state, self._models, reconcile_loop, self._events, settings)
        self._workflows = WorkflowService(
            self._state, reconcile_loop, self._models, metrics, self._archive_ingestor, self._events, settings
        )
        self._adapters = AdapterService(self._state, reconcile_loop, self._archive_ingestor, load_in_replica)
        self._traffic = TrafficService(self._state)
        self._rollouts = RolloutService(
            self._state, self._health, self._metric_store, settings.runtime, self._meters
        )
        self._experiments = ExperimentService(
            self._state, self._metric_store, ResultHistory(database, "experiment"), self._meters
        )
        self._shadow = ShadowService(self._state, database, ResultHistory(database, "shadow"))
        await self._shadow.load()
        self._drift = DriftService(
            self._state, database, self._meters, self._archive_ingestor.directory, settings
        )
        await self._drift.load()
        self._async_predictions = self._create_async_predictions(database)
        self._keys = KeyService(self._state, KeyStore(database), keys, self._async_predictions.remove_owner)
        self._jwk_set = self._create_jwk_set(keys)
        self._audit_trail = self._state.audit_trail = AuditTrail(database, settings)
        self._dispatcher = ControlDispatcher(
            self._keys,
            self._models,
            self._scaler,
            self._workflows,
            self._adapters,
            self._traffic,
            self._experiments,
            self._rollouts,
            self._shadow,
            self._drift,
            self._async_predictions,
            self._cluster_metrics,
            trail=self._audit_trail,
        )

    def _start_tasks(self) -> None:
        """Start the loops of the control plane; the model store is loaded beside them."""

        async def on_loaded() -> None:
            await self._repository.load()
            await self._traffic.apply_declared_policies(self._settings.control.traffic)

        settings = self._settings
        loops: list[Coroutine[Any, Any, None]] = [
            run_as_server("startup", self._models.load_model_store(on_loaded)),
            self._reconcile_loop.run(),
            self._scaler.run(),
            run_as_server("repository", self._repository.run()),
            run_as_server("rollout", self._rollouts.run()),
            run_as_server("experiment", self._experiments.run()),
            export_periodically(self._rollouts.export, self._experiments.export),
            self._audit_trail.run(),
            self._shadow.run(),
            self._drift.run(),
            self._pools.run(),
            self._async_predictions.run(),
            self._report_queue.push(),
            DiskSpace({"state_dir": settings.state_dir, "log_dir": settings.log_dir}, self._meters).run(),
            bound_controller_memory(self._settings.control.controller_memory_limit),
            self._state.run(),
        ]
        if self._jwk_set is not None:
            loops += [self._jwk_set.run(), self._watch_unknown_keys(self._jwk_set)]
        self._tasks += [asyncio.create_task(loop) for loop in loops]

    def _create_jwk_set(self, keys: ApiKeys | None) -> JwkSetSource | None:
        """Return the source of the issuer's public keys, where tokens are accepted."""
        jwt = self._settings.auth.jwt
        if keys is None or jwt is None:
            return None

        def set_keys(jwk_set: str) -> None:
            keys.jwk_set = jwk_set
            self._state.publish()

        return JwkSetSource(jwt, self._settings.root, set_keys)

    async def _watch_unknown_keys(self, source: JwkSetSource) -> None:
        """Refresh the public keys after a token on this process's own ports named an unknown one."""
        while True:
            await asyncio.sleep(1)
            if json_web_tokens.take_unknown_key():
                source.request_refresh()

    def _create_async_predictions(self, database: Database) -> AsyncPredictionService:
        """Create the service of asynchronous predictions, over a data plane of this process."""
        settings, async_settings = self._settings, self._settings.async_predictions
        source = serve.get_replica_context().replica_id.unique_id
        self._report_queue = ReportQueue(self.observe, source, settings.counts_dir)
        plane, self._mirror = create_data_plane(
            self._reader, self._meters, settings, self._report_queue, stores_responses=False
        )
        stored = AsyncPredictionStore(database, BlobStore(settings), async_settings.inline_max_bytes)
        return AsyncPredictionService(
            stored,
            build_replayer(plane, settings),
            WebhookSender(async_settings),
            async_settings,
            self._meters,
            lambda: (access := self._state.table.access) is not None and access.has_several_owners,
        )

    # Calls of readers

    async def poll(
        self, source: str, generation: int, samples: MetricsReport | None
    ) -> bytes | TableDelta | Nudge | None:
        """Answer a reader's long poll; see ``control/table_publisher.py``. A whole table is pickled."""
        answer = await self._table_publisher.poll(source, generation, samples)
        return self._table_publisher.pickle_table() if isinstance(answer, RoutingTable) else answer

    async def disconnect(self, source: str, samples: MetricsReport) -> None:
        self._table_publisher.disconnect(source, samples)

    async def observe(self, source: str, number: int, payloads: dict[str, Any]) -> bool:
        """Store the reports of a process (see ``management_client.py``); return whether they are stored."""
        try:
            if (seen := payloads.get("trials")) is not None:
                await self._metric_store.record(source, number, seen)
                if not self._results_are_stored:
                    log.info("The results of experiments and rollouts are stored again")
                self._results_are_stored = True
            if (compared := payloads.get("shadow")) is not None:
                self._shadow.put(source, number, compared)
            if (captured := payloads.get("capture")) is not None:
                self._drift.put(source, number, captured)
        except Unavailable as error:
            if self._results_are_stored:  # every process sends them again, five times a second
                log.warning(
                    "The results of experiments and rollouts from %s could not be stored; all processes send "
                    "theirs again until they are: %s",
                    source,
                    error,
                )
            self._results_are_stored = False
            return False
        return True

    async def store_capture(self, ref: ModelRef, name: str, data: bytes) -> str:
        """Store a file of captured requests in the version's object store; return an error, or nothing."""
        return await self._drift.store_capture(ref, name, data)

    async def exchange_shares(self, source: str, demands: dict[str, KeyDemand]) -> dict[str, KeyShare]:
        """Return a process's shares of the limits of keys; see ``control/key_shares.py``."""
        return self._key_shares.exchange(source, demands)

    async def refresh_jwk_set(self) -> None:
        """Fetch the public keys of the token issuer soon: a token named an unknown one."""
        if self._jwk_set is not None:
            self._jwk_set.request_refresh()

    async def start_failed(self, ref: ModelRef, digest: str, error: StartFailed, began: float) -> None:
        """Record that a replica could not load the archive ``digest``, with the handler's traceback.

        ``began`` is the start of the load in seconds since the epoch.
        """
        with contextlib.suppress(NotFound):  # removed meanwhile
            spec = find_version(self._state.registry, ref.name, ref.version)
            if spec.digest == digest and not self._health.is_outdated(ref, began):
                self._health.record_start_failure(spec, error)
                failures = "torchrelay_replica_failures"
                self._meters.instrument(failures, ref.name, ref.version, "start_failed").inc()
                self._reconcile_loop.trigger()

    async def died(self, deaths: list[CrashReport]) -> None:
        """Record crashes of replicas on another node."""
        self._reconcile_loop.record_crashes(deaths)
        self._reconcile_loop.trigger()

    async def recycle(
        self, ref: ModelRef, replica: str, reason: RecyclingReason, detail: str, age: float
    ) -> None:
        """Replace a replica that has reached a limit of its version's ``recycling`` at this age."""
        if self._recycler.request(ref, replica, reason, detail, age):
            self._reconcile_loop.trigger()

    async def limit_is_ignored(self, ref: ModelRef, problem: str) -> None:
        """Show in a version's status that its replicas ignore a limit of ``recycling``."""
        with contextlib.suppress(NotFound):  # removed meanwhile
            find_version(self._state.registry, ref.name, ref.version)
            self._health.record_note(ref, problem)
            self._reconcile_loop.trigger()

    async def offers(
        self,
        ref: ModelRef,
        digest: str,
        signature: Signature | None,
        input_type: str,
        schemas: Mapping[str, Any] | None = None,
        memory: int = 0,
    ) -> None:
        """Record what a ready replica's handler declares, and the bytes of its process."""
        with contextlib.suppress(NotFound):  # removed meanwhile
            spec = find_version(self._state.registry, ref.name, ref.version)
            if spec.digest == digest:
                self._health.set_signature(spec, signature, input_type, schemas)
                self._reconcile_loop.trigger()
        try:
            await self._state.record_memory(ref, digest, memory)
        except Unavailable as error:
            log.warning(
                "The memory that a replica of %s takes could not be stored for its next placement: %s",
                ref.app,
                error,
            )

    async def report_host(self, host: str, report: HostReport) -> None:
        """Store what a pool's host has loaded."""
        self._pools.receive(host, report)

    async def pooled_spec(self, ref: ModelRef) -> ModelSpec | None:
        """Return the spec of a pooled version for a host that loads it; None where there is none."""
        with contextlib.suppress(NotFound):
            spec = find_version(self._state.registry, ref.name, ref.version)
            return spec if spec.is_pooled else None
        return None

    def _on_pool_change(self) -> None:
        """Publish what hosts have loaded soon: a busy pool changes many times a second."""
        if self._pool_publication is None:
            loop = asyncio.get_running_loop()
            self._pool_publication = loop.call_later(_POOL_PERIOD_S, self._publish_pools)

    def _publish_pools(self) -> None:
        self._pool_publication = None
        self._reconcile_loop.update_pools()

    async def stage(self, ref: ModelRef, stage: Stage) -> None:
        """Record the stage that a starting replica has reached."""
        if (story := self._events.find_unfinished(ref.name, ref.version)) is not None:
            self._events.append(story, stage)

    async def pause_before_start(self, ref: ModelRef) -> float:
        """Return the seconds that a new replica should wait because earlier ones crashed."""
        self._reconcile_loop.trigger()
        await self._reconcile_loop.wait_for_round()
        return self._health.start_delay(ref)

    async def archive(self, ref: ModelRef, offset: int, length: int, adapter: str = "") -> bytes:
        """Return a chunk of a version's archive, or of an adapter's, for a node without this disk.

        It is empty at the end.
        """
        spec = find_version(self._state.registry, ref.name, ref.version)
        stored = self._adapters.find_stored(spec, adapter) if adapter else spec
        return await asyncio.to_thread(self._archive_ingestor.read_chunk, stored, offset, length)

    async def call_control(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], actor: Actor
    ) -> Any:
        """Return the result of a control-plane method; a RelayError is returned, not raised."""
        return await self._dispatcher.dispatch(name, args, kwargs, actor)

    async def check_health(self) -> None:
        self._descriptors.run()
        for task in self._tasks:
            if task.done() and task.exception() is not None:
                raise RuntimeError("the reconciler ended") from task.exception()

    async def __del__(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            self._models.close()
            self._workflows.close()
            await self._async_predictions.close()
            await self._mirror.close()
            await self._shadow.close()
            await self._drift.close()
            await self._metric_store.close()
            await self._audit_trail.close()
        await asyncio.to_thread(tracing.shutdown)
        if self._listeners is not None:
            await self._listeners.close()
