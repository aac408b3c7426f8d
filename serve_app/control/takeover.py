"""A rollout in the registry: which version it begins from, and what its decisions change. Pure functions."""

from __future__ import annotations

from dataclasses import replace

from serve_app import autoscaling
from serve_app.control import claims, progression
from serve_app.control import registry as change
from serve_app.control.registry import Record, Registry
from serve_app.errors import BadRequest, InUse, RolloutNotFound
from serve_app.rollout import Plan, Rollout


def find(registry: Registry, model: str) -> Rollout:
    """A model's last rollout. Raises ModelNotFound and RolloutNotFound."""
    change.find(registry, model, None)
    rollout = registry.rollouts.get(model)
    if rollout is None:
        raise RolloutNotFound(model)
    return rollout


def begin(registry: Registry, model: str, plan: Plan, id: str, now: float) -> Registry:
    """The registry in which a version is on its way to take over; without workers it is given the baseline's.

    What the model's last rollout still keeps warm cools at once. Raises ModelNotFound, VersionNotFound, BadRequest
    where nobody could answer or nothing would change, and InUse where calls are dealt out to several versions.
    """
    current = change.find(registry, model, None)
    candidate = change.find(registry, model, plan.to)
    experiment, last = change.experiment_of(registry, model), registry.rollouts.get(model)
    if claim := claims.on_model(model, experiment, last):
        raise InUse(f"A rollout of model {model} cannot begin: {claim}")
    baseline = _whole(registry.models[model])
    if baseline is None:
        raise InUse(
            f"A rollout of model {model} cannot begin: its traffic policy deals calls out to several versions; give "
            f"all to one of them first: PUT /models/{model}/traffic, or DELETE for the default policy"
        )
    if baseline == plan.to:
        raise BadRequest(f"Rollout: version {plan.to} has all calls of model {model} already; name another one.")
    answering = current if baseline == current.version else change.find(registry, model, baseline)
    if answering.max_workers == 0:
        raise BadRequest(
            f"Rollout: version {baseline}, which has all calls of model {model}, has no workers to compare with; make "
            f"the other one the default: PUT /models/{model}/{plan.to}/set-default"
        )
    given = candidate.max_workers == 0
    if given:
        said = autoscaling.write(answering.autoscaling) if answering.autoscaling is not None else None
        registry, _ = change.scale(registry, model, plan.to, answering.min_workers, answering.max_workers, said)
    if last is not None and last.baseline != plan.to:
        registry = cool(registry, last, now)
    return _with(registry, progression.begun(plan, id, model, baseline, given, now))


def decide(registry: Registry, after: Rollout) -> Registry:
    """The registry with what a rollout has come to.

    Promoted, its version is the default and the policy has no shares any more, but its header, its labels and its
    shadow, unless that is the new default. Ended before its first step, it has the workers back that it was given.
    """
    before, model = registry.rollouts[after.model], after.model
    if before.state == "starting" and before.given and after.state in ("rolled_back", "aborted"):
        registry, _ = change.scale(registry, model, after.plan.to, 0, 0)
    if before.under_way and after.state == "promoted":
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
            replaced = change.find(registry, model, after.baseline)
            after = replace(after, warm=(replaced.min_workers, replaced.max_workers))
    return _with(registry, after)


def cool(registry: Registry, rollout: Rollout, now: float) -> Registry:
    """The registry in which a version that was replaced has no workers any more, unless somebody has a use for it."""
    if rollout.warm is None:
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
        elif (spec.min_workers, spec.max_workers) != rollout.warm:
            kept = "its workers were changed meanwhile"
        else:
            experiment = change.experiment_of(registry, model)
            kept = claims.on_version(model, version, record.policy, experiment, None)
        why = f"it keeps its workers, because {kept}" if kept else "its workers are taken away"
        if not kept:
            registry, _ = change.scale(registry, model, version, 0, 0)
    return _with(registry, progression.cooled(rollout, now, why))


def _whole(record: Record) -> str | None:
    """The version that gets all calls by policy; None where several share them."""
    allocation = record.policy.allocation
    if allocation is None:
        return record.default
    return allocation.names[0] if len(allocation.names) == 1 else None


def _with(registry: Registry, rollout: Rollout) -> Registry:
    return replace(registry, rollouts={**registry.rollouts, rollout.model: rollout})
