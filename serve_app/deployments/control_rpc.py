"""The control-plane RPC: the methods of ``ControlAPI`` in Management, and the same behind a Serve handle.

``METHODS`` is the table of all methods that a process may call in Management, each with the service that
implements it. A test compares it with the protocol.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import ray.exceptions
from ray.serve.exceptions import RayServeException

from serve_app.control.api import ControlAPI
from serve_app.control.async_predictions.service import AsyncPredictionService
from serve_app.control.experiments.service import ExperimentService
from serve_app.control.models import ModelService
from serve_app.control.rollouts.service import RolloutService
from serve_app.control.shadow.service import ShadowService
from serve_app.control.traffic import TrafficService
from serve_app.control.workflows.service import WorkflowService
from serve_app.deployments.metrics_reporter import MetricsReporter
from serve_app.errors import RelayError, Unavailable

Method = Callable[..., Awaitable[Any]]

_SERVICE_METHODS: Mapping[type, Sequence[Method]] = {
    ModelService: (
        ModelService.register,
        ModelService.scale,
        ModelService.set_default,
        ModelService.unregister,
        ModelService.describe,
        ModelService.get_metadata,
        ModelService.list_versions,
        ModelService.list_models,
        ModelService.renew_key,
        ModelService.poll_events,
    ),
    MetricsReporter: (MetricsReporter.get_version_stats, MetricsReporter.render),
    TrafficService: (TrafficService.get_traffic, TrafficService.set_traffic),
    ShadowService: (ShadowService.get_shadow, ShadowService.reset_shadow),
    ExperimentService: (
        ExperimentService.start_experiment,
        ExperimentService.list_experiments,
        ExperimentService.get_experiment,
        ExperimentService.stop_experiment,
        ExperimentService.delete_experiment,
        ExperimentService.record_rewards,
    ),
    WorkflowService: (
        WorkflowService.register_workflow,
        WorkflowService.list_workflows,
        WorkflowService.get_workflow,
        WorkflowService.unregister_workflow,
    ),
    RolloutService: (RolloutService.start_rollout, RolloutService.get_rollout, RolloutService.update_rollout),
    AsyncPredictionService: (
        AsyncPredictionService.submit_prediction,
        AsyncPredictionService.get_prediction,
        AsyncPredictionService.get_prediction_result,
        AsyncPredictionService.cancel_prediction,
    ),
}
METHODS: Mapping[str, tuple[type, Method]] = {
    method.__name__: (service, method) for service, methods in _SERVICE_METHODS.items() for method in methods
}


class ControlDispatcher:
    """The server's end of the RPC: calls each method in the service that implements it."""

    def __init__(self, *services: object) -> None:
        instances = {type(service): service for service in services}
        self._methods = {
            name: partial(method, instances[service]) for name, (service, method) in METHODS.items()
        }
        self.api = cast(ControlAPI, SimpleNamespace(**self._methods))

    async def call(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the method's result, or its RelayError as a value: raised, Ray would log it as a fault.

        Raises AttributeError for a name that is not in ``METHODS``.
        """
        if name not in self._methods:
            raise AttributeError(name)
        try:
            return await self._methods[name](*args, **kwargs)
        except RelayError as error:
            return error


class ControlClient:
    """The client's end of the RPC; ``management`` is Management's handle."""

    def __init__(self, management: Any) -> None:
        self._management = management
        self.api = cast(ControlAPI, SimpleNamespace(**{name: partial(self._call, name) for name in METHODS}))

    async def render(self, names: frozenset[str] | None = None) -> bytes:
        """Return the metrics page of the whole cluster; with ``names``, only the samples of these names."""
        page: bytes = await self._call("render", names)
        return page

    async def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        try:
            result = await self._management.call_control.remote(name, args, kwargs)
        except ray.exceptions.RayTaskError:
            raise
        except (ray.exceptions.RayError, RayServeException):
            raise Unavailable("Management is being replaced; ask again.") from None
        if isinstance(result, RelayError):
            raise result
        return result
