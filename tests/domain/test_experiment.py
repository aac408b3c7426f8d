"""Documents of experiments: valid ones, and the errors of invalid ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from serve_app.domain import validation
from serve_app.domain.experiment import Arm, Experiment, ExperimentMetric, Reward, read, read_rewards
from serve_app.domain.traffic_policy import BUCKET_COUNT, StickyKey
from serve_app.errors import BadRequest

DOCUMENT = {
    "name": "new ranking",
    "arms": {"a": {"version": "1.0", "weight": 5000}, "b": {"version": "2.0", "weight": 5000}},
    "metrics": [
        {"name": "clicks", "kind": "reward"},
        {"name": "seconds", "kind": "latency"},
        {"name": "score", "kind": "output", "path": "$.items[0].score", "goal": "decrease"},
    ],
    "baseline": "a",
    "key": {"header": "X-User"},
}


def test_a_document_and_back() -> None:
    experiment = read(DOCUMENT)
    assert experiment.arms == {"a": Arm("1.0", 5000), "b": Arm("2.0", 5000)}
    assert [metric.direction for metric in experiment.metrics] == ["increase", "decrease", "decrease"]
    assert experiment.key == StickyKey(header="x-user")
    stored = replace(experiment, id="e1", model="m", started_at=1.5)
    assert validation.read(Experiment, validation.write(stored)) == stored


def test_what_the_data_plane_does_for_it() -> None:
    trial = replace(read(DOCUMENT), id="e1").active_split
    assert (trial.id, trial.salt, trial.baseline, trial.key) == ("e1", "e1", "a", StickyKey(header="x-user"))
    assert trial.arms == {"a": "1.0", "b": "2.0"}
    assert sum(trial.allocation.owner_of(bucket) == "a" for bucket in range(BUCKET_COUNT)) == 5000
    assert trial.outputs == (("score", "$.items[0].score"),)
    assert trial.exposures and trial.rewards
    assert replace(read(DOCUMENT), id="e1", salt="mine").active_split.salt == "mine"


def test_who_was_given_what_is_remembered_only_where_somebody_may_ask() -> None:
    metrics = (ExperimentMetric("seconds"),)
    assert not replace(read(DOCUMENT), metrics=metrics, key=None).active_split.exposures
    assert replace(read(DOCUMENT), metrics=metrics).active_split.exposures, "different keys are counted"
    assert replace(read(DOCUMENT), key=None).active_split.exposures, "rewards come for them"


def test_two_arms_may_have_the_same_version() -> None:
    arms = {"a": {"version": "1.0", "weight": 5000}, "a2": {"version": "1.0", "weight": 5000}}
    assert read({**DOCUMENT, "arms": arms}).versions == {"1.0"}


def arms(**weights: int) -> dict[str, Any]:
    return {"arms": {name: {"version": "1.0", "weight": weight} for name, weight in weights.items()}}


def metric(**result: Any) -> dict[str, Any]:
    return {"metrics": [result]}


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (arms(a=10_000), "arms must be two or more, and are 1"),
        (arms(a=5000, b=4000), r"arms \(a: 5000, b: 4000\) sum to 9000 basis points; they must sum to 10000"),
        (arms(a=11_000, b=-1000), r"arms.b is a share of -1000 basis points; it cannot be negative"),
        (arms(a=10_000, b=0), "arms.b has no share, so nothing could be measured of it"),
        (arms(a=5000, **{"": 5000}), "an arm's name is empty"),
        ({"arms": {"a": {"version": "1.0"}}}, "arms.a.weight: Field required"),
        ({"baseline": "c"}, "baseline 'c' is none of the arms a, b"),
        ({"name": ""}, "name is empty"),
        ({"name": "n" * 201}, "name has 201 characters; it has at most 200"),
        ({"metrics": [{"name": "m" * 201}]}, "the name 'mmmmmmmmmmmmmmmmmmmm'... has 201 characters"),
        ({"metrics": []}, "metrics is empty"),
        ({"metrics": [{"name": "x"}, {"name": "x"}]}, "two metrics are called 'x'"),
        (metric(name=""), "a metric's name is empty"),
        (metric(name="x", kind="clicks"), "metrics.0.kind: Input should be 'latency'"),
        (
            metric(name="x", kind="reward", goal="up"),
            "metrics.0.goal: Input should be 'increase' or 'decrease'",
        ),
        (metric(name="x", kind="output"), "metric 'x': a path is wanted for the kind output, and only there"),
        (metric(name="x", path="$.a"), "metric 'x': a path is wanted for the kind output, and only there"),
        (metric(name="x", kind="output", path="a["), r"metric 'x': 'a\[' is no place in a JSON document"),
        (metric(name="x", kind="error_rate", per="event"), "metric 'x': only a reward is measured per event"),
        (metric(name="x", gaol="increase"), "unknown key 'metrics.0.gaol'; did you mean 'goal'"),
        ({"key": {}}, "a key is one of"),
        ({"key": {"header": "x", "cookie": "y"}}, "a key is one of"),
        ({"id": "mine"}, "unknown key 'id'; known here: name, arms"),
        ({"state": "stopped"}, "unknown key 'state'"),
        ({"metric": []}, "unknown key 'metric'; did you mean 'metrics'"),
    ],
)
def test_errors_name_the_place(result: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest, match=rf"^Experiment: .*{message}"):
        read({**DOCUMENT, **result})


@pytest.mark.parametrize("document", [None, [], "name", 3])
def test_an_experiment_is_an_object(document: Any) -> None:
    with pytest.raises(BadRequest, match="is a JSON object with name, arms, metrics and baseline"):
        read(document)


def test_events_come_alone_or_together() -> None:
    one = {"request_id": "r1", "value": 1}
    other = {"key": "ann", "value": -0.5, "metric": "clicks", "id": "purchase 7"}
    assert read_rewards(one) == [Reward(1.0, "r1")]
    assert read_rewards([one, other]) == [
        Reward(1.0, "r1"),
        Reward(-0.5, key="ann", metric="clicks", id="purchase 7"),
    ]
    assert read_rewards({"events": [one]}) == [Reward(1.0, "r1")]
    assert read_rewards({"key": "ann", "value": True}) == [Reward(1.0, key="ann")]


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "there is none"),
        ({"events": []}, "there is none"),
        ({"request_id": "r1"}, "value: Field required"),
        ({"value": 1}, "an event names either a request_id or a key"),
        ({"value": 1, "request_id": "r1", "key": "k"}, "an event names either a request_id or a key"),
        ({"value": float("inf"), "key": "k"}, "value is a finite number, and is inf"),
        ({"value": float("nan"), "key": "k"}, "value is a finite number, and is nan"),
        ({"value": 1e200, "key": "k"}, "value is between -1e\\+12 and 1e\\+12, and is 1e\\+200"),
        ({"value": "one", "key": "k"}, "value: Input should be a valid number"),
        ({"value": 1, "user": "k"}, "unknown key '0.user'; known here: value, request_id, key, metric, id"),
        ([{"value": 1, "key": "k"}, {"value": 1, "key": 7}], "1.key: Input should be a valid string"),
        ({"value": 1, "key": "k", "id": "i" * 201}, "id has 201 characters; it has at most 200"),
        ("r1", "they are an object, or a list of such, and this is str"),
        (None, "they are an object, or a list of such, and this is NoneType"),
        ({"events": {}}, "they are an object, or a list of such, and this is dict"),
        ({"events": [], "more": 1}, "unknown key 'more' beside 'events'"),
        ([{"value": 1, "key": "k"}, 7], "1: Input should be a dictionary or an instance of Reward"),
    ],
)
def test_errors_of_an_event_are_reported(document: Any, message: str) -> None:
    with pytest.raises(BadRequest, match=f"^Events: .*{message}"):
        read_rewards(document)


def test_as_many_events_at_once_and_no_more() -> None:
    one = {"key": "k", "value": 1}
    assert len(read_rewards([one] * 10_000)) == 10_000
    with pytest.raises(BadRequest, match=r"there are 10001; post at most 10000 at once"):
        read_rewards([one] * 10_001)
