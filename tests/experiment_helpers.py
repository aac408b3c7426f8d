"""The experiments' services over a real database, behind the management API."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from openapi_checks import assert_described

from serve_app.control import registry_changes
from serve_app.control.api import ControlAPI
from serve_app.control.experiments.service import ExperimentService
from serve_app.control.metric_store import MetricStore
from serve_app.control.persistence.database import Database
from serve_app.control.registry import Registry
from serve_app.control.replica_health import HealthTracker
from serve_app.control.state import AcknowledgementPolicy, StateStore
from serve_app.control.table_publisher import TablePublisher
from serve_app.dataplane import version_router
from serve_app.dataplane.experiment_collector import ExperimentCollector
from serve_app.domain.access import AccessTable
from serve_app.domain.model import ModelSpec
from serve_app.domain.request import InferenceRequest, InferenceResponse
from serve_app.telemetry.metrics import MetricsAggregator

QUESTIONS = {name for name in vars(ControlAPI) if not name.startswith("_")}


MODELS = (("m", "1.0"), ("m", "2.0"), ("m", "3.0"), ("team-a", "1.0"))


DOCUMENT = {
    "name": "new ranking",
    "arms": {"a": {"version": "1.0", "weight": 5000}, "b": {"version": "2.0", "weight": 5000}},
    "metrics": [
        {"name": "clicks", "kind": "reward"},
        {"name": "basket", "kind": "reward", "per": "event"},
        {"name": "seconds", "kind": "latency"},
        {"name": "failures", "kind": "error_rate"},
        {"name": "score", "kind": "output", "path": "$.score"},
    ],
    "baseline": "a",
    "key": {"header": "X-User"},
}


ONE_REWARD = {**DOCUMENT, "metrics": DOCUMENT["metrics"][:1]}


BY_CALL = {key: value for key, value in ONE_REWARD.items() if key != "key"}


class Cluster:
    """The services behind the API, and requests as the data plane assigns and counts them."""

    def __init__(self, folder: Path, management: Callable[..., Any]) -> None:
        self._folder = folder
        self._management = management
        self.loop = asyncio.new_event_loop()
        self.experiment_collector = ExperimentCollector()
        self._number = self._lot = 0
        self.open(models=True)

    def open(self, models: bool = False) -> None:
        """As a Management that begins; what another one kept is there."""
        self.database = Database(f"sqlite:///{self._folder / 'registry.db'}")
        registry = self.database.load()
        if models:
            before, registry = registry, Registry()
            for name, version in MODELS:
                spec = ModelSpec(name, version, "m.mar", "d" * 64, "archive", min_workers=1, max_workers=1)
                registry = registry_changes.register(registry, spec)
            self.database.save(before, registry)
        self.measured = MetricStore(self.database, exposure_timeout=1.0)
        self.board = TablePublisher(MetricsAggregator())

        self.alive: set[str] = set()

        async def alive() -> set[str]:
            return self.alive

        self.state = StateStore(
            self.database,
            registry,
            self.board,
            HealthTracker(),
            None,
            AcknowledgementPolicy(alive, 0.05),
            lambda: None,
        )
        self.state.publish()
        self.owner = ExperimentService(self.state, self.measured)
        self.open_port(None)

    def open_port(self, access: AccessTable | None) -> None:
        app = self._management(access=access)
        app.loop = self.loop
        for question in QUESTIONS & set(vars(ExperimentService)):
            setattr(app.control_api, question, getattr(self.owner, question))
        self._app = app

    def close(self) -> None:
        self.loop.run_until_complete(self.measured.close())
        self.database.close()

    def ask(self, method: str, path: str, document: Any = None, **more: Any) -> tuple[int, Any]:
        body = (
            b""
            if document is None
            else document
            if isinstance(document, bytes)
            else json.dumps(document).encode()
        )
        response = self._app(method, path, body, **more)
        assert_described(method, path, response)
        return response.status, json.loads(response.body) if response.body else None

    def begin(self, document: Any = DOCUMENT, model: str = "m") -> str:
        status, result = self.ask("POST", f"/models/{model}/experiments", document)
        assert status == 200, result
        return result["id"]

    def known(self, id: str) -> Any:
        status, result = self.ask("GET", f"/experiments/{id}")
        assert status == 200, result
        return result

    def call(
        self, request_id: str, user: str = "", body: bytes = b'{"score": 0.5}', fails: bool = False
    ) -> str:
        """Return the version that a request to model m gets."""
        call = InferenceRequest("m", headers={"x-user": user} if user else {}, request_id=request_id)
        self._lot = version_router.next_bucket_cursor(self._lot)
        choice = version_router.select_version(self.board.table, call, self._lot)
        if choice.active_split is not None:
            if fails:
                self.experiment_collector.record_failure(choice, request_id, "handler_failed")
            else:
                seconds = 0.010 if choice.arm == "a" else 0.012
                self.experiment_collector.record_response(
                    choice, request_id, InferenceResponse(body), seconds
                )
        return choice.route.version

    def tell(self) -> None:
        """Send the counts of this process to Management."""
        if (seen := self.experiment_collector.drain()) is not None:
            self._number += 1
            self.loop.run_until_complete(self.measured.record("gateway", self._number, seen))


def assert_refused(response: tuple[int, Any], code: int, type: str, *words: str) -> None:
    status, result = response
    assert (status, result["code"], result["type"]) == (code, code, type), result
    for word in words:
        assert word in result["message"], result["message"]
