"""What should run: every model, its versions, its default. Pure functions over frozen values.

A change takes a registry and returns another; it reads no clock and touches nothing, so a change
that is refused has changed nothing. Who stores a registry is in database.py, who makes the
cluster agree with it in reconciler.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from serve_app import autoscaling, documents, traffic
from serve_app import policy as policies
from serve_app.control import claims
from serve_app.control.specs import check_word
from serve_app.errors import (
    BadRequest,
    CannotRemoveDefault,
    ExperimentNotFound,
    InUse,
    InvalidGraph,
    InvalidWorkflow,
    ModelNotFound,
    UnknownDefault,
    VersionExists,
    VersionNotFound,
    WorkflowExists,
    WorkflowNotFound,
)
from serve_app.experiment import Experiment
from serve_app.policy import WHOLE, Policy, Trial, allocate
from serve_app.rollout import Rollout
from serve_app.types import ModelRef, ModelRow, ModelSpec, ModelStatus, Phase, Table, VersionRow


@dataclass(frozen=True)
class Record:
    """One model: its versions, which of them is the default, and its traffic policy.

    ``declared`` is what the settings said of its traffic when that was last put in force.
    """

    default: str
    versions: Mapping[str, ModelSpec]
    policy: Policy = Policy()
    declared: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Registry:
    """Every model by name, and the digest of the archive that each version had last, removed ones too.

    Experiments are kept by id, also those that have ended; of rollouts each model's last. Two registries that say
    the same are equal.
    """

    models: Mapping[str, Record] = field(default_factory=dict)
    archives: Mapping[ModelRef, str] = field(default_factory=dict)
    experiments: Mapping[str, Experiment] = field(default_factory=dict)
    rollouts: Mapping[str, Rollout] = field(default_factory=dict)

    def __iter__(self) -> Iterator[ModelSpec]:
        """Every version of every model."""
        return (spec for record in self.models.values() for spec in record.versions.values())


@dataclass(frozen=True)
class Desired:
    """An application that should run: ``low`` to ``high`` replicas of a version behind one route.

    A workflow's functions have no route: its steps ask them.
    """

    spec: ModelSpec
    route: str | None

    @property
    def low(self) -> int:
        return self.spec.min_workers

    @property
    def high(self) -> int:
        return self.spec.max_workers


# Changes


def register(registry: Registry, spec: ModelSpec) -> Registry:
    """The registry with one version more; a model's first version becomes its default.

    Raises VersionExists, and BadRequest where the version's application would have another's name.
    """
    record = registry.models.get(spec.name)
    if record is not None and is_workflow(record) != (spec.graph is not None):
        kind, other = ("model", "workflow") if spec.graph is None else ("workflow", "model")
        raise InUse(f"{spec.name} is a {other}, so no {kind} can be called so; give it another name.")
    if record is not None and spec.version in record.versions:
        raise VersionExists(spec.name, spec.version)
    if record is not None and spec.version in record.policy.labels:
        raise BadRequest(
            f"Version {spec.version} cannot stand beside the label of that name, by which the traffic policy of model "
            f"{spec.name} calls version {record.policy.labels[spec.version]}. Give one of them another name."
        )
    for other in registry:
        if other.ref.app == spec.ref.app:
            raise BadRequest(
                f"Model {spec.name} version {spec.version} cannot stand beside model {other.name} version "
                f"{other.version}: both would run as the application {spec.ref.app}. Give one of them another name."
            )
    return _with_version(registry, spec)


def put(registry: Registry, spec: ModelSpec, default: bool = False) -> Registry:
    """The registry once start-up has found an archive in the model store: a new version, or a changed one's new spec.

    A new version becomes its model's default where ``default`` says so. The same registry where the
    version had this very archive before: what was scaled stays scaled, and what was removed stays
    away. Raises BadRequest as ``register`` does.
    """
    if registry.archives.get(spec.ref) == spec.digest:
        return registry
    record = registry.models.get(spec.name)
    if record is None or spec.version not in record.versions:
        after = register(registry, spec)
        return set_default(after, spec.name, spec.version)[0] if default else after
    if is_workflow(record):
        raise InUse(f"{spec.name} is a workflow, so no model can be called so; give it another name.")
    return _with_version(registry, spec)


def unregister(registry: Registry, name: str, version: str | None) -> tuple[Registry, ModelRef]:
    """The registry without a version (None: the default one); a model goes with its last version.

    Its policy, its experiments and its rollout go along. Raises ModelNotFound, VersionNotFound, InUse where one of
    these needs the version, and CannotRemoveDefault while other versions stand.
    """
    spec = find(registry, name, version)
    if spec.graph is not None:
        raise InUse(f"{name} is a workflow; remove it as one: DELETE /workflows/{name}")
    if claim := claims.of_workflows(name, _left(registry, spec), workflows(registry)):
        raise InUse(f"Version {spec.version} of model {name} cannot be removed: {claim}")
    return _without(registry, spec)


def _left(registry: Registry, spec: ModelSpec) -> set[str]:
    """The versions that are left of a model without this one."""
    return set(registry.models[spec.name].versions) - {spec.version}


def _without(registry: Registry, spec: ModelSpec) -> tuple[Registry, ModelRef]:
    name = spec.name
    record = registry.models[name]
    last = len(record.versions) == 1
    experiment, rollout = experiment_of(registry, name), registry.rollouts.get(name)
    if claim := claims.on_version(name, spec.version, Policy() if last else record.policy, experiment, rollout):
        raise InUse(f"Version {spec.version} of model {name} cannot be removed: {claim}")
    if last:
        models = {key: other for key, other in registry.models.items() if key != name}
        experiments = {id: other for id, other in registry.experiments.items() if other.model != name}
        rollouts = {key: other for key, other in registry.rollouts.items() if key != name}
        return replace(registry, models=models, experiments=experiments, rollouts=rollouts), spec.ref
    if spec.version == record.default:
        raise CannotRemoveDefault(name)
    rest = {key: value for key, value in record.versions.items() if key != spec.version}
    return _with(registry, name, replace(record, versions=rest)), spec.ref


def register_workflow(registry: Registry, spec: ModelSpec, models: Iterable[ModelSpec] = ()) -> Registry:
    """The registry with a workflow, or one version of it more, and the models that come with it: all, or none.

    Raises WorkflowExists, InvalidWorkflow where a step asks a model that is not there, InvalidGraph where workflows
    would ask each other in a circle, and what ``register`` raises.
    """
    assert spec.graph is not None
    is_new_workflow(registry, spec)
    for model in models:
        registry = register(registry, model)
    for step, (name, version) in spec.graph.models.items():
        place = f"steps.{step}.model"
        if name == spec.name:
            raise InvalidGraph(f"Workflow {spec.name}", f"{place}: it asks itself; name a model")
        known = registry.models.get(name)
        if known is None:
            near = documents.near_miss(name, registry.models)
            hint = f"did you mean {near!r}?" if near else "register it first: POST /models?url=..."
            raise InvalidWorkflow(f"Workflow {spec.name}", f"{place}: there is no model {name!r}; {hint}")
        if version is not None and version not in known.versions:
            there = ", ".join(sorted(known.versions))
            raise InvalidWorkflow(
                f"Workflow {spec.name}", f"{place}: model {name} has no version {version!r}; it has {there}"
            )
        if path := _path(registry, name, spec.name):
            told = " → ".join([spec.name, *path])
            raise InvalidGraph(f"Workflow {spec.name}", f"{place}: workflows would ask each other: {told}")
    return register(registry, spec)


def is_new_workflow(registry: Registry, spec: ModelSpec) -> None:
    """Raises WorkflowExists. TorchServe's form knows no versions: there is one."""
    assert spec.graph is not None
    record = registry.models.get(spec.name)
    if record is not None and is_workflow(record) and (spec.graph.torchserve or spec.version in record.versions):
        raise WorkflowExists(spec.name, "" if spec.graph.torchserve else spec.version)


def unregister_workflow(registry: Registry, name: str, version: str | None) -> tuple[Registry, list[ModelSpec]]:
    """The registry without a workflow (with ``version``: without this one of several), and all that went with it.

    Raises WorkflowNotFound, VersionNotFound, and InUse where another workflow, an experiment or a rollout needs it.
    """
    record = registry.models.get(name)
    if record is None or not is_workflow(record):
        raise WorkflowNotFound(name)
    if version is not None and version not in record.versions:
        raise VersionNotFound(name, version)
    if version is not None and len(record.versions) > 1:
        spec = record.versions[version]
        if claim := claims.of_workflows(name, _left(registry, spec), workflows(registry)):
            raise InUse(f"Version {version} of workflow {name} cannot be removed: {claim}")
        return _without(registry, spec)[0], [spec]
    gone: list[ModelSpec] = []
    graphs = [spec.graph for spec in record.versions.values() if spec.graph is not None]
    for model in [name, *(owned for graph in graphs for owned in graph.owned)]:
        gone += registry.models[model].versions.values()
        registry = _without_all(registry, model)
    for spec in gone:
        if claim := claims.of_workflows(spec.name, (), workflows(registry)):
            raise InUse(f"Workflow {name} cannot be removed: {spec.name} is needed, {claim}")
    return registry, gone


def _without_all(registry: Registry, name: str) -> Registry:
    """The registry without any version of a model, its policy gone before them."""
    registry = _with(registry, name, replace(registry.models[name], policy=Policy()))
    record = registry.models[name]
    for version in [*(v for v in sorted(record.versions) if v != record.default), record.default]:
        registry, _ = _without(registry, record.versions[version])
    return registry


def scale(
    registry: Registry,
    name: str,
    version: str | None,
    low: int | None,
    high: int | None,
    scaling: Mapping[str, Any] | None = None,
) -> tuple[Registry, ModelRef]:
    """The registry in which a version (None: the default one) has ``low`` to ``high`` workers; None: as many as now.

    Between two different numbers autoscaling holds, as ``scaling`` says, and where that says nothing as it did
    before, or as the version's model-config.yaml says. Raises ModelNotFound, VersionNotFound and BadRequest.
    """
    spec = find(registry, name, version)
    low = spec.min_workers if low is None else low
    high = spec.max_workers if high is None else high
    if low < 0 or high < low:
        raise BadRequest(f"A model cannot have {low} to {high} workers.")
    if spec.graph is not None and not spec.handler:
        raise BadRequest(f"{name} is a workflow without functions of its own, so it has no workers; scale its models.")
    known = spec.autoscaling or autoscaling.read(spec.config.get("autoscaling") or {})
    if scaling:
        if low == high:
            raise BadRequest(
                f"{', '.join(scaling)}: autoscaling holds between two different numbers of workers, and {low} to "
                f"{high} were asked for. Give min_worker and max_worker, the one below the other."
            )
        known = autoscaling.read(scaling, known)
    spec = spec.with_(min_workers=low, max_workers=high, autoscaling=known if low < high else None)
    return _with_version(registry, spec), spec.ref


def set_default(registry: Registry, name: str, version: str) -> tuple[Registry, ModelRef]:
    """The registry in which calls that name no version get ``version``, unless a policy deals them out by shares.

    Raises ModelNotFound, UnknownDefault, and InUse while a rollout says who the default is, or where all calls would
    go to the shadow.
    """
    record = _record(registry, name)
    if version not in record.versions:
        raise UnknownDefault(name, version)
    if claim := claims.on_model(name, None, registry.rollouts.get(name)):
        raise InUse(f"The default of model {name} cannot be changed: {claim}")
    shadow = record.policy.shadow
    if shadow is not None and shadow.version == version and not record.policy.versions:
        raise InUse(
            f"Version {version} is the shadow of model {name}, which another one answers for; "
            f"take the shadow out first: PUT /models/{name}/traffic"
        )
    return _with(registry, name, replace(record, default=version)), ModelRef(name, version)


def set_policy(registry: Registry, name: str, policy: Policy) -> Registry:
    """The registry in which a model's calls are dealt out as ``policy`` says; as few callers as can be change sides.

    Raises ModelNotFound, VersionNotFound, BadRequest, and InUse while an experiment or a rollout deals them out.
    """
    record = _record(registry, name)
    if unknown := policy.named - record.versions.keys():
        raise VersionNotFound(name, min(unknown))
    for label in policy.labels:
        check_word(label, "labels have")
    if policy.shadow is not None and is_workflow(record):
        raise BadRequest(f"{name} is a workflow, which has no shadow; let one of its models have one.")
    if wrong := claims.wrong(policy, record.default, record.versions):
        raise BadRequest(f"Traffic policy of model {name}: {wrong}")
    if claim := claims.on_model(name, experiment_of(registry, name), registry.rollouts.get(name)):
        raise InUse(f"The traffic policy of model {name} cannot be changed: {claim}")
    allocation = None
    if policy.versions:
        allocation = allocate(policy.versions, record.policy.allocation or allocate({record.default: WHOLE}))
    return _with(registry, name, replace(record, policy=replace(policy, allocation=allocation)))


def declare(registry: Registry, name: str, policy: Policy) -> Registry:
    """The registry in which the settings' word on a model's traffic holds: the same one where it was known already.

    What was changed since stays changed. Raises as ``set_policy`` does.
    """
    said = policies.write(policy)
    if _record(registry, name).declared == said:
        return registry
    after = set_policy(registry, name, policy)
    return _with(after, name, replace(after.models[name], declared=said))


def begin_experiment(registry: Registry, experiment: Experiment) -> Registry:
    """The registry in which an experiment deals out its model's calls.

    Raises ModelNotFound, VersionNotFound, BadRequest where an arm has nobody to answer, and InUse where another
    experiment or a rollout deals the calls out already.
    """
    for version in sorted(experiment.versions):
        if find(registry, experiment.model, version).sleeps:
            raise BadRequest(
                f"Version {version} of model {experiment.model} has no workers, so its arm's calls would all fail; "
                f"give it some first: PUT /models/{experiment.model}/{version}?min_worker=1&synchronous=true"
            )
    name, other = experiment.model, experiment_of(registry, experiment.model)
    if claim := claims.on_model(name, other, registry.rollouts.get(name)):
        raise InUse(f"The experiment {experiment.name!r} of model {name} cannot begin: {claim}")
    return replace(registry, experiments={**registry.experiments, experiment.id: experiment})


def stop_experiment(registry: Registry, id: str, ended: float) -> Registry:
    """The registry in which an experiment is over: the same one where it was over before. Raises ExperimentNotFound."""
    experiment = find_experiment(registry, id)
    if not experiment.running:
        return registry
    over = replace(experiment, state="stopped", ended=ended)
    return replace(registry, experiments={**registry.experiments, id: over})


def forget_experiment(registry: Registry, id: str) -> Registry:
    """The registry without an experiment. Raises ExperimentNotFound, and InUse while it runs."""
    experiment = find_experiment(registry, id)
    if experiment.running:
        raise InUse(f"The experiment {experiment.name!r} is running; stop it first: DELETE /experiments/{id}")
    return replace(registry, experiments={key: e for key, e in registry.experiments.items() if key != id})


def _with(registry: Registry, name: str, record: Record) -> Registry:
    return replace(registry, models={**registry.models, name: record})


def _with_version(registry: Registry, spec: ModelSpec) -> Registry:
    record = registry.models.get(spec.name) or Record(spec.version, {})
    whole = _with(registry, spec.name, replace(record, versions={**record.versions, spec.version: spec}))
    return replace(whole, archives={**registry.archives, spec.ref: spec.digest})


# Questions


def find(registry: Registry, name: str, version: str | None) -> ModelSpec:
    """A version's spec (None: the default one's). Raises ModelNotFound and VersionNotFound."""
    record = _record(registry, name)
    spec = record.versions.get(version or record.default)
    if spec is None:
        raise VersionNotFound(name, version)
    return spec


def desired(registry: Registry) -> dict[str, Desired]:
    """What should run, by application name: every version that has workers, behind the route it owns.

    The default version owns its model's own route while it takes all of the model's traffic;
    otherwise that route is the gateway's, and the version keeps to its explicit one.
    """
    return {
        spec.ref.app: Desired(spec, _route(registry, name, spec))
        for name, record in registry.models.items()
        for spec in record.versions.values()
        if spec.min_workers > 0 or spec.max_workers > 0
    }


def _route(registry: Registry, name: str, spec: ModelSpec) -> str | None:
    if spec.graph is not None:
        return None
    record = registry.models[name]
    whole = traffic.whole(ModelRow(record.default, {}, record.policy, trial(registry, name)))
    return spec.default_route if spec.version == whole else spec.route


def is_workflow(record: Record) -> bool:
    return any(spec.graph is not None for spec in record.versions.values())


def workflows(registry: Registry) -> dict[str, list[ModelSpec]]:
    """Every version of every workflow, by name."""
    return {name: list(record.versions.values()) for name, record in registry.models.items() if is_workflow(record)}


def _path(registry: Registry, start: str, end: str) -> list[str]:
    """A way from one workflow to another by the models that they ask; empty where there is none."""
    record = registry.models.get(start)
    if start == end:
        return [end]
    graphs = [spec.graph for spec in record.versions.values() if spec.graph is not None] if record else []
    asked = chain.from_iterable(graph.models.values() for graph in graphs)
    return next(([start, *path] for name, _ in asked if (path := _path(registry, name, end))), [])


def experiment_of(registry: Registry, name: str) -> Experiment | None:
    """The experiment that a model is in."""
    return next((e for e in registry.experiments.values() if e.model == name and e.running), None)


def find_experiment(registry: Registry, id: str) -> Experiment:
    """Raises ExperimentNotFound."""
    experiment = registry.experiments.get(id)
    if experiment is None:
        raise ExperimentNotFound(id)
    return experiment


def trial(registry: Registry, name: str) -> Trial | None:
    """What deals out a model's traffic in place of its policy: its experiment, or a rollout once it has begun."""
    experiment = experiment_of(registry, name)
    if experiment is not None:
        return experiment.trial
    rollout = registry.rollouts.get(name)
    return rollout.trial if rollout is not None and rollout.state in ("running", "paused") else None


def table(
    registry: Registry,
    statuses: Mapping[ModelRef, ModelStatus],
    healthy: Mapping[ModelRef, bool],
    generation: int,
    settled: bool,
    sequence_header: str = "",
) -> Table:
    """What the data plane reads. A version that nobody has looked at yet counts as healthy.

    ``sequence_header`` is the header, in lower case, in which calls name their sequence.
    """
    models = {
        name: ModelRow(
            default=record.default,
            versions={v: _row(s, statuses.get(s.ref), healthy.get(s.ref, True)) for v, s in record.versions.items()},
            policy=record.policy,
            trial=trial(registry, name),
            sequences=sequence_header if any(s.sequence_batching for s in record.versions.values()) else "",
        )
        for name, record in registry.models.items()
    }
    return Table(generation=generation, models=models, settled=settled)


def _row(spec: ModelSpec, status: ModelStatus | None, healthy: bool) -> VersionRow:
    status = status or ModelStatus()
    # Asked for and not begun is loading: its callers wait for it rather than hear that nobody serves.
    begun = status.phase != "stopped" or not (spec.min_workers or spec.max_workers)
    phase: Phase = status.phase if begun else "loading"
    if spec.graph is not None and not spec.handler:
        phase = "ready"  # its models answer, and each says for itself whether it can
    return VersionRow(
        version=spec.version,
        phase=phase,
        replicas=status.replicas,
        job_queue_size=spec.job_queue_size,
        max_batch_size=spec.batch_size,
        client_timeout=spec.client_timeout,
        max_concurrent_requests=spec.max_concurrent_requests,
        start_seconds=status.start_seconds,
        retries=spec.retries,
        ids=tuple(sorted(worker.id for worker in status.workers if worker.ready)),
        healthy=healthy,
        last_error=status.last_error if status.phase == "failed" else "",
        loaded_at_startup=spec.loaded_at_startup,
        wake_timeout=float(spec.startup_timeout) if spec.min_workers == 0 < spec.max_workers else 0.0,
        stateful=spec.sequence_batching,
        graph=spec.graph,
        signature=spec.signature or status.signature,
    )


def _record(registry: Registry, name: str) -> Record:
    record = registry.models.get(name)
    if record is None:
        raise ModelNotFound(name)
    return record
