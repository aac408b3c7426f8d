"""The RPC between gateways and Management: every operation, and errors as values."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import pytest

from serve_app.control.access.service import KeyService
from serve_app.control.adapters import AdapterService
from serve_app.control.async_predictions.service import AsyncPredictionService
from serve_app.control.audit import AuditTrail
from serve_app.control.cluster_metrics import ClusterMetrics
from serve_app.control.drift.service import DriftService
from serve_app.control.experiments.service import ExperimentService
from serve_app.control.models import ModelService
from serve_app.control.operations import OPERATIONS, ControlAPI
from serve_app.control.rollouts.service import RolloutService
from serve_app.control.scaling import ReplicaScaler
from serve_app.control.shadow.service import ShadowService
from serve_app.control.traffic import TrafficService
from serve_app.control.workflows.service import WorkflowService
from serve_app.deployments.transport.control_rpc import ControlClient, ControlDispatcher
from serve_app.domain.audit import Actor
from serve_app.errors import ModelNotFound
from serve_app.telemetry.audit_log import get_actor, set_actor

SERVICES = (
    AuditTrail,
    AsyncPredictionService,
    AdapterService,
    ReplicaScaler,
    DriftService,
    ExperimentService,
    ClusterMetrics,
    KeyService,
    ModelService,
    RolloutService,
    ShadowService,
    TrafficService,
    WorkflowService,
)


@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_one_service_takes_as_many_parameters_as_the_operation(name: str) -> None:
    [method] = [vars(service)[name] for service in SERVICES if hasattr(service, name)]
    assert inspect.iscoroutinefunction(method)
    implemented = list(inspect.signature(method).parameters.values())
    declared = list(inspect.signature(getattr(ControlAPI, name)).parameters.values())
    assert [p.default for p in implemented] == [p.default for p in declared]


class Models:
    async def describe(self, model: str, version: str | None = None) -> str:
        if model != "m":
            raise ModelNotFound(model)
        return f"{model} {version} for {get_actor().name}"

    async def close(self) -> None: ...


class Management:
    """A handle of Management whose calls are answered in this process."""

    def __init__(self, dispatcher: ControlDispatcher) -> None:
        self.call_control = self
        self._dispatcher = dispatcher

    async def remote(self, name: str, args: Any, kwargs: Any, actor: Actor) -> Any:
        return await asyncio.create_task(self._dispatcher.dispatch(name, args, kwargs, actor))


def test_results_come_back_and_errors_are_raised_in_the_client() -> None:
    async def main() -> None:
        dispatcher = ControlDispatcher(Models())
        client = ControlClient(Management(dispatcher))
        assert await dispatcher.describe("m", "2") == "m 2 for anonymous"
        set_actor(Actor("ops"))
        assert await client.describe("m", version="1") == "m 1 for ops"
        with pytest.raises(ModelNotFound):
            await client.describe("n", None)
        with pytest.raises(KeyError):  # a public method of a service, and no operation
            await dispatcher.dispatch("close", (), {}, Actor())

    asyncio.run(main())
