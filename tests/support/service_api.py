"""The management API of one real control service, over a registry in SQLite."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar

from serve_app.control import registry_changes
from serve_app.control.metric_store import MetricStore
from serve_app.control.operations import OPERATIONS
from serve_app.control.persistence.database import Database
from serve_app.control.registry import Registry
from serve_app.control.replica_health import HealthTracker
from serve_app.control.state import AcknowledgementPolicy, StateStore
from serve_app.control.table_publisher import TablePublisher
from serve_app.dataplane.experiment_collector import ExperimentCollector
from serve_app.domain.access import AccessTable
from serve_app.domain.model import ModelSpec
from serve_app.telemetry.metrics_aggregator import MetricsAggregator
from tests.support.openapi_checks import assert_described

T = TypeVar("T")


class ServiceApi:
    """A service behind the management API; ``workers`` are the replicas of each registered version."""

    def __init__(
        self, folder: Path, management: Callable[..., Any], workers: Mapping[tuple[str, str], int]
    ) -> None:
        self._url = f"sqlite:///{folder / 'registry.db'}"
        self._management = management
        self.loop = asyncio.new_event_loop()
        self.health = HealthTracker()
        self.experiment_collector = ExperimentCollector()
        self._number = self._lot = 0
        self.open(workers)

    def create_service(self) -> Any:
        raise NotImplementedError

    def open(self, workers: Mapping[tuple[str, str], int] | None = None) -> None:
        """Start as a new Management does, with the stored registry, or with one of ``workers`` only."""
        self.database = Database(self._url)
        registry = self.database.load()
        if workers is not None:
            before, registry = registry, Registry()
            for (name, version), count in workers.items():
                spec = ModelSpec(
                    name, version, "m.mar", "d" * 64, "archive", min_workers=count, max_workers=count
                )
                registry = registry_changes.register(registry, spec)
            self.database.save(before, registry)
        self.measured = MetricStore(self.database, exposure_timeout=1.0)
        self.board = TablePublisher(MetricsAggregator())
        self.alive: set[str] = set()

        async def alive() -> set[str]:
            return self.alive

        acknowledgements = AcknowledgementPolicy(alive, 0.05)
        self.state = StateStore(
            self.database,
            registry,
            self.board,
            self.health,
            None,
            acknowledgements,
            lambda before, after: self.on_change(before, after),
        )
        self.state.publish()
        self.owner = self.create_service()
        self.open_port(None)

    def on_change(self, before: Registry, after: Registry) -> None:
        """Do what the service's reconcile loop does with a change."""

    def open_port(self, access: AccessTable | None) -> None:
        app = self._management(access=access)
        app.loop = self.loop
        for method in OPERATIONS & set(vars(type(self.owner))):
            setattr(app.control_api, method, getattr(self.owner, method))
        self._app = app

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(work)

    def close(self) -> None:
        self.run(self.measured.close())
        self.database.close()

    def ask(self, method: str, path: str, document: Any = None, **more: Any) -> tuple[int, Any]:
        """Return the status and the document of a response, which fits its description in OpenAPI."""
        if not isinstance(document, bytes):
            document = b"" if document is None else json.dumps(document).encode()
        response = self._app(method, path, document, **more)
        assert_described(method, path, response)
        return response.status, json.loads(response.body) if response.body else None
