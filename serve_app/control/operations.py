"""The operations of the control plane, which its services implement and every process calls."""

# The operations have no bodies: ``_invoke_by_name`` replaces them.
# mypy: disable-error-code="empty-body"

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal

from serve_app.domain.access import KeyGrant
from serve_app.domain.access_keys import KeyDocument, KeyRequest, NewKeyDocument, RotationRequest
from serve_app.domain.adapter import AdapterDocument, AdapterRequest
from serve_app.domain.async_prediction import AsyncPredictionDocument, StoredRequest, StoredResponse
from serve_app.domain.audit import AuditDocument, AuditQuery
from serve_app.domain.autoscaling import ReplicaCount
from serve_app.domain.capture import DriftDocument
from serve_app.domain.experiment import (
    Experiment,
    ExperimentDocument,
    ExperimentHistory,
    ExperimentSummary,
    Reward,
    RewardCounts,
)
from serve_app.domain.model import (
    EventQuery,
    ModelEvent,
    ModelRef,
    Registration,
    ScalingProgress,
    VersionDescription,
    VersionStats,
)
from serve_app.domain.rollout import RolloutDocument, RolloutPlan
from serve_app.domain.traffic_policy import ShadowDocument, ShadowHistory, TrafficDocument, TrafficPolicy
from serve_app.domain.workflow_graph import WorkflowDocument, WorkflowGraph

RolloutAction = Literal["pause", "resume", "abort"]


def _invoke_by_name(cls: type[ControlAPI]) -> type[ControlAPI]:
    """Replace each operation by a call of ``_invoke``."""
    for name, operation in list(vars(cls).items()):
        if inspect.iscoroutinefunction(operation) and not name.startswith("_"):
            setattr(cls, name, _create_operation(operation))
    return cls


def _create_operation(declared: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    @functools.wraps(declared)
    async def operation(self: ControlAPI, *args: Any, **kwargs: Any) -> Any:
        return await self._invoke(declared.__name__, args, kwargs)

    return operation


@_invoke_by_name
class ControlAPI:
    """The operations of the only writer; a subclass carries them out, or sends them to that process.

    A service of the control plane implements each operation, see deployments/management.py.
    """

    async def _invoke(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Carry out the operation ``name``. Raises the errors of its service."""
        raise NotImplementedError

    async def register(self, registration: Registration) -> ScalingProgress: ...

    async def scale(
        self,
        model: str,
        version: str | None,
        min_workers: int | None,
        max_workers: int | None,
        wait: bool,
        autoscaling: Mapping[str, Any] | None = None,
    ) -> ScalingProgress: ...

    async def set_replicas(self, model: str, version: str | None, replicas: int) -> ReplicaCount:
        """Set the number of replicas of a version whose autoscaling policy is ``external``.

        The nearest number within its bounds is set. Raises ModelNotFound, VersionNotFound and Conflict.
        """

    async def set_default(self, model: str, version: str) -> ModelRef:
        """Make ``version`` the one that requests without a version get once this returns."""

    async def unregister(self, model: str, version: str | None) -> ModelRef: ...

    async def describe(self, model: str, version: str | None) -> VersionDescription: ...

    async def get_metadata(self, model: str, version: str | None) -> Any: ...

    async def list_versions(self, model: str) -> list[str]: ...

    async def list_models(self) -> list[tuple[str, str]]: ...

    async def get_version_stats(self) -> list[VersionStats]: ...

    async def render(self, names: frozenset[str] | None = None) -> bytes:
        """Return the metrics page of the whole cluster; with ``names``, only the samples of these names."""

    async def renew_key(self, kind: Literal["inference", "management"]) -> None:
        """Replace one of TorchServe's keys; the old key is refused once this returns."""

    async def poll_events(
        self, model: str, registration: str | None, since: int | None, timeout: float
    ) -> list[ModelEvent]:
        """Return a model's events after the one with id ``since``, as soon as there is one.

        The list is empty after ``timeout`` seconds without an event. Without ``since``, the events are those
        of the model's last registration or scaling; with ``registration``, those of that registration alone,
        which may not have started yet. Raises ModelNotFound.
        """

    async def list_events(self, query: EventQuery, allowed_models: tuple[str, ...]) -> list[ModelEvent]:
        """Return the events of all models that match, the newest first."""

    async def get_traffic(self, model: str) -> TrafficDocument:
        """Return a model's policy, and the split that is active in its place. Raises ModelNotFound."""

    async def set_traffic(self, model: str, policy: TrafficPolicy) -> TrafficDocument: ...

    async def get_shadow(self, model: str) -> ShadowDocument:
        """Return how a shadow's responses agree with the live ones. Raises ModelNotFound and NotFound."""

    async def get_shadow_history(self, model: str) -> ShadowHistory:
        """Return the agreement of a shadow over time. Raises as ``get_shadow`` does, and Unavailable."""

    async def reset_shadow(self, model: str) -> None:
        """Delete a model's shadow statistics and the inputs stored with them. Raises ModelNotFound."""

    async def get_drift(self, model: str, version: str | None) -> DriftDocument:
        """Return the drift of a version, or of all with ``capture``. Raises ModelNotFound and NotFound."""

    async def reset_drift(self, model: str, version: str) -> DriftDocument:
        """Make the current window of a version its reference. Raises as ``get_drift``, and Conflict."""

    async def add_adapter(self, model: str, version: str | None, request: AdapterRequest) -> AdapterDocument:
        """Load a LoRA adapter in every replica of a version (None: the default one).

        Nothing is stored where it cannot be loaded. Raises ModelNotFound, VersionNotFound, AdapterExists,
        AdapterRejected, NoReplica, and whatever fetching an archive raises.
        """

    async def list_adapters(self, model: str, version: str | None) -> list[AdapterDocument]:
        """Return the adapters of a version by name. Raises ModelNotFound and VersionNotFound."""

    async def remove_adapter(self, model: str, version: str | None, name: str) -> None:
        """Unload an adapter; requests for it that are under way finish.

        Raises ModelNotFound, VersionNotFound, AdapterNotFound, and Conflict for one of the archive.
        """

    async def start_experiment(self, experiment: Experiment) -> ExperimentDocument: ...

    async def list_experiments(self, model: str | None) -> list[ExperimentSummary]: ...

    async def get_experiment(self, id: str, allowed_models: tuple[str, ...]) -> ExperimentDocument:
        """Return an experiment and its results so far. Raises ExperimentNotFound and ModelNotAllowed."""

    async def get_experiment_history(self, id: str, allowed_models: tuple[str, ...]) -> ExperimentHistory:
        """Return the results of an experiment over time. Raises as ``get_experiment``, and Unavailable."""

    async def stop_experiment(self, id: str, allowed_models: tuple[str, ...]) -> ExperimentDocument:
        """Put the model's policy back in force; the measurements are kept.

        Raises as ``get_experiment`` does.
        """

    async def delete_experiment(self, id: str, allowed_models: tuple[str, ...]) -> None:
        """Delete a stopped experiment with its measurements.

        Raises as ``get_experiment`` does, and Conflict.
        """

    async def record_rewards(
        self, id: str, rewards: list[Reward], allowed_models: tuple[str, ...]
    ) -> RewardCounts: ...

    async def register_workflow(
        self, registration: Registration, graph: WorkflowGraph | None
    ) -> ModelRef: ...

    async def list_workflows(self) -> list[tuple[str, str]]: ...

    async def get_workflow(self, name: str) -> list[WorkflowDocument]:
        """Return every version of a workflow, the default one first. Raises WorkflowNotFound."""

    async def unregister_workflow(self, name: str, version: str | None) -> None: ...

    async def start_rollout(self, model: str, plan: RolloutPlan) -> RolloutDocument: ...

    async def get_rollout(self, model: str) -> RolloutDocument:
        """Return a model's last rollout, with its decisions. Raises ModelNotFound and NotFound."""

    async def update_rollout(self, model: str, action: RolloutAction) -> RolloutDocument:
        """Pause, resume or abort a model's rollout.

        Raises as ``get_rollout`` does, and Conflict where it has ended.
        """

    async def submit_prediction(self, request: StoredRequest) -> AsyncPredictionDocument:
        """Store a request that is answered later; return the prediction's status.

        Raises AsyncQueueFull, KeyShareExceeded, IdempotencyKeyReused, BadRequest.
        """

    async def get_prediction(self, id: str, grant: KeyGrant | None) -> AsyncPredictionDocument:
        """Return a prediction's status to the key that created it, or to one that may manage its model.

        Raises PredictionNotFound and ModelNotAllowed.
        """

    async def get_prediction_result(
        self, id: str, grant: KeyGrant | None
    ) -> tuple[AsyncPredictionDocument, StoredResponse | None]:
        """Return a prediction's status, and its response once it has one.

        Raises as ``get_prediction`` does, and PredictionCancelled.
        """

    async def list_predictions(
        self, grant: KeyGrant | None, limit: int, model: str, state: str
    ) -> list[AsyncPredictionDocument]:
        """Return the predictions that a key may see, the newest first; empty texts match all."""

    async def cancel_prediction(self, id: str, grant: KeyGrant | None) -> AsyncPredictionDocument | None:
        """Cancel a prediction, or delete it (None) where it has ended. Raises as ``get_prediction`` does."""

    async def create_key(self, request: KeyRequest, caller: KeyGrant | None) -> NewKeyDocument: ...

    async def list_keys(self, caller: KeyGrant | None) -> list[KeyDocument]:
        """Return all keys by name. Raises Conflict where no key is required, and ModelNotAllowed."""

    async def rotate_key(
        self, name: str, request: RotationRequest, caller: KeyGrant | None
    ) -> NewKeyDocument: ...

    async def revoke_key(self, name: str, caller: KeyGrant | None) -> None:
        """Revoke a key; it is refused once this returns. Raises as ``list_keys`` does, and KeyNotFound."""

    async def list_audit_records(
        self, query: AuditQuery, allowed_models: tuple[str, ...]
    ) -> list[AuditDocument]:
        """Return records of the audit log, the newest first. Raises Unavailable."""

    async def record_refusal(self, action: str, subject: str, reason: str) -> None:
        """Record an attempt of a change that a protocol refused."""


OPERATIONS = frozenset(name for name in vars(ControlAPI) if not name.startswith("_"))
