"""The desired state: every model, its versions and its default. Frozen values and pure queries over them.

persistence/database.py stores a registry, registry_changes.py changes one, and reconciler.py makes the
cluster agree with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from operator import is_not
from typing import Any, NamedTuple

from serve_app.dataplane.routing import version_router
from serve_app.domain.experiment import Experiment
from serve_app.domain.model import ModelRef, ModelSpec, ModelStatus, Phase
from serve_app.domain.rollout import Rollout
from serve_app.domain.routing_table import ModelRoute, RoutingTable, VersionRoute
from serve_app.domain.traffic_policy import ActiveSplit, TrafficPolicy
from serve_app.errors import ExperimentNotFound, ModelNotFound, VersionNotFound

_DEFAULT_POLICY = TrafficPolicy()


@dataclass(frozen=True)
class ModelRecord:
    """One model: its versions, which of them is the default, and its traffic policy.

    ``declared`` is the traffic policy of the settings that was applied last.
    """

    default: str
    versions: Mapping[str, ModelSpec]
    policy: TrafficPolicy = _DEFAULT_POLICY
    declared: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Registry:
    """Every model by name, and the digest of each version's last archive, removed versions included.

    Experiments are kept by id, also those that have ended; of rollouts each model's last. Two registries with
    equal contents are equal. ``unreadable`` has the digests of stored versions that could not be read: they
    do not run, and their archives are kept.
    """

    models: Mapping[str, ModelRecord] = field(default_factory=dict)
    archives: Mapping[ModelRef, str] = field(default_factory=dict)
    experiments: Mapping[str, Experiment] = field(default_factory=dict)
    rollouts: Mapping[str, Rollout] = field(default_factory=dict)
    unreadable: frozenset[str] = frozenset()

    def __iter__(self) -> Iterator[ModelSpec]:
        """Iterate over every version of every model."""
        return (spec for record in self.models.values() for spec in record.versions.values())


@dataclass(frozen=True)
class DesiredState:
    """An application that should run: some replicas of a version behind one route.

    A workflow's functions have no route: its steps call them.
    """

    spec: ModelSpec
    route: str | None
    replicas: int | None = None  # between the bounds, where Ray Serve's autoscaler does not choose it

    @property
    def min_replicas(self) -> int:
        return self.spec.min_workers if self.replicas is None else self.replicas

    @property
    def max_replicas(self) -> int:
        return self.spec.max_workers if self.replicas is None else self.replicas


def get_record(registry: Registry, name: str) -> ModelRecord:
    """Return a model's record. Raises ModelNotFound."""
    record = registry.models.get(name)
    if record is None:
        raise ModelNotFound(name)
    return record


def find_version(registry: Registry, name: str, version: str | None) -> ModelSpec:
    """Return a version's spec (None: the default one's). Raises ModelNotFound and VersionNotFound."""
    record = get_record(registry, name)
    spec = record.versions.get(version or record.default)
    if spec is None:
        raise VersionNotFound(name, version)
    return spec


def changed_models(before: Registry, after: Registry) -> list[str]:
    """Return the models whose records are different objects; a change replaces those that it concerns."""
    old, new = before.models, after.models
    return [name for name in (*new, *(old.keys() - new.keys())) if old.get(name) is not new.get(name)]


def has_version(registry: Registry, ref: ModelRef) -> bool:
    record = registry.models.get(ref.name)
    return record is not None and ref.version in record.versions


def desired_states(registry: Registry) -> dict[str, DesiredState]:
    """Return the applications that should run, by name: every version with workers of its own and its route.

    The default version owns its model's own route while it takes all of the model's traffic; otherwise that
    route is the gateway's, and the version keeps to its explicit one. A version that is routed by prefix has
    no route of its own, because the gateways choose its replicas.
    """
    return {
        spec.ref.app: DesiredState(spec, _route(registry, name, spec))
        for name, record in registry.models.items()
        for spec in record.versions.values()
        if (spec.min_workers > 0 or spec.max_workers > 0) and not spec.is_pooled
    }


def _route(registry: Registry, name: str, spec: ModelSpec) -> str | None:
    if spec.graph is not None or spec.routed_by_prefix:
        return None
    record = registry.models[name]
    route = ModelRoute(record.default, {}, record.policy, active_split(registry, name))
    return spec.default_route if spec.version == version_router.sole_version(route) else spec.route


def is_workflow(record: ModelRecord) -> bool:
    return record.versions[record.default].graph is not None  # a model has no version that is a workflow


def workflow_versions(registry: Registry) -> dict[str, list[ModelSpec]]:
    """Return every version of every workflow, by name."""
    return {
        name: list(record.versions.values())
        for name, record in registry.models.items()
        if is_workflow(record)
    }


def running_experiment(registry: Registry, name: str) -> Experiment | None:
    """Return the experiment that runs on a model."""
    return next((e for e in registry.experiments.values() if e.model == name and e.running), None)


def find_experiment(registry: Registry, id: str) -> Experiment:
    """Return an experiment. Raises ExperimentNotFound."""
    experiment = registry.experiments.get(id)
    if experiment is None:
        raise ExperimentNotFound(id)
    return experiment


def active_split(registry: Registry, name: str) -> ActiveSplit | None:
    """Return the split that replaces a model's policy: its experiment's, or its rollout's once started."""
    experiment = running_experiment(registry, name)
    if experiment is not None:
        return experiment.active_split
    rollout = registry.rollouts.get(name)
    return rollout.active_split if rollout is not None and rollout.state in ("running", "paused") else None


class _BuiltRoute(NamedTuple):
    """The route of a model, and what it was built from."""

    record: ModelRecord
    observed: tuple[ModelStatus | None, ...]  # of its versions
    unhealthy: frozenset[str]  # versions
    split: ActiveSplit | None
    route: ModelRoute


class TableBuilder:
    """A builder of routing tables that keeps the routes of unchanged models.

    A change of one model among 10,000 then takes a tenth of the time, and readers receive the changed routes
    only. ``sequence_header`` is the header, in lower case, in which requests name their sequence.
    """

    def __init__(self, sequence_header: str = "") -> None:
        self._sequence_header = sequence_header
        self._routes: dict[str, _BuiltRoute] = {}  # by model

    def build(
        self,
        registry: Registry,
        statuses: Mapping[ModelRef, ModelStatus],
        healthy: Mapping[ModelRef, bool],
        generation: int,
        startup_complete: bool,
    ) -> RoutingTable:
        """Return the table that the data plane routes by.

        A version without an observation counts as healthy.
        """
        splits = _active_splits(registry)
        routes: dict[str, _BuiltRoute] = {}
        for name, record in registry.models.items():
            specs = record.versions.values()
            observed = tuple([statuses.get(spec.ref) for spec in specs])
            unhealthy = frozenset(
                [s.version for s in specs if not healthy.get(s.ref, True)] if healthy else ()
            )
            split = splits.get(name)
            known = self._routes.get(name)
            if (
                known is None
                or known.record is not record
                or any(map(is_not, known.observed, observed))
                or known.unhealthy != unhealthy
                or known.split != split
            ):
                route = self._build_route(record, observed, unhealthy, split)
                known = _BuiltRoute(record, observed, unhealthy, split, route)
            routes[name] = known
        self._routes = routes
        models = {name: built.route for name, built in routes.items()}
        return RoutingTable(generation=generation, models=models, startup_complete=startup_complete)

    def _build_route(
        self,
        record: ModelRecord,
        observed: tuple[ModelStatus | None, ...],
        unhealthy: frozenset[str],
        split: ActiveSplit | None,
    ) -> ModelRoute:
        return ModelRoute(
            default=record.default,
            versions={
                version: _version_route(spec, status, version not in unhealthy)
                for (version, spec), status in zip(record.versions.items(), observed)
            },
            policy=record.policy,
            active_split=split,
            sequence_header=self._sequence_header if _is_stateful(record) else "",
        )


def _active_splits(registry: Registry) -> dict[str, ActiveSplit]:
    """Return the splits of the models with an experiment or a rollout."""
    models = {*registry.rollouts, *(e.model for e in registry.experiments.values() if e.running)}
    splits = ((name, active_split(registry, name)) for name in models)
    return {name: split for name, split in splits if split is not None}


def _is_stateful(record: ModelRecord) -> bool:
    return any(spec.sequence_batching for spec in record.versions.values())


def _version_route(spec: ModelSpec, status: ModelStatus | None, healthy: bool) -> VersionRoute:
    status = status or ModelStatus()
    # A requested version that has not started yet is loading: its callers wait instead of getting an error.
    started = status.phase != "stopped" or not (spec.min_workers or spec.max_workers or spec.is_pooled)
    phase: Phase = status.phase if started else "loading"
    if spec.graph is not None and not spec.handler:
        phase = "ready"  # its models execute the steps, and each has a phase of its own
    # A version scaled to zero has no replicas from the commit on, although some may still drain.
    stopped = phase in ("ready", "loading", "idle") and not (
        spec.min_workers or spec.max_workers or spec.graph or spec.is_pooled
    )
    if stopped:
        phase = "stopped"
    return VersionRoute(
        version=spec.version,
        phase=phase,
        replicas=0 if stopped else status.replicas,
        job_queue_size=spec.job_queue_size,
        max_batch_size=spec.batch_size,
        client_timeout=spec.client_timeout,
        max_concurrent_requests=spec.max_concurrent_requests,
        start_seconds=status.start_seconds,
        retries=spec.retries,
        replica_ids=() if stopped else tuple(sorted(worker.id for worker in status.workers if worker.ready)),
        healthy=healthy,
        last_error=status.last_error if status.phase == "failed" else "",
        loaded_at_startup=spec.loaded_at_startup,
        wake_timeout=float(spec.startup_timeout) if spec.min_workers == 0 < spec.max_workers else 0.0,
        stateful=spec.sequence_batching,
        routing="prefix" if spec.routed_by_prefix else "load",
        pool=spec.pool if spec.is_pooled else "",
        pool_hosts=status.pool_hosts or 1,
        pin_loaded=spec.pin_loaded,
        revision=spec.revision if spec.is_pooled or spec.response_cache is not None else "",
        response_cache=spec.response_cache,
        graph=spec.graph,
        adapters=spec.all_adapters,
        signature=spec.signature or status.signature,
        schemas=status.schemas,
    )
