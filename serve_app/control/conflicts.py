"""Conflicts of a change with a model's policy, experiment, rollout or workflows.

Pure functions over frozen values. Each returns the conflict and its cure as text, empty where there is none.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from serve_app.domain.experiment import Experiment
from serve_app.domain.model import ModelSpec
from serve_app.domain.rollout import Rollout
from serve_app.domain.traffic_policy import BUCKET_COUNT, TrafficPolicy


def within_policy(policy: TrafficPolicy, default: str, versions: Mapping[str, ModelSpec]) -> str:
    """Describe why a policy cannot apply to a model with these versions; they include all that it names."""
    if taken := [label for label in policy.labels if label in versions]:
        return f"the label {taken[0]!r} is a version's name too; call it something else"
    shares = policy.versions or {default: BUCKET_COUNT}
    shadow = policy.shadow.version if policy.shadow is not None else ""
    if shares.get(shadow) == BUCKET_COUNT:
        return (
            f"shadow.version {shadow} answers every call itself; name another version, or leave "
            f"the shadow out"
        )
    weighted = [version for version, weight in policy.versions.items() if weight]
    for version in [*weighted, *filter(None, [shadow])]:
        if versions[version].has_no_workers:
            return f"version {version} has no workers, so its calls would all fail; scale it first"
    return ""


def with_workflows(
    model: str, remaining: Collection[str], workflows: Mapping[str, Iterable[ModelSpec]]
) -> str:
    """Name the workflow that calls a model of which only the versions ``remaining`` would be left."""
    for name, versions in workflows.items():
        for spec in versions:
            assert spec.graph is not None
            if model in spec.graph.owned:
                return (
                    f"it was registered with the workflow {name} and goes with it: DELETE /workflows/{name}"
                )
            for step, (called, version) in spec.graph.models.items():
                if called == model and (not remaining or (version is not None and version not in remaining)):
                    return (
                        f"the workflow {name} (version {spec.version}) calls it in its step {step}; "
                        f"remove that first: DELETE /workflows/{name}"
                    )
    return ""


def with_active_split(model: str, experiment: Experiment | None, rollout: Rollout | None) -> str:
    """Name the experiment or rollout that splits a model's traffic in place of its policy."""
    if experiment is not None:
        return (
            f"the experiment {experiment.name!r} is running; stop it first: DELETE "
            f"/experiments/{experiment.id}"
        )
    if rollout is not None and rollout.active:
        return (
            f"a rollout of version {rollout.plan.to} is under way; wait for its end, "
            f"or abort it: POST /models/{model}/rollout/abort"
        )
    return ""


def with_version_uses(
    model: str, version: str, policy: TrafficPolicy, experiment: Experiment | None, rollout: Rollout | None
) -> str:
    """Name what needs this version of a model."""
    if experiment is not None and version in experiment.versions:
        return with_active_split(model, experiment, None)
    if rollout is not None and rollout.active and version in (rollout.plan.to, rollout.baseline):
        return with_active_split(model, None, rollout)
    uses = [f"{share} basis points" for name, share in policy.versions.items() if name == version]
    uses += [f"the label {label!r}" for label, named in policy.labels.items() if named == version]
    uses += ["the shadow"] if policy.shadow is not None and policy.shadow.version == version else []
    if not uses:
        return ""
    return (
        f"the model's traffic policy ({policy.policy}) gives it {', '.join(uses)}; "
        f"take it out first: PUT /models/{model}/traffic, or DELETE for the default policy"
    )
