"""Operations of the control plane: arguments are validated here, then sent to the process that may write.

Every management protocol uses the same class. It depends on neither a protocol nor Ray: the backend, which
stores the registry and makes the cluster agree with it, is passed to the constructor.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from serve_app.control.operations import ControlAPI
from serve_app.domain import access_keys as api_keys
from serve_app.domain import adapter as adapters
from serve_app.domain import autoscaling as autoscaling_policy
from serve_app.domain import experiment as experiments
from serve_app.domain import limits
from serve_app.domain import rollout as rollouts
from serve_app.domain import traffic_policy as policies
from serve_app.domain import workflow_graph as graphs
from serve_app.domain.access import AccessTable, KeyGrant, matches
from serve_app.domain.access_keys import NewKeyDocument
from serve_app.domain.adapter import AdapterDocument
from serve_app.domain.autoscaling import ReplicaCount
from serve_app.domain.experiment import (
    ExperimentDocument,
    ExperimentSummary,
    RewardCounts,
)
from serve_app.domain.model import (
    ModelRef,
    Registration,
    ScalingProgress,
    VersionDescription,
    VersionStats,
)
from serve_app.domain.rollout import RolloutDocument
from serve_app.domain.traffic_policy import TrafficDocument, TrafficPolicy
from serve_app.errors import BadRequest, InvalidWorkflow, MethodNotAllowed, MissingParameter, RelayError
from serve_app.settings import Settings

log = logging.getLogger(__name__)


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

    async def set_replicas(self, model: str, version: str | None, document: Any) -> ReplicaCount:
        """Set the number of replicas that ``document`` has, where an external program scales a version."""
        return await self.api.set_replicas(model, version, autoscaling_policy.read_replicas(document))

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
