"""Every service of the control plane over a real database, without Ray: the parts that Management creates."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from serve_app.control.access.service import KeyService
from serve_app.control.access.store import KeyStore
from serve_app.control.access_keys import ApiKeys
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
from serve_app.control.lifecycle_events import EventLog
from serve_app.control.metric_store import MetricStore
from serve_app.control.models import ModelService
from serve_app.control.persistence.database import Database
from serve_app.control.pools.service import PoolService
from serve_app.control.pools.tracker import PoolTracker
from serve_app.control.reconcile_loop import ReconcileLoop
from serve_app.control.reconciler import ActResult, ObservedApp
from serve_app.control.registry import DesiredState
from serve_app.control.replica_health import HealthTracker
from serve_app.control.result_history import ResultHistory
from serve_app.control.rollouts.service import RolloutService
from serve_app.control.scaling import ReplicaScaler
from serve_app.control.shadow.service import ShadowService
from serve_app.control.state import AcknowledgementPolicy, StateStore
from serve_app.control.table_publisher import TablePublisher
from serve_app.control.traffic import TrafficService
from serve_app.control.workflows.service import WorkflowService
from serve_app.deployments.transport.control_rpc import ControlDispatcher
from serve_app.domain.access import ROLES, KeyGrant
from serve_app.domain.access_settings import KeySettings
from serve_app.domain.async_prediction import StoredRequest, StoredResponse
from serve_app.domain.model import ReplicaInfo
from serve_app.domain.request import InferenceResponse
from serve_app.errors import StartFailed
from serve_app.runtime.package_envs import PackageEnvs
from serve_app.settings import AuthSettings, ControlSettings, Settings
from serve_app.telemetry.metrics import Meters, MetricsReport
from serve_app.telemetry.metrics_aggregator import MetricsAggregator

OPERATOR = KeyGrant(ROLES["manage"], name="ops")
_OWN_KEY = KeySettings("ops", f"sha256:{sha256(b'ops').hexdigest()}", "manage")


class SimulatedServe:
    """Ray Serve's part: applications run as soon as they should, except those that are ``broken``.

    Those in ``starting`` are deployed, and have no replica yet; ``free`` has the resources for them.
    """

    def __init__(self, health: HealthTracker) -> None:
        self.apps: dict[str, DesiredState] = {}
        self.broken: set[str] = set()
        self.starting: set[str] = set()
        self.free = self.get_total_resources()
        self._health = health

    def observe(self) -> dict[str, ObservedApp]:
        return {app: self._seen(app, want) for app, want in self.apps.items()}

    def act(self, desired: Mapping[str, DesiredState], seen: Mapping[str, ObservedApp]) -> ActResult:
        steps = len(desired.keys() ^ self.apps.keys())
        self.apps = dict(desired)
        for app in desired.keys() & self.broken:
            spec = desired[app].spec
            self._health.record_start_failure(
                spec, StartFailed(spec.name, spec.version, f"Traceback of {app}")
            )
        return ActResult(steps, {}, {})

    def get_total_resources(self) -> dict[str, dict[str, float]]:
        return {"10.0.0.1": {"CPU": 2.0, "memory": 2.0**34}}

    def get_free_resources(self) -> dict[str, dict[str, float]]:
        return self.free

    def list_replicas(self, states: tuple[str, ...] = ()) -> set[str]:
        return set()

    def _seen(self, app: str, want: DesiredState) -> ObservedApp:
        count = 0 if app in self.broken | self.starting else want.min_replicas
        workers = tuple(ReplicaInfo(f"{app}#{n}", 1, 0.0, True) for n in range(count))
        return ObservedApp(app, want.route, want.min_replicas, {}, 0, "RUNNING", "", workers)


class _Environments:
    """The package environments, which are opened on demand: that takes 0.3 s."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def build(self, *args: Any) -> Path:
        folder = self._settings.state_dir / "environments"
        return PackageEnvs(folder, self._settings.runtime).build(*args)


class ControlServices:
    """The services of one start of the control plane, on the running event loop.

    ``control`` has settings of the section of that name.
    """

    def __init__(self, home: Path, url: str = "", **control: Any) -> None:
        (home / "model_store").mkdir(exist_ok=True)
        self.settings = settings = Settings(
            home=str(home),
            control=ControlSettings(acknowledge_timeout=60.0, database_url=url, **control),
            auth=AuthSettings(keys=(_OWN_KEY,)),
        )
        self.meters = Meters()
        self.aggregator = MetricsAggregator()
        self.publisher = TablePublisher(self.aggregator)
        self.health = HealthTracker()
        self.events = EventLog()
        self.ingestor = ArchiveIngestor(settings)
        self.serve = SimulatedServe(self.health)
        tracker = PoolTracker()
        self.scaler = ReplicaScaler(settings.control, self.health, self.events, self.meters)
        self.reconcile_loop = ReconcileLoop(
            self.serve,  # type: ignore[arg-type]
            self.health,
            self.ingestor,
            self.meters,
            settings,
            tracker,
            scaler=self.scaler,
        )
        self.scaler.on_change = self.reconcile_loop.trigger
        self.scaler.count_running = self.reconcile_loop.count_running
        self.database = Database(settings.database_url)
        self.api_keys = ApiKeys(settings, "run")
        readers = self.reconcile_loop.live_readers
        self.state = self.reconcile_loop.state = StateStore(
            self.database,
            self.database.load(),
            self.publisher,
            self.health,
            self.api_keys,
            AcknowledgementPolicy(readers, settings.control.acknowledge_timeout),
            self.reconcile_loop.on_change,
        )
        self.metrics = metrics = ClusterMetrics(self.publisher, self.aggregator, readers, self.meters)
        self.scaler.get_registry = lambda: self.state.registry
        self.models = ModelService(
            self.state,
            self.reconcile_loop,
            metrics,
            self.ingestor,
            _Environments(settings),  # type: ignore[arg-type]
            self.events,
            _describe,
            settings,
        )
        self.models.pools = PoolService(
            self.state,
            tracker,
            self.health,
            _load,  # type: ignore[arg-type]
            self.reconcile_loop.wait_for_round,
            self.models.watch_isolated,
            settings,
        )
        self.workflows = WorkflowService(
            self.state, self.reconcile_loop, self.models, metrics, self.ingestor, self.events, settings
        )
        self.metric_store = MetricStore(self.database, exposure_timeout=0.0)
        self.shadow = ShadowService(self.state, self.database, ResultHistory(self.database, "shadow"))
        self.drift = DriftService(self.state, self.database, self.meters, self.ingestor.directory, settings)
        self.predictions = AsyncPredictionService(
            AsyncPredictionStore(self.database, BlobStore(settings), 1000),
            _execute,
            WebhookSender(settings.async_predictions),
            settings.async_predictions,
            self.meters,
        )
        self.key_store = KeyStore(self.database)
        self.keys = KeyService(self.state, self.key_store, self.api_keys, self.predictions.remove_owner)
        self.trail = self.state.audit_trail = AuditTrail(self.database, settings)
        dispatcher = ControlDispatcher(
            self.keys,
            self.models,
            self.scaler,
            self.workflows,
            AdapterService(self.state, self.reconcile_loop, self.ingestor, _load),
            TrafficService(self.state),
            ExperimentService(
                self.state, self.metric_store, ResultHistory(self.database, "experiment"), self.meters
            ),
            RolloutService(self.state, self.health, self.metric_store, settings.runtime, self.meters),
            self.shadow,
            self.drift,
            self.predictions,
            metrics,
            trail=self.trail,
        )
        self.control = ControlPlane(dispatcher, settings)
        self._tasks: list[asyncio.Task[None]] = []
        self._closed = False

    async def start(self) -> None:
        """Load what the services have stored, start the reconcile loop, and wait for the replicas.

        One reader applies each routing table at once.
        """
        await self.keys.load()
        await self.shadow.load()
        await self.drift.load()
        await self.predictions.load()
        self.state.publish()
        self._tasks += map(asyncio.create_task, (self.reconcile_loop.run(), self._read_tables()))
        wanted = {spec.ref: spec.min_workers for spec in self.state.registry}
        await until(lambda: all(self.reconcile_loop.count_running(r) == n for r, n in wanted.items()))

    async def _read_tables(self) -> None:
        meters, generation = Meters(), 0
        samples: MetricsReport | None = None
        while not self._closed:  # Python 3.11's wait_for may lose a cancellation
            answer = await self.publisher.poll("gateway", generation, samples)
            generation = self.publisher.table.generation
            samples = meters.report() if isinstance(answer, str) else None

    async def operate(self, name: str, *args: Any, **options: Any) -> Any:
        """Call an operation by name: the validated one, where there is one."""
        method = getattr(self.control, name, None) or getattr(self.control.api, name)
        return await method(*args, **options)

    async def close(self) -> None:
        self.models.close()
        self.workflows.close()
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.predictions.close()
        await self.metric_store.close()
        await self.trail.close()
        self.database.close()


async def _describe(ref: Any, route: Any) -> InferenceResponse:
    return InferenceResponse(b'{"described": true}', version=ref.version)


async def _execute(request: StoredRequest) -> StoredResponse:
    return StoredResponse(200, (), request.body)


async def _load(*args: Any) -> None:
    """Load a version or an adapter in no time."""


async def until(condition: Callable[[], Any], timeout: float = 30.0) -> None:
    """Wait until a condition holds. Raises asyncio.TimeoutError."""

    async def wait() -> None:
        while not condition():
            await asyncio.sleep(0.002)

    await asyncio.wait_for(wait(), timeout)
