"""Experiments in the registry: begun and stopped by pure functions."""

from __future__ import annotations

from dataclasses import replace

import pytest

from serve_app.control.experiments.registry_changes import delete as delete_experiment
from serve_app.control.experiments.registry_changes import start as start_experiment
from serve_app.control.experiments.registry_changes import stop as stop_experiment
from serve_app.control.registry import Registry, active_split, find_experiment, running_experiment
from serve_app.control.registry_changes import register, scale
from serve_app.domain.experiment import Arm, Experiment, ExperimentMetric
from serve_app.domain.model import ModelSpec
from serve_app.domain.rollout import Rollout, RolloutPlan
from serve_app.errors import BadRequest, Conflict, ExperimentNotFound, ModelNotFound, VersionNotFound

EXPERIMENT = Experiment(
    "first",
    {"a": Arm("1.0", 5000), "b": Arm("2.0", 5000)},
    (ExperimentMetric("seconds"),),
    "a",
    id="e1",
    model="m",
    started_at=1.0,
)


@pytest.fixture
def models() -> Registry:
    registry = Registry()
    for name, version in (("m", "1.0"), ("m", "2.0"), ("n", "1.0")):
        spec = ModelSpec(name, version, f"{name}.mar", "d" * 64, "archive", min_workers=1, max_workers=1)
        registry = register(registry, spec)
    return registry


def test_it_deals_out_its_models_calls_until_it_is_stopped(models: Registry) -> None:
    begun = start_experiment(models, EXPERIMENT)
    assert running_experiment(begun, "m") == EXPERIMENT
    assert active_split(begun, "m") == EXPERIMENT.active_split
    assert active_split(begun, "n") is None
    over = stop_experiment(begun, "e1", 2.0)
    assert find_experiment(over, "e1") == replace(EXPERIMENT, state="stopped", ended_at=2.0)
    assert active_split(over, "m") is None
    assert stop_experiment(over, "e1", 3.0) is over, "it ended when it was stopped first"
    again = start_experiment(over, replace(EXPERIMENT, id="e2"))
    assert set(again.experiments) == {"e1", "e2"}


def test_one_at_a_time(models: Registry) -> None:
    begun = start_experiment(models, EXPERIMENT)
    with pytest.raises(
        Conflict, match=r"cannot begin: the experiment 'first' is running; .* DELETE /experiments/e1"
    ):
        start_experiment(begun, replace(EXPERIMENT, id="e2"))
    of_another = replace(EXPERIMENT, id="e2", model="n", arms={"a": Arm("1.0", 5000), "b": Arm("1.0", 5000)})
    assert running_experiment(start_experiment(begun, of_another), "n") == of_another


def test_one_that_is_over_can_be_forgotten(models: Registry) -> None:
    begun = start_experiment(models, EXPERIMENT)
    with pytest.raises(Conflict, match="'first' is running; stop it first: DELETE /experiments/e1"):
        delete_experiment(begun, "e1")
    assert delete_experiment(stop_experiment(begun, "e1", 2.0), "e1") == models
    with pytest.raises(ExperimentNotFound):
        delete_experiment(models, "e1")


@pytest.mark.parametrize("state", ["starting", "running", "paused"])
def test_not_beside_a_rollout(models: Registry, state: str) -> None:
    rolling = replace(models, rollouts={"m": Rollout(RolloutPlan("2.0"), "r1", "m", "1.0", state, 1.0)})
    with pytest.raises(Conflict, match=r"rollout of version 2\.0 is under way.*POST /models/m/rollout/abort"):
        start_experiment(rolling, EXPERIMENT)


def test_after_a_rollout(models: Registry) -> None:
    rolled = replace(models, rollouts={"m": Rollout(RolloutPlan("2.0"), "r1", "m", "1.0", "promoted", 1.0)})
    assert active_split(start_experiment(rolled, EXPERIMENT), "m") == EXPERIMENT.active_split


def test_what_is_not_there(models: Registry) -> None:
    with pytest.raises(ModelNotFound):
        start_experiment(models, replace(EXPERIMENT, model="none"))
    with pytest.raises(VersionNotFound, match=r"3\.0"):
        start_experiment(models, replace(EXPERIMENT, arms={"a": Arm("1.0", 5000), "b": Arm("3.0", 5000)}))
    for question in (lambda: find_experiment(models, "e1"), lambda: stop_experiment(models, "e1", 1.0)):
        with pytest.raises(ExperimentNotFound, match=r"^Experiment not found: e1$"):
            question()


def test_an_arm_needs_somebody_to_answer(models: Registry) -> None:
    nobody, _ = scale(models, "m", "2.0", 0, 0)
    with pytest.raises(
        BadRequest, match=r"Version 2\.0 of model m has no workers.*PUT /models/m/2\.0\?min_worker=1"
    ):
        start_experiment(nobody, EXPERIMENT)
    asleep, _ = scale(models, "m", "2.0", 0, 2)
    assert start_experiment(asleep, EXPERIMENT).experiments, "it wakes with the first call"
