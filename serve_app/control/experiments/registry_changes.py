"""Experiments in the registry: pure functions that start, stop and delete one."""

from __future__ import annotations

from dataclasses import replace

from serve_app.control import conflicts
from serve_app.control.registry import Registry, find_experiment, find_version, running_experiment
from serve_app.domain.experiment import Experiment
from serve_app.errors import BadRequest, Conflict


def start(registry: Registry, experiment: Experiment) -> Registry:
    """Add an experiment, which splits its model's traffic from now on.

    Raises ModelNotFound, VersionNotFound, BadRequest where an arm has no workers, and Conflict where another
    experiment or a rollout splits the traffic.
    """
    for version in sorted(experiment.versions):
        if find_version(registry, experiment.model, version).has_no_workers:
            raise BadRequest(
                f"Version {version} of model {experiment.model} has no workers, so its arm's requests "
                f"would all fail; "
                f"give it some first: PUT /models/{experiment.model}/{version}?min_worker=1&synchronous=true"
            )
    name, running = experiment.model, running_experiment(registry, experiment.model)
    if conflict := conflicts.with_active_split(name, running, registry.rollouts.get(name)):
        raise Conflict(f"The experiment {experiment.name!r} of model {name} cannot begin: {conflict}")
    return replace(registry, experiments={**registry.experiments, experiment.id: experiment})


def stop(registry: Registry, id: str, ended_at: float) -> Registry:
    """Stop an experiment; the same registry where it was stopped before. Raises ExperimentNotFound."""
    experiment = find_experiment(registry, id)
    if not experiment.running:
        return registry
    stopped = replace(experiment, state="stopped", ended_at=ended_at)
    return replace(registry, experiments={**registry.experiments, id: stopped})


def delete(registry: Registry, id: str) -> Registry:
    """Remove a stopped experiment. Raises ExperimentNotFound, and Conflict while it runs."""
    experiment = find_experiment(registry, id)
    if experiment.running:
        raise Conflict(
            f"The experiment {experiment.name!r} is running; stop it first: DELETE /experiments/{id}"
        )
    return replace(registry, experiments={key: e for key, e in registry.experiments.items() if key != id})
