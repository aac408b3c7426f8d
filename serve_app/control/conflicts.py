"""Who has a claim on a model's versions: its policy, its experiment, its rollout.

Pure functions over frozen values, for registry.py. Each says what stands against a change, and the cure; empty text
where nothing does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from serve_app.experiment import Experiment
from serve_app.policy import WHOLE, Policy
from serve_app.rollout import Rollout
from serve_app.types import ModelSpec


def wrong(policy: Policy, default: str, versions: Mapping[str, ModelSpec]) -> str:
    """What is wrong with a policy for a model that has these versions, among which are all that it names."""
    if taken := [label for label in policy.labels if label in versions]:
        return f"the label {taken[0]!r} is a version's name too; call it something else"
    shares = policy.versions or {default: WHOLE}
    shadow = policy.shadow.version if policy.shadow is not None else ""
    if shares.get(shadow) == WHOLE:
        return f"shadow.version {shadow} answers every call itself; name another version, or leave the shadow out"
    for version in [*(version for version, weight in policy.versions.items() if weight), *filter(None, [shadow])]:
        if versions[version].sleeps:
            return f"version {version} has no workers, so its calls would all fail; scale it first"
    return ""


def of_workflows(model: str, left: Collection[str], workflows: Mapping[str, Iterable[ModelSpec]]) -> str:
    """Which workflow asks a model of which only the versions ``left`` would stay."""
    for name, versions in workflows.items():
        for spec in versions:
            assert spec.graph is not None
            if model in spec.graph.owned:
                return f"it was registered with the workflow {name} and goes with it: DELETE /workflows/{name}"
            for step, (asked, version) in spec.graph.models.items():
                if asked == model and (not left or (version is not None and version not in left)):
                    return (
                        f"the workflow {name} (version {spec.version}) asks it in its step {step}; "
                        f"remove that first: DELETE /workflows/{name}"
                    )
    return ""


def on_model(model: str, experiment: Experiment | None, rollout: Rollout | None) -> str:
    """What deals out a model's calls in place of its policy."""
    if experiment is not None:
        return f"the experiment {experiment.name!r} is running; stop it first: DELETE /experiments/{experiment.id}"
    if rollout is not None and rollout.under_way:
        return (
            f"a rollout of version {rollout.plan.to} is under way; wait for its end, "
            f"or abort it: POST /models/{model}/rollout/abort"
        )
    return ""


def on_version(
    model: str, version: str, policy: Policy, experiment: Experiment | None, rollout: Rollout | None
) -> str:
    """What needs this version of a model."""
    if experiment is not None and version in experiment.versions:
        return on_model(model, experiment, None)
    if rollout is not None and rollout.under_way and version in (rollout.plan.to, rollout.baseline):
        return on_model(model, None, rollout)
    uses = [f"{share} basis points" for name, share in policy.versions.items() if name == version]
    uses += [f"the label {label!r}" for label, named in policy.labels.items() if named == version]
    uses += ["the shadow"] if policy.shadow is not None and policy.shadow.version == version else []
    if not uses:
        return ""
    return (
        f"the model's traffic policy ({policy.policy}) gives it {', '.join(uses)}; "
        f"take it out first: PUT /models/{model}/traffic, or DELETE for the default policy"
    )
