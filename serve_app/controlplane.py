"""What may be asked of the models: checked here, then sent to the one that keeps them.

The same class behind every management door. It knows no protocol and no Ray: the keeper, which
stores the registry and makes the cluster agree with it, comes in through the constructor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal, Protocol

from serve_app import experiment as experiments
from serve_app import graph as graphs
from serve_app import policy as policies
from serve_app import rollout as rollouts
from serve_app.deferral import Answer, Request
from serve_app.errors import BadRequest, InvalidWorkflow, MethodNotAllowed, MissingParameter
from serve_app.experiment import Experiment, Reward
from serve_app.graph import Graph
from serve_app.policy import Policy
from serve_app.rollout import Plan
from serve_app.settings import Settings
from serve_app.types import Access, Description, Event, Figures, ModelRef, Progress, Registration, matches

Said = dict[str, Any]  # what a door writes as JSON, as it stands
Verb = Literal["pause", "resume", "abort"]


class Keeper(Protocol):
    """The one writer: see deployments/management.py."""

    async def register(self, registration: Registration) -> Progress: ...

    async def scale(
        self,
        model: str,
        version: str | None,
        low: int | None,
        high: int | None,
        wait: bool,
        scaling: Mapping[str, Any] | None = None,
    ) -> Progress: ...

    async def set_default(self, model: str, version: str) -> ModelRef: ...

    async def unregister(self, model: str, version: str | None) -> ModelRef: ...

    async def describe(self, model: str, version: str | None) -> Description: ...

    async def metadata(self, model: str, version: str | None) -> Any: ...

    async def versions(self, model: str) -> list[str]: ...

    async def models(self) -> list[tuple[str, str]]: ...

    async def figures(self) -> list[Figures]: ...

    async def renew_key(self, kind: Literal["inference", "management"]) -> None: ...

    async def events(
        self, model: str, registration: str | None, since: int | None, patience: float
    ) -> list[Event]: ...

    async def traffic(self, model: str) -> Said: ...

    async def set_traffic(self, model: str, policy: Policy) -> Said: ...

    async def shadow(self, model: str) -> Said: ...

    async def forget_shadow(self, model: str) -> None: ...

    async def begin_experiment(self, experiment: Experiment) -> Said: ...

    async def experiments(self, model: str | None) -> list[Said]: ...

    async def experiment(self, id: str, within: tuple[str, ...]) -> Said: ...

    async def stop_experiment(self, id: str, within: tuple[str, ...]) -> Said: ...

    async def forget_experiment(self, id: str, within: tuple[str, ...]) -> None: ...

    async def reward(self, id: str, rewards: list[Reward], within: tuple[str, ...]) -> Said: ...

    async def register_workflow(self, registration: Registration, graph: Graph | None) -> ModelRef: ...

    async def workflows(self) -> list[tuple[str, str]]: ...

    async def workflow(self, name: str) -> list[Said]: ...

    async def unregister_workflow(self, name: str, version: str | None) -> None: ...

    async def begin_rollout(self, model: str, plan: Plan) -> Said: ...

    async def rollout(self, model: str) -> Said: ...

    async def steer_rollout(self, model: str, verb: Verb) -> Said: ...

    async def defer(self, request: Request) -> Said: ...

    async def deferral(self, id: str, within: tuple[str, ...]) -> Said: ...

    async def deferred_answer(self, id: str, within: tuple[str, ...]) -> tuple[Said, Answer | None]: ...

    async def cancel_deferral(self, id: str, within: tuple[str, ...]) -> Said | None: ...


class ControlPlane:
    """Every method raises RelayError; a change that came back without one is stored and in force."""

    def __init__(
        self, keeper: Keeper, settings: Settings, access: Callable[[], Access | None] = lambda: None
    ) -> None:
        self._keeper = keeper
        self._settings = settings
        self._access = access

    @property
    def access(self) -> Access | None:
        """Who may do what; None where everybody may do everything."""
        return self._access()

    async def renew_key(self, kind: Literal["inference", "management"]) -> None:
        """A new key of TorchServe's kind; from the answer on the old one is refused."""
        await self._keeper.renew_key(kind)

    async def register(self, registration: Registration) -> Progress:
        """Fetch, check and store an archive; start its workers. The first version becomes the default."""
        if not self._settings.control.enable_model_api:
            raise MethodNotAllowed()
        if not registration.url:
            raise MissingParameter("url")
        return await self._keeper.register(registration)

    async def events(
        self, model: str, registration: str | None = None, since: int | None = None, patience: float = 0.0
    ) -> list[Event]:
        """What happened to a model after the event with id ``since``, as soon as there is something; else nothing.

        Without ``since``, of its last registration or change of workers; with ``registration``, of that one
        alone, which may be yet to come. ``patience`` is in seconds. Raises ModelNotFound.
        """
        return await self._keeper.events(model, registration, since, patience)

    async def scale(
        self,
        model: str,
        version: str | None,
        low: int | None,
        high: int | None,
        wait: bool,
        scaling: Mapping[str, Any] | None = None,
    ) -> Progress:
        """Ask for ``low`` to ``high`` replicas of a version (None: the default one).

        Between two different numbers their number follows the load, as ``scaling`` says (see autoscaling.py).
        ``low`` None: the bounds stay as they are.
        """
        high = low if high is None else high
        if low is not None and high is not None:
            if low < 0 or high < 0:
                raise BadRequest("min_worker and max_worker cannot be negative.")
            if high < low:
                raise BadRequest("max_worker cannot be less than min_worker.")
        return await self._keeper.scale(model, version, low, high, wait, *([scaling] if scaling else []))

    async def set_default(self, model: str, version: str) -> ModelRef:
        """From the answer on, calls that name no version get ``version``."""
        return await self._keeper.set_default(model, version)

    async def unregister(self, model: str, version: str | None) -> ModelRef:
        """Remove a version (None: the default one, which must be the last); its replicas drain."""
        if not self._settings.control.enable_model_api:
            raise MethodNotAllowed()
        return await self._keeper.unregister(model, version)

    async def describe(
        self, model: str, version: str | None = None, every: bool = False, customized: bool = False
    ) -> list[Description]:
        """One version (None: the default one), or every version of a model.

        ``customized`` asks the one version's handler, too, for what it says of itself; NoWorker where
        none of its replicas can answer.
        """
        if not every:
            description = await self._keeper.describe(model, version)
            if customized:
                description = replace(description, metadata=await self._keeper.metadata(model, version))
            return [description]
        return [await self._keeper.describe(model, v) for v in await self._keeper.versions(model)]

    async def models(
        self, start: int = 0, limit: int = 100, within: tuple[str, ...] = ("*",)
    ) -> tuple[list[tuple[str, str]], int | None]:
        """A page of (model name, URL of its default version) by name, and where the next page starts.

        Only models whose name matches one of the patterns ``within``.
        """
        everything = [row for row in await self._keeper.models() if matches(row[0], within)]
        end = start + limit
        return everything[start:end], end if end <= len(everything) else None

    async def register_workflow(self, registration: Registration, document: Any = None) -> ModelRef:
        """Store a workflow and start what comes with it: that of a .war, or of a document as graph.py has it.

        All of it or, where something cannot be started, nothing. Raises WorkflowExists, WorkflowNotFound,
        InvalidWorkflow, WorkflowFailed and WrongModel, and what ``register`` raises.
        """
        if not self._settings.control.enable_model_api:
            raise MethodNotAllowed()
        if document is None:
            if not registration.url:
                raise MissingParameter("url")
            return await self._keeper.register_workflow(registration, None)
        graph = graphs.read(document)
        name = registration.model_name or graph.name
        if not name:
            raise InvalidWorkflow("the workflow", "name: it has none; say how calls are to name it")
        return await self._keeper.register_workflow(registration, graphs.with_name(graph, name))

    async def workflows(
        self, start: int = 0, limit: int = 100, within: tuple[str, ...] = ("*",)
    ) -> tuple[list[tuple[str, str]], int | None]:
        """A page of (name, URL of its default version) of workflows, as ``models`` gives one of models."""
        everything = [row for row in await self._keeper.workflows() if matches(row[0], within)]
        end = start + limit
        return everything[start:end], end if end <= len(everything) else None

    async def workflow(self, name: str) -> list[Said]:
        """Every version of a workflow, the default one first. Raises WorkflowNotFound."""
        return await self._keeper.workflow(name)

    async def unregister_workflow(self, name: str, version: str | None = None) -> None:
        """Remove a workflow with what came with it (``version``: that version); calls that had begun end as they would.

        Raises WorkflowNotFound, VersionNotFound, and InUse where another workflow asks it.
        """
        if not self._settings.control.enable_model_api:
            raise MethodNotAllowed()
        await self._keeper.unregister_workflow(name, version)

    async def figures(self, within: tuple[str, ...] = ("*",)) -> list[Figures]:
        """What was counted of each version of the models that match ``within``, by name."""
        return [figures for figures in await self._keeper.figures() if matches(figures.model, within)]

    # Traffic. Documents come in as JSON says them, and are checked here; BadRequest names the key and the cure.

    async def traffic(self, model: str) -> Said:
        """A model's policy, and what is in force in its place. Raises ModelNotFound."""
        return await self._keeper.traffic(model)

    async def set_traffic(self, model: str, document: Any) -> Said:
        """From the answer on, the model's calls are dealt out as ``document`` says. Raises ModelNotFound,
        VersionNotFound, and InUse while an experiment or a rollout deals them out."""
        return await self._keeper.set_traffic(model, policies.read(document))

    async def reset_traffic(self, model: str) -> Said:
        """Every call gets the default version again. Raises as ``set_traffic`` does."""
        return await self._keeper.set_traffic(model, Policy())

    async def shadow(self, model: str) -> Said:
        """How the answers of a model's shadow agree with the live ones. Raises ModelNotFound and NotFound."""
        return await self._keeper.shadow(model)

    async def forget_shadow(self, model: str) -> None:
        """Drop what was compared of a model's shadow, and the inputs that are kept. Raises ModelNotFound."""
        await self._keeper.forget_shadow(model)

    async def begin_experiment(self, model: str, document: Any) -> Said:
        """Deal a model's calls out to the arms of an experiment; the answer has its id.

        Raises ModelNotFound, VersionNotFound, and InUse while another one or a rollout is on.
        """
        return await self._keeper.begin_experiment(replace(experiments.read(document), model=model))

    async def experiments(self, model: str | None = None, within: tuple[str, ...] = ("*",)) -> list[Said]:
        """The experiments of a model (None: of all that match ``within``), the newest first. Raises ModelNotFound."""
        return [said for said in await self._keeper.experiments(model) if matches(said["model"], within)]

    # An experiment is asked for by its id; ``within`` are the models that whoever asks may ask about.

    async def experiment(self, id: str, within: tuple[str, ...] = ("*",)) -> Said:
        """An experiment, and what is known by now. Raises ExperimentNotFound and WrongModel."""
        return await self._keeper.experiment(id, within)

    async def stop_experiment(self, id: str, within: tuple[str, ...] = ("*",)) -> Said:
        """The model's policy deals its calls out again; what was measured stays. Raises as ``experiment`` does."""
        return await self._keeper.stop_experiment(id, within)

    async def forget_experiment(self, id: str, within: tuple[str, ...] = ("*",)) -> None:
        """Drop an experiment that was stopped, with what was measured. Raises as ``experiment`` does, and InUse."""
        await self._keeper.forget_experiment(id, within)

    async def reward(self, id: str, document: Any, within: tuple[str, ...] = ("*",)) -> Said:
        """Count rewards, each once however often it is posted; all of them, or none where one is wrong.

        Raises as ``experiment`` does, and UnknownUnit.
        """
        return await self._keeper.reward(id, experiments.read_rewards(document), within)

    async def begin_rollout(self, model: str, document: Any) -> Said:
        """Let a version take over a model's calls step by step. Raises ModelNotFound, VersionNotFound and InUse."""
        return await self._keeper.begin_rollout(model, rollouts.read(document))

    async def rollout(self, model: str) -> Said:
        """A model's last rollout, with its decisions. Raises ModelNotFound and NotFound."""
        return await self._keeper.rollout(model)

    async def steer_rollout(self, model: str, verb: Verb) -> Said:
        """Pause, resume or abort a model's rollout. Raises as ``rollout`` does, and InUse where it is not under way."""
        return await self._keeper.steer_rollout(model, verb)

    # Predictions that are answered later, by their ids; ``within`` is as of experiments.

    async def defer(self, request: Request) -> Said:
        """Store a request that is answered later; how far it is. Raises NoRoomForDeferrals, KeyReused, BadRequest."""
        return await self._keeper.defer(request)

    async def deferral(self, id: str, within: tuple[str, ...] = ("*",)) -> Said:
        """How far it is. Raises DeferralNotFound and WrongModel."""
        return await self._keeper.deferral(id, within)

    async def deferred_answer(self, id: str, within: tuple[str, ...] = ("*",)) -> tuple[Said, Answer | None]:
        """How far it is, and its answer when it has one. Raises as ``deferral`` does, and DeferralCancelled."""
        return await self._keeper.deferred_answer(id, within)

    async def cancel_deferral(self, id: str, within: tuple[str, ...] = ("*",)) -> Said | None:
        """Stop it, or forget it (None) where it has ended. Raises as ``deferral`` does."""
        return await self._keeper.cancel_deferral(id, within)
