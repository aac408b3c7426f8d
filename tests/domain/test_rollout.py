"""What an operator may ask of a rollout, and what it comes to in the data plane."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest

from serve_app.domain import validation
from serve_app.domain.rollout import Guardrails, Rollout, RolloutDecision, RolloutPlan, read
from serve_app.domain.traffic_policy import StickyKey
from serve_app.errors import BadRequest


def under_way(plan: RolloutPlan, **more) -> Rollout:
    return replace(Rollout(plan, "r1", "m", "1.0", "running", 1.0), **more)


def test_only_the_version_is_required():
    assert read({"to": "2.0"}) == RolloutPlan(
        "2.0", (1, 5, 25, 50, 100), 60.0, Guardrails(0.01, 1.5, 0.0, 0.01, 0), 50, 600.0
    )


def test_every_field_can_be_set():
    document = {
        "to": "2.0",
        "steps": [0.5, 100],
        "bake_s": 0,
        "guardrails": {"error_rate": 0.2, "p99": None, "out_of_memory": 3},
        "min_calls": 0,
        "keep_warm_s": None,
        "key": {"header": "X-User"},
        "salt": "s",
    }
    guardrails = Guardrails(0.2, None, 0.0, 0.01, 3)
    assert read(document) == RolloutPlan(
        "2.0", (0.5, 100), 0, guardrails, 0, None, StickyKey(header="x-user"), "s"
    )
    assert read(validation.write(read(document))) == read(document)


@pytest.mark.parametrize(
    ("document", "result"),
    [
        ([], r'A rollout is a JSON object, such as \{"to": "2\.0"\}\.'),
        ({}, "Rollout: to: "),
        ({"to": ""}, "to is empty; name the version"),
        ({"to": 2.0}, "to: .*string"),
        ({"to": "2.0", "step": [1]}, "unknown key 'step'; did you mean 'steps'"),
        ({"to": "2.0", "guardrails": {"errors": 1}}, "unknown key 'guardrails.errors'"),
        (
            {"to": "2.0", "guardrails": {"error_rate": 1.5}},
            "guardrails.error_rate is a share from 0 to 1, or null",
        ),
        ({"to": "2.0", "guardrails": {"empty": -1}}, "guardrails.empty is a share"),
        (
            {"to": "2.0", "guardrails": {"p99": 0}},
            r"guardrails.p99 is a multiple of the baseline's p99, such as 1\.5",
        ),
        ({"to": "2.0", "guardrails": {"out_of_memory": -1}}, "guardrails.out_of_memory is a number from 0"),
        ({"to": "2.0", "steps": []}, "steps is empty"),
        ({"to": "2.0", "steps": "all"}, "steps: "),
        ({"to": "2.0", "steps": [0, 100]}, r"steps are shares from 0\.01 to 100 percent, and are 0, 100"),
        ({"to": "2.0", "steps": [1, 101]}, "steps are shares"),
        ({"to": "2.0", "steps": [float("nan"), 100]}, "steps are shares"),
        ({"to": "2.0", "steps": [5, 1, 100]}, "steps must grow .* and are 5, 1, 100"),
        ({"to": "2.0", "steps": [50, 99.999, 100]}, r"by 0\.01 percent at least"),
        ({"to": "2.0", "steps": [1, 50]}, "the last step is 50; a rollout ends at 100 percent"),
        ({"to": "2.0", "steps": [*range(1, 52), 100]}, "steps are 52; at most 50"),
        ({"to": "2.0", "bake_s": -1}, "bake_s is a number from 0, and is -1"),
        ({"to": "2.0", "bake_s": float("inf")}, "bake_s is a number from 0"),
        ({"to": "2.0", "min_calls": -1}, "min_calls is a number from 0"),
        ({"to": "2.0", "keep_warm_s": -1}, "keep_warm_s is a number from 0"),
        ({"to": "2.0", "key": {"header": "a", "cookie": "b"}}, "a key is one of"),
    ],
)
def test_what_is_wrong_is_named(document, result):
    with pytest.raises(BadRequest, match=result):
        read(document)


def test_the_share_grows_and_clients_of_the_candidate_keep_it():
    trials = [under_way(RolloutPlan("2.0"), step=step).active_split for step in range(5)]
    assert [trial.id for trial in trials] == [f"r1:{step}" for step in range(5)], "each step is counted apart"
    owners = [[trial.allocation.owner_of(bucket) for bucket in range(10_000)] for trial in trials]
    assert [owner.count("candidate") for owner in owners] == [100, 500, 2_500, 5_000, 10_000]
    for before, after in itertools.pairwise(owners):
        assert all(b == "candidate" for a, b in zip(before, after) if a == "candidate")
    assert trials[0].arms == {"candidate": "2.0", "baseline": "1.0"}
    assert trials[0].checks


def test_callers_are_dealt_anew_for_each_rollout_unless_it_says_otherwise():
    assert under_way(RolloutPlan("2.0")).active_split.salt == "r1", (
        "else the same callers would try every version first"
    )
    assert under_way(RolloutPlan("2.0", salt="s")).active_split.salt == "s"


@pytest.mark.parametrize(
    ("state", "on", "percent"),
    [
        ("starting", True, 0),
        ("running", True, 5),
        ("paused", True, 5),
        ("promoted", False, 100),
        ("rolled_back", False, 0),
        ("aborted", False, 0),
    ],
)
def test_states(state, on, percent):
    rollout = under_way(RolloutPlan("2.0"), state=state, step=1)
    assert (rollout.active, rollout.percent) == (on, percent)


def test_it_is_stored_whole():
    decision = RolloutDecision(1.5, "step", 5.0, "because", {"candidate": {"calls": 3}})
    plan = RolloutPlan("2.0", key=StickyKey(json="user.id"))
    rollout = under_way(
        plan, step=1, step_started_at=2.0, workers_added=True, previous_workers=(1, 2), decisions=(decision,)
    )
    assert validation.read(Rollout, json.loads(json.dumps(validation.write(rollout)))) == rollout
