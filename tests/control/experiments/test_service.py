"""Experiments in the registry: begun and stopped by pure functions."""

from __future__ import annotations

from dataclasses import replace

import pytest

from serve_app.control.registry import (
    Registry,
    begin_experiment,
    experiment_of,
    find_experiment,
    forget_experiment,
    register,
    scale,
    stop_experiment,
    trial,
)
from serve_app.errors import BadRequest, ExperimentNotFound, InUse, ModelNotFound, VersionNotFound
from serve_app.experiment import Arm, Experiment, Metric
from serve_app.rollout import Plan, Rollout
from serve_app.types import ModelSpec

EXPERIMENT = Experiment(
    "first", {"a": Arm("1.0", 5000), "b": Arm("2.0", 5000)}, (Metric("seconds"),), "a", id="e1", model="m", began=1.0
)


@pytest.fixture
def models() -> Registry:
    registry = Registry()
    for name, version in (("m", "1.0"), ("m", "2.0"), ("n", "1.0")):
        spec = ModelSpec(name, version, f"{name}.mar", "d" * 64, "archive", min_workers=1, max_workers=1)
        registry = register(registry, spec)
    return registry


def test_it_deals_out_its_models_calls_until_it_is_stopped(models: Registry) -> None:
    begun = begin_experiment(models, EXPERIMENT)
    assert experiment_of(begun, "m") == EXPERIMENT
    assert trial(begun, "m") == EXPERIMENT.trial
    assert trial(begun, "n") is None
    over = stop_experiment(begun, "e1", 2.0)
    assert find_experiment(over, "e1") == replace(EXPERIMENT, state="stopped", ended=2.0)
    assert trial(over, "m") is None
    assert stop_experiment(over, "e1", 3.0) is over, "it ended when it was stopped first"
    again = begin_experiment(over, replace(EXPERIMENT, id="e2"))
    assert set(again.experiments) == {"e1", "e2"}


def test_one_at_a_time(models: Registry) -> None:
    begun = begin_experiment(models, EXPERIMENT)
    with pytest.raises(InUse, match=r"cannot begin: the experiment 'first' is running; .* DELETE /experiments/e1"):
        begin_experiment(begun, replace(EXPERIMENT, id="e2"))
    of_another = replace(EXPERIMENT, id="e2", model="n", arms={"a": Arm("1.0", 5000), "b": Arm("1.0", 5000)})
    assert experiment_of(begin_experiment(begun, of_another), "n") == of_another


def test_one_that_is_over_can_be_forgotten(models: Registry) -> None:
    begun = begin_experiment(models, EXPERIMENT)
    with pytest.raises(InUse, match="'first' is running; stop it first: DELETE /experiments/e1"):
        forget_experiment(begun, "e1")
    assert forget_experiment(stop_experiment(begun, "e1", 2.0), "e1") == models
    with pytest.raises(ExperimentNotFound):
        forget_experiment(models, "e1")


@pytest.mark.parametrize("state", ["starting", "running", "paused"])
def test_not_beside_a_rollout(models: Registry, state: str) -> None:
    rolling = replace(models, rollouts={"m": Rollout(Plan("2.0"), "r1", "m", "1.0", state, 1.0)})
    with pytest.raises(InUse, match=r"rollout of version 2\.0 is under way.*POST /models/m/rollout/abort"):
        begin_experiment(rolling, EXPERIMENT)


def test_after_a_rollout(models: Registry) -> None:
    rolled = replace(models, rollouts={"m": Rollout(Plan("2.0"), "r1", "m", "1.0", "promoted", 1.0)})
    assert trial(begin_experiment(rolled, EXPERIMENT), "m") == EXPERIMENT.trial


def test_what_is_not_there(models: Registry) -> None:
    with pytest.raises(ModelNotFound):
        begin_experiment(models, replace(EXPERIMENT, model="none"))
    with pytest.raises(VersionNotFound, match=r"3\.0"):
        begin_experiment(models, replace(EXPERIMENT, arms={"a": Arm("1.0", 5000), "b": Arm("3.0", 5000)}))
    for question in (lambda: find_experiment(models, "e1"), lambda: stop_experiment(models, "e1", 1.0)):
        with pytest.raises(ExperimentNotFound, match="^Experiment not found: e1$"):
            question()


def test_an_arm_needs_somebody_to_answer(models: Registry) -> None:
    nobody, _ = scale(models, "m", "2.0", 0, 0)
    with pytest.raises(BadRequest, match=r"Version 2\.0 of model m has no workers.*PUT /models/m/2\.0\?min_worker=1"):
        begin_experiment(nobody, EXPERIMENT)
    asleep, _ = scale(models, "m", "2.0", 0, 2)
    assert begin_experiment(asleep, EXPERIMENT).experiments, "it wakes with the first call"
