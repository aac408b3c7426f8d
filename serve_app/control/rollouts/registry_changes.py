"""Rollouts in the registry: pure functions that start one and apply its decisions."""

from __future__ import annotations

from dataclasses import replace

from serve_app.control import conflicts, registry_changes
from serve_app.control.registry import Registry, find_version, running_experiment
from serve_app.control.rollouts import state_machine
from serve_app.domain import autoscaling
from serve_app.domain.rollout import Rollout, RolloutPlan
from serve_app.errors import BadRequest, Conflict, RolloutNotFound


def find(registry: Registry, model: str) -> Rollout:
    """Return a model's last rollout. Raises ModelNotFound and RolloutNotFound."""
    find_version(registry, model, None)
    rollout = registry.rollouts.get(model)
    if rollout is None:
        raise RolloutNotFound(model)
    return rollout


def start(registry: Registry, model: str, plan: RolloutPlan, id: str, now: float) -> Registry:
    """Start a rollout; a candidate without workers gets as many as the baseline.

    Workers that the model's last rollout keeps warm are removed at once. Raises ModelNotFound,
    VersionNotFound, BadRequest where a version has no workers or nothing would change, and Conflict where
    several versions share the traffic.
    """
    current = find_version(registry, model, None)
    candidate = find_version(registry, model, plan.to)
    experiment, last = running_experiment(registry, model), registry.rollouts.get(model)
    if claim := conflicts.with_active_split(model, experiment, last):
        raise Conflict(f"A rollout of model {model} cannot begin: {claim}")
    record = registry.models[model]
    baseline = record.policy.sole_version(record.default)
    if baseline is None:
        raise Conflict(
            f"A rollout of model {model} cannot begin: its traffic policy splits requests among "
            f"several versions; give "
            f"all to one of them first: PUT /models/{model}/traffic, or DELETE for the default policy"
        )
    if baseline == plan.to:
        raise BadRequest(
            f"Rollout: version {plan.to} has all requests of model {model} already; name another one."
        )
    answering = current if baseline == current.version else find_version(registry, model, baseline)
    if answering.has_no_workers:
        raise BadRequest(
            f"Rollout: version {baseline}, which has all requests of model {model}, has no workers to "
            f"compare with; make the other one the default: PUT /models/{model}/{plan.to}/set-default"
        )
    given = candidate.has_no_workers
    if given:
        autoscaling_keys = (
            autoscaling.write(answering.autoscaling) if answering.autoscaling is not None else None
        )
        registry, _ = registry_changes.scale(
            registry, model, plan.to, answering.min_workers, answering.max_workers, autoscaling_keys
        )
    if last is not None and last.baseline != plan.to:
        registry = scale_down_previous(registry, last, now)
    return _with(registry, state_machine.create(plan, id, model, baseline, given, now))


def apply_decision(registry: Registry, after: Rollout) -> Registry:
    """Apply a decision of a rollout.

    After a promotion the version is the default, and the policy has no shares any more; it keeps its header,
    its labels, and its shadow unless that is the new default. A rollout that ends before its first step takes
    back the workers that it added.
    """
    before, model = registry.rollouts[after.model], after.model
    if before.state == "starting" and before.workers_added and after.state in ("rolled_back", "aborted"):
        registry, _ = registry_changes.scale(registry, model, after.plan.to, 0, 0)
    if before.active and after.state == "promoted":
        record = registry.models[model]
        shadow = record.policy.shadow
        if shadow is not None and shadow.version == after.plan.to:
            shadow = None
        plain = replace(
            record.policy, policy="default", versions={}, key=None, salt="", shadow=shadow, allocation=None
        )
        record = replace(record, default=after.plan.to, policy=plain)
        registry = replace(registry, models={**registry.models, model: record})
        if after.plan.keep_warm_s is not None:
            replaced = find_version(registry, model, after.baseline)
            after = replace(after, previous_workers=(replaced.min_workers, replaced.max_workers))
    return _with(registry, after)


def scale_down_previous(registry: Registry, rollout: Rollout, now: float) -> Registry:
    """Remove the workers of a replaced version unless they are in use."""
    if rollout.previous_workers is None:
        return registry
    model, version = rollout.model, rollout.baseline
    record = registry.models[model]
    spec = record.versions.get(version)
    kept = ""
    if spec is None:
        why = "it was removed"
    else:
        if record.default != rollout.plan.to:
            kept = "the default version was changed meanwhile"
        elif (spec.min_workers, spec.max_workers) != rollout.previous_workers:
            kept = "its workers were changed meanwhile"
        else:
            experiment = running_experiment(registry, model)
            kept = conflicts.with_version_uses(model, version, record.policy, experiment, None)
        why = f"it keeps its workers, because {kept}" if kept else "its workers are taken away"
        if not kept:
            registry, _ = registry_changes.scale(registry, model, version, 0, 0)
    return _with(registry, state_machine.mark_scaled_down(rollout, now, why))


def _with(registry: Registry, rollout: Rollout) -> Registry:
    return replace(registry, rollouts={**registry.rollouts, rollout.model: rollout})
