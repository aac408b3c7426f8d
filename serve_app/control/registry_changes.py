"""Changes to the desired state: pure functions from one registry to another.

No change reads a clock or has a side effect, so that a refused change has changed nothing. Changes of
workflows, experiments and rollouts are in the packages of these features.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from serve_app.control import conflicts
from serve_app.control.registry import (
    ModelRecord,
    Registry,
    find_version,
    get_record,
    is_workflow,
    running_experiment,
    workflow_versions,
)
from serve_app.domain import autoscaling as autoscaling_policy
from serve_app.domain import traffic_policy as policies
from serve_app.domain.adapter import AdapterSpec
from serve_app.domain.model import ModelRef, ModelSpec, check_word
from serve_app.domain.traffic_policy import BUCKET_COUNT, TrafficPolicy, allocate
from serve_app.errors import (
    AdapterExists,
    AdapterNotFound,
    BadRequest,
    CannotRemoveDefault,
    Conflict,
    DefaultVersionNotFound,
    VersionExists,
    VersionNotFound,
)

# Models and versions


def register(registry: Registry, spec: ModelSpec) -> Registry:
    """Add a version; a model's first version becomes its default.

    Raises VersionExists, Conflict where the name is a workflow's, and BadRequest where a label has the
    version's name.
    """
    record = registry.models.get(spec.name)
    if record is not None and is_workflow(record) != (spec.graph is not None):
        kind, other_kind = ("model", "workflow") if spec.graph is None else ("workflow", "model")
        raise Conflict(f"{spec.name} is a {other_kind}, so no {kind} can be called so; give it another name.")
    if record is not None and spec.version in record.versions:
        raise VersionExists(spec.name, spec.version)
    if record is not None and spec.version in record.policy.labels:
        raise BadRequest(
            f"Version {spec.version} cannot stand beside the label of that name, by which the "
            f"traffic policy of model "
            f"{spec.name} calls version {record.policy.labels[spec.version]}. Give one of them another name."
        )
    return with_version(registry, spec)


def apply_archive(registry: Registry, spec: ModelSpec, default: bool = False) -> Registry:
    """Add an archive that start-up found in the model store: a new version, or a changed version's new spec.

    A new version becomes its model's default where ``default`` is set. The same registry is returned where
    the version had this very archive before: scaled versions stay scaled, and removed ones stay removed.
    Raises BadRequest and Conflict as ``register`` does.
    """
    record = registry.models.get(spec.name)
    if registry.archives.get(spec.ref) == spec.digest:
        known = record.versions.get(spec.version) if record is not None else None
        if known is None or not spec.signed_by or known.signed_by == spec.signed_by:
            return registry
        return with_version(
            registry, known.with_(signed_by=spec.signed_by)
        )  # signed since, or by another key
    if record is None or spec.version not in record.versions:
        after = register(registry, spec)
        return set_default(after, spec.name, spec.version)[0] if default else after
    if is_workflow(record):
        raise Conflict(f"{spec.name} is a workflow, so no model can be called so; give it another name.")
    return with_version(registry, spec)


def record_memory(registry: Registry, ref: ModelRef, digest: str, memory: int) -> Registry:
    """Store the measured bytes of a replica of the archive ``digest``; the largest measurement is kept.

    Replicas that share the pages of their weights measure less. The same registry is returned where the
    version is gone, or the bytes are less than a tenth above the stored ones.
    """
    record = registry.models.get(ref.name)
    spec = record.versions.get(ref.version) if record is not None else None
    if spec is None or spec.digest != digest or memory <= spec.memory * 1.1:
        return registry
    return with_version(registry, spec.with_(memory=memory))


def unregister(registry: Registry, name: str, version: str | None) -> tuple[Registry, ModelRef]:
    """Remove a version (None: the default one); a model is removed with its last version.

    The model's policy, experiments and rollout are removed with it. Raises ModelNotFound, VersionNotFound,
    Conflict where one of these needs the version, and CannotRemoveDefault while other versions exist.
    """
    spec = find_version(registry, name, version)
    if spec.graph is not None:
        raise Conflict(f"{name} is a workflow; remove it as one: DELETE /workflows/{name}")
    remaining = remaining_versions(registry, spec)
    if conflict := conflicts.with_workflows(name, remaining, workflow_versions(registry)):
        raise Conflict(f"Version {spec.version} of model {name} cannot be removed: {conflict}")
    return remove_version(registry, spec)


def remaining_versions(registry: Registry, spec: ModelSpec) -> set[str]:
    """Return a model's versions without this one."""
    return set(registry.models[spec.name].versions) - {spec.version}


def remove_version(registry: Registry, spec: ModelSpec) -> tuple[Registry, ModelRef]:
    """Remove a version that no workflow calls. Raises Conflict and CannotRemoveDefault."""
    name = spec.name
    record = registry.models[name]
    is_last = len(record.versions) == 1
    experiment, rollout = running_experiment(registry, name), registry.rollouts.get(name)
    policy = TrafficPolicy() if is_last else record.policy
    if conflict := conflicts.with_version_uses(name, spec.version, policy, experiment, rollout):
        raise Conflict(f"Version {spec.version} of model {name} cannot be removed: {conflict}")
    if is_last:
        models = {key: other for key, other in registry.models.items() if key != name}
        experiments = {id: other for id, other in registry.experiments.items() if other.model != name}
        rollouts = {key: other for key, other in registry.rollouts.items() if key != name}
        return replace(registry, models=models, experiments=experiments, rollouts=rollouts), spec.ref
    if spec.version == record.default:
        raise CannotRemoveDefault(name)
    versions = {key: value for key, value in record.versions.items() if key != spec.version}
    return with_record(registry, name, replace(record, versions=versions)), spec.ref


def remove_model(registry: Registry, name: str) -> Registry:
    """Remove all versions of a model, and its policy before them. Raises Conflict."""
    registry = with_record(registry, name, replace(registry.models[name], policy=TrafficPolicy()))
    record = registry.models[name]
    for version in [*(v for v in sorted(record.versions) if v != record.default), record.default]:
        registry, _ = remove_version(registry, record.versions[version])
    return registry


def scale(
    registry: Registry,
    name: str,
    version: str | None,
    min_workers: int | None,
    max_workers: int | None,
    autoscaling: Mapping[str, Any] | None = None,
) -> tuple[Registry, ModelRef]:
    """Give a version (None: the default one) new bounds of its workers; None keeps a bound.

    Between two different bounds autoscaling applies: the keys of ``autoscaling`` first, then its present
    settings, then those of the version's model-config.yaml. Raises ModelNotFound, VersionNotFound and
    BadRequest.
    """
    spec = find_version(registry, name, version)
    low = spec.min_workers if min_workers is None else min_workers
    high = spec.max_workers if max_workers is None else max_workers
    if low < 0 or high < low:
        raise BadRequest(f"A model cannot have {low} to {high} workers.")
    if spec.graph is not None and not spec.handler:
        raise BadRequest(
            f"{name} is a workflow without functions of its own, so it has no workers; scale its models."
        )
    policy = spec.autoscaling or autoscaling_policy.read(spec.config.get("autoscaling") or {})
    if autoscaling:
        if low == high:
            raise BadRequest(
                f"{', '.join(autoscaling)}: autoscaling holds between two different numbers of workers, and "
                f"{low} to {high} were requested. Give min_worker and max_worker, the one below the other."
            )
        policy = autoscaling_policy.read(autoscaling, policy)
    spec = spec.with_(min_workers=low, max_workers=high, autoscaling=policy if low < high else None)
    return with_version(registry, spec), spec.ref


def set_default(registry: Registry, name: str, version: str) -> tuple[Registry, ModelRef]:
    """Make a version the one that requests without a version get, unless a policy splits them.

    Raises ModelNotFound, DefaultVersionNotFound, and Conflict while a rollout determines the default, or
    where all requests would go to the shadow.
    """
    record = get_record(registry, name)
    if version not in record.versions:
        raise DefaultVersionNotFound(name, version)
    if conflict := conflicts.with_active_split(name, None, registry.rollouts.get(name)):
        raise Conflict(f"The default of model {name} cannot be changed: {conflict}")
    shadow = record.policy.shadow
    if shadow is not None and shadow.version == version and not record.policy.versions:
        raise Conflict(
            f"Version {version} is the shadow of model {name}, which another one answers for; "
            f"take the shadow out first: PUT /models/{name}/traffic"
        )
    return with_record(registry, name, replace(record, default=version)), ModelRef(name, version)


# Traffic


def set_policy(registry: Registry, name: str, policy: TrafficPolicy) -> Registry:
    """Split a model's traffic by ``policy``, moving as few callers between versions as possible.

    Raises ModelNotFound, VersionNotFound, BadRequest, and Conflict while an experiment or a rollout splits
    the traffic.
    """
    record = get_record(registry, name)
    if unknown := policy.referenced_versions - record.versions.keys():
        raise VersionNotFound(name, min(unknown))
    for label in policy.labels:
        check_word(label, "labels have")
    if policy.shadow is not None and is_workflow(record):
        raise BadRequest(f"{name} is a workflow, which has no shadow; let one of its models have one.")
    if problem := conflicts.within_policy(policy, record.default, record.versions):
        raise BadRequest(f"Traffic policy of model {name}: {problem}")
    experiment, rollout = running_experiment(registry, name), registry.rollouts.get(name)
    if conflict := conflicts.with_active_split(name, experiment, rollout):
        raise Conflict(f"The traffic policy of model {name} cannot be changed: {conflict}")
    allocation = None
    if policy.versions:
        allocation = allocate(
            policy.versions, record.policy.allocation or allocate({record.default: BUCKET_COUNT})
        )
    return with_record(registry, name, replace(record, policy=replace(policy, allocation=allocation)))


def apply_declared_policy(registry: Registry, name: str, policy: TrafficPolicy) -> Registry:
    """Apply the settings' traffic policy of a model; the same registry where it was applied before.

    A policy that was changed since stays changed. Raises as ``set_policy`` does.
    """
    declared = policies.write(policy)
    if get_record(registry, name).declared == declared:
        return registry
    after = set_policy(registry, name, policy)
    return with_record(after, name, replace(after.models[name], declared=declared))


# Adapters


def check_adapter(registry: Registry, spec: ModelSpec, name: str) -> None:
    """Check that a version can have another adapter of that name.

    Raises AdapterExists, and Conflict where requests could not distinguish it from a version.
    """
    if any(adapter.name == name for adapter in spec.all_adapters):
        raise AdapterExists(spec.name, spec.version, name)
    record = registry.models[spec.name]
    if name in record.versions or name in record.policy.labels:
        raise Conflict(
            f"{spec.name}:{name} names a version of model {spec.name}; give the adapter another name."
        )


def add_adapter(registry: Registry, spec: ModelSpec, adapter: AdapterSpec) -> Registry:
    """Add an adapter to the version that ``spec`` was read from.

    Raises as ``check_adapter`` does, and ModelNotFound, VersionNotFound and Conflict where the version was
    removed or replaced meanwhile.
    """
    current = find_version(registry, spec.name, spec.version)
    if current.digest != spec.digest:
        raise Conflict(f"Version {spec.version} of model {spec.name} was replaced; add the adapter again.")
    check_adapter(registry, current, adapter.name)
    return with_version(registry, current.with_(adapters=(*current.adapters, adapter)))


def remove_adapter(registry: Registry, spec: ModelSpec, name: str) -> Registry:
    """Remove an adapter that was added at run time. Raises AdapterNotFound and Conflict."""
    removed = next((adapter for adapter in spec.adapters if adapter.name == name), None)
    if removed is None:
        known = sorted(adapter.name for adapter in spec.all_adapters)
        if name in known:
            raise Conflict(
                f"Adapter {name} is in the archive of model {spec.name}; register an archive without it."
            )
        raise AdapterNotFound(spec.name, name, ", ".join(known) or "none")
    kept = tuple(adapter for adapter in spec.adapters if adapter is not removed)
    return with_version(registry, spec.with_(adapters=kept))


# Copies


def with_record(registry: Registry, name: str, record: ModelRecord) -> Registry:
    """Return the registry with one model's record replaced."""
    return replace(registry, models={**registry.models, name: record})


def with_version(registry: Registry, spec: ModelSpec) -> Registry:
    """Return the registry with one version added or replaced."""
    record = registry.models.get(spec.name) or ModelRecord(spec.version, {})
    versions = {**record.versions, spec.version: spec}
    after = with_record(registry, spec.name, replace(record, versions=versions))
    return replace(after, archives={**registry.archives, spec.ref: spec.digest})
