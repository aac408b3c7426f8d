"""Operations of the control plane: arguments are validated here, then sent to the process that may write.

Every management protocol uses the same class. It depends on neither a protocol nor Ray: the backend, which
stores the registry and makes the cluster agree with it, is passed to the constructor.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal, Protocol

from serve_app.domain import adapter as adapters
from serve_app.domain import api_key as api_keys
from serve_app.domain import experiment as experiments
from serve_app.domain import limits
from serve_app.domain import rollout as rollouts
from serve_app.domain import traffic_policy as policies
from serve_app.domain import workflow_graph as graphs
from serve_app.domain.access import AccessTable, KeyGrant, matches
from serve_app.domain.adapter import AdapterDocument, AdapterRequest
from serve_app.domain.api_key import KeyDocument, KeyRequest, NewKeyDocument, RotationRequest
from serve_app.domain.async_prediction import AsyncPredictionDocument, StoredRequest, StoredResponse
from serve_app.domain.audit import AuditDocument, AuditQuery
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
from serve_app.errors import BadRequest, InvalidWorkflow, MethodNotAllowed, MissingParameter, RelayError
from serve_app.settings import Settings

log = logging.getLogger(__name__)

RolloutAction = Literal["pause", "resume", "abort"]


class ControlAPI(Protocol):
    """The operations of the only writer, see deployments/management.py."""

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

    async def set_default(self, model: str, version: str) -> ModelRef:
        """Make ``version`` the one that requests without a version get once this returns."""

    async def unregister(self, model: str, version: str | None) -> ModelRef: ...

    async def describe(self, model: str, version: str | None) -> VersionDescription: ...

    async def get_metadata(self, model: str, version: str | None) -> Any: ...

    async def list_versions(self, model: str) -> list[str]: ...

    async def list_models(self) -> list[tuple[str, str]]: ...

    async def get_version_stats(self) -> list[VersionStats]: ...

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


class ControlPlane:
    """The validated operations; ``api`` has those whose arguments need no validation.

    Every method raises RelayError. A change that returns without one is stored and in force.
    ``allowed_models`` are patterns: a method returns or changes only models whose name matches one of them.
    """

    def __init__(
        self,
        api: ControlAPI,
        settings: Settings,
        access: Callable[[], AccessTable | None] = lambda: None,
    ) -> None:
        self.api = api
        self._settings = settings
        self._access = access

    @property
    def access(self) -> AccessTable | None:
        """The rights of every key; None where no key is required."""
        return self._access()

    async def register(self, registration: Registration) -> ScalingProgress:
        """Fetch, check and store an archive; start its workers. The first version becomes the default."""
        if not self._settings.control.enable_model_api:
            raise MethodNotAllowed()
        if not registration.url:
            raise MissingParameter("url")
        self._check_limits(registration, "the registration")
        return await self.api.register(registration)

    async def scale(
        self,
        model: str,
        version: str | None,
        min_workers: int | None,
        max_workers: int | None,
        wait: bool,
        autoscaling: Mapping[str, Any] | None = None,
    ) -> ScalingProgress:
        """Request ``min_workers`` to ``max_workers`` replicas of a version (None: the default one).

        Between two different bounds their number follows the load, as ``autoscaling`` configures (see
        domain/autoscaling.py). With ``min_workers`` None the bounds stay as they are.
        """
        max_workers = min_workers if max_workers is None else max_workers
        if min_workers is not None and max_workers is not None:
            if min_workers < 0 or max_workers < 0:
                raise BadRequest("min_worker and max_worker cannot be negative.")
            if max_workers < min_workers:
                raise BadRequest("max_worker cannot be less than min_worker.")
        return await self.api.scale(
            model, version, min_workers, max_workers, wait, *([autoscaling] if autoscaling else [])
        )

    async def unregister(self, model: str, version: str | None) -> ModelRef:
        """Remove a version (None: the default one, which must be the last); its replicas drain."""
        if not self._settings.control.enable_model_api:
            raise MethodNotAllowed()
        return await self.api.unregister(model, version)

    async def describe(
        self, model: str, version: str | None = None, every: bool = False, customized: bool = False
    ) -> list[VersionDescription]:
        """Return one version (None: the default one), or with ``every`` all versions of a model.

        ``customized`` adds the metadata that the version's handler returns. Raises NoReplica where no
        replica can return it.
        """
        if not every:
            description = await self.api.describe(model, version)
            if customized:
                description = replace(description, metadata=await self.api.get_metadata(model, version))
            return [description]
        return [await self.api.describe(model, v) for v in await self.api.list_versions(model)]

    async def list_models(
        self, start: int = 0, limit: int = 100, allowed_models: tuple[str, ...] = ("*",)
    ) -> tuple[list[tuple[str, str]], int | None]:
        """Return a page of (model name, URL of its default version) by name, and the next page's start."""
        rows = [row for row in await self.api.list_models() if matches(row[0], allowed_models)]
        end = start + limit
        return rows[start:end], end if end <= len(rows) else None

    async def add_adapter(self, model: str, version: str | None, document: Any) -> AdapterDocument:
        """Load the LoRA adapter that ``document`` describes in every replica of a version."""
        if not self._settings.control.enable_model_api:
            raise MethodNotAllowed()
        return await self.api.add_adapter(model, version, adapters.read(document))

    async def remove_adapter(self, model: str, version: str | None, name: str) -> None:
        """Unload an adapter from every replica of a version."""
        if not self._settings.control.enable_model_api:
            raise MethodNotAllowed()
        await self.api.remove_adapter(model, version, name)

    async def register_workflow(self, registration: Registration, document: Any = None) -> ModelRef:
        """Store a workflow, from a .war or from a document (see domain/workflow_graph.py), and start it.

        Either everything that the workflow brings is started, or nothing is registered. Raises
        WorkflowExists, WorkflowNotFound, InvalidWorkflow, WorkflowFailed and ModelNotAllowed, and whatever
        ``register`` raises.
        """
        if not self._settings.control.enable_model_api:
            raise MethodNotAllowed()
        if document is None:
            if not registration.url:
                raise MissingParameter("url")
            self._check_limits(registration, "the registration")
            return await self.api.register_workflow(registration, None)
        graph = graphs.read(document)
        self._check_limits(graph, "the workflow")
        name = registration.model_name or graph.name
        if not name:
            raise InvalidWorkflow("the workflow", "name: it has none; say how calls are to name it")
        return await self.api.register_workflow(registration, graphs.with_name(graph, name))

    async def list_workflows(
        self, start: int = 0, limit: int = 100, allowed_models: tuple[str, ...] = ("*",)
    ) -> tuple[list[tuple[str, str]], int | None]:
        """Return a page of (name, URL of its default version) of workflows, as ``list_models`` does."""
        rows = [row for row in await self.api.list_workflows() if matches(row[0], allowed_models)]
        end = start + limit
        return rows[start:end], end if end <= len(rows) else None

    async def unregister_workflow(self, name: str, version: str | None = None) -> None:
        """Remove a workflow with the models that it brought (``version``: that version).

        Requests in progress are completed. Raises WorkflowNotFound, VersionNotFound, and Conflict where
        another workflow calls it.
        """
        if not self._settings.control.enable_model_api:
            raise MethodNotAllowed()
        await self.api.unregister_workflow(name, version)

    async def get_version_stats(self, allowed_models: tuple[str, ...] = ("*",)) -> list[VersionStats]:
        """Return the request counts of each version, by model name."""
        return [stats for stats in await self.api.get_version_stats() if matches(stats.model, allowed_models)]

    async def record_refusal(self, action: str, subject: str, reason: str) -> None:
        """Record an attempt of a change that a protocol refused; a failure is logged only."""
        try:
            await self.api.record_refusal(action, subject, reason)
        except RelayError as error:
            log.warning("a refused %s of %s is not in the audit log: %s", action, subject, error)

    # Traffic. Documents arrive as parsed JSON and are validated here; BadRequest names the key and the cure.

    async def set_traffic(self, model: str, document: Any) -> TrafficDocument:
        """Split the model's traffic as ``document`` specifies once this returns.

        Raises ModelNotFound, VersionNotFound, and Conflict while an experiment or a rollout splits it.
        """
        policy = policies.read(document)
        self._check_limits(policy, "Traffic policy")
        return await self.api.set_traffic(model, policy)

    async def reset_traffic(self, model: str) -> TrafficDocument:
        """Send every request to the default version again. Raises as ``set_traffic`` does."""
        return await self.api.set_traffic(model, TrafficPolicy())

    async def start_experiment(self, model: str, document: Any) -> ExperimentDocument:
        """Split a model's traffic among the arms of an experiment; return it with its id.

        Raises ModelNotFound, VersionNotFound, and Conflict while another experiment or a rollout is active.
        """
        return await self.api.start_experiment(replace(experiments.read(document), model=model))

    async def list_experiments(
        self, model: str | None = None, allowed_models: tuple[str, ...] = ("*",)
    ) -> list[ExperimentSummary]:
        """Return the experiments of a model (None: of all models), the newest first.

        Raises ModelNotFound.
        """
        found = await self.api.list_experiments(model)
        return [document for document in found if matches(document["model"], allowed_models)]

    async def record_rewards(
        self, id: str, document: Any, allowed_models: tuple[str, ...] = ("*",)
    ) -> RewardCounts:
        """Count rewards, each once however often it is sent; all of them, or none where one is invalid.

        Raises as ``get_experiment`` does, and ExposureNotFound.
        """
        return await self.api.record_rewards(id, experiments.read_rewards(document), allowed_models)

    async def create_key(self, document: Any, caller: KeyGrant | None) -> NewKeyDocument:
        """Create a key, with at most the rights and limits of ``caller``, which may manage every model.

        Raises Conflict, Forbidden and ModelNotAllowed.
        """
        return await self.api.create_key(api_keys.read(document), caller)

    async def rotate_key(self, name: str, document: Any, caller: KeyGrant | None) -> NewKeyDocument:
        """Replace a key; the old one is valid until the grace ends.

        Raises as ``create_key`` does, and KeyNotFound.
        """
        return await self.api.rotate_key(name, api_keys.read_rotation(document), caller)

    async def start_rollout(self, model: str, document: Any) -> RolloutDocument:
        """Move a model's traffic to a version step by step.

        Raises ModelNotFound, VersionNotFound and Conflict.
        """
        plan = rollouts.read(document)
        self._check_limits(plan, "Rollout")
        return await self.api.start_rollout(model, plan)

    def _check_limits(self, values: Any, place: str) -> None:
        """Raise LimitExceeded for a number of the request that is beyond its limit."""
        limits.check(values, self._settings.limits, place)
