"""What a rollout changes in the registry, from its beginning to the cooling of the version that it
replaced.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from serve_app.control.experiments.registry_changes import start as start_experiment
from serve_app.control.experiments.registry_changes import stop as stop_experiment
from serve_app.control.persistence.database import Database
from serve_app.control.registry import (
    Registry,
    TableBuilder,
    active_split,
    desired_states,
    find_version,
)
from serve_app.control.registry_changes import register, scale, set_default, set_policy, unregister
from serve_app.control.rollouts import registry_changes, state_machine
from serve_app.dataplane.experiment_collector import ArmStats
from serve_app.dataplane.routing import version_router
from serve_app.domain import traffic_policy as policies
from serve_app.domain.experiment import Arm, Experiment, ExperimentMetric
from serve_app.domain.model import ModelSpec
from serve_app.domain.rollout import Rollout, RolloutPlan
from serve_app.errors import BadRequest, Conflict, ModelNotFound, RolloutNotFound, VersionNotFound

PLAN = RolloutPlan("2.0", steps=(5, 100), bake_s=10.0, min_calls=50, keep_warm_s=600.0)
CALLS = {"candidate": ArmStats(100), "baseline": ArmStats(1_900)}


@pytest.fixture
def models() -> Registry:
    registry = Registry()
    for version, workers in (("1.0", 2), ("2.0", 1), ("3.0", 0)):
        spec = ModelSpec("m", version, "m.mar", "d" * 64, "archive", min_workers=workers, max_workers=workers)
        registry = register(registry, spec)
    return registry


def begun(registry: Registry, plan: RolloutPlan = PLAN, id: str = "r1", now: float = 100.0) -> Registry:
    return registry_changes.start(registry, "m", plan, id, now)


def running(registry: Registry, plan: RolloutPlan = PLAN) -> Registry:
    after = begun(registry, plan)
    return registry_changes.apply_decision(after, state_machine.enter_first_step(after.rollouts["m"], 101.0))


def promoted(registry: Registry, plan: RolloutPlan = PLAN) -> Registry:
    after, now = running(registry, plan), 101.0
    while (rollout := after.rollouts["m"]).active:
        now += 10
        after = registry_changes.apply_decision(
            after, state_machine.evaluate(rollout, [CALLS] * (rollout.step + 1), now)
        )
    assert rollout.state == "promoted"
    return after


def routes(registry: Registry) -> dict[str, str]:
    return {want.spec.version: want.route for want in desired_states(registry).values()}


def workers(registry: Registry, version: str) -> tuple[int, int]:
    spec = find_version(registry, "m", version)
    return spec.min_workers, spec.max_workers


class TestBegin:
    def test_the_baseline_has_all_calls_until_the_candidate_runs(self, models):
        after = begun(models)
        rollout = registry_changes.find(after, "m")
        assert (rollout.baseline, rollout.state, rollout.workers_added) == ("1.0", "starting", False)
        assert active_split(after, "m") is None
        assert routes(after)["1.0"] == "/predictions/m", "and the fast path"
        assert active_split(running(models), "m").id == "r1:0"

    def test_a_candidate_without_workers_gets_as_many_as_the_baseline_has(self, models):
        after = begun(models, replace(PLAN, to="3.0"))
        assert workers(after, "3.0") == (2, 2)
        assert after.rollouts["m"].workers_added
        assert workers(begun(models), "2.0") == (1, 1), "who has workers keeps them"

    def test_a_version_without_workers_follows_its_load_as_the_answering_one_does(
        self, models: Registry
    ) -> None:
        follows, _ = scale(models, "m", "1.0", 1, 4, {"upscale_delay_s": 0.5})
        after = begun(follows, replace(PLAN, to="3.0"))
        assert workers(after, "3.0") == (1, 4)
        assert find_version(after, "m", "3.0").scaling.upscale_delay_s == 0.5

    @pytest.mark.parametrize("end", ["rolled_back", "aborted"])
    def test_one_that_never_ran_gives_them_back(self, models, end):
        after = begun(models, replace(PLAN, to="3.0"))
        rollout = after.rollouts["m"]
        over = state_machine.evaluate(rollout, [], 105.0, "no weights")
        if end == "aborted":
            over = state_machine.apply_action(rollout, "abort", 105.0, [])
        after = registry_changes.apply_decision(after, over)
        assert workers(after, "3.0") == (0, 0)
        assert after.rollouts["m"].state == end
        assert replace(after, rollouts={}) == models, "nothing else has changed"

    def test_one_that_ran_keeps_them(self, models):
        after = running(models, replace(PLAN, to="3.0"))
        after = registry_changes.apply_decision(
            after, state_machine.evaluate(after.rollouts["m"], [CALLS], 105.0, "killed")
        )
        assert workers(after, "3.0") == (2, 2)

    def test_all_by_policy_is_a_baseline_too(self, models):
        whole = set_policy(models, "m", policies.read({"versions": {"2.0": 10_000}}))
        after = registry_changes.start(
            scale(whole, "m", "3.0", 1, 1)[0], "m", replace(PLAN, to="1.0"), "r1", 1.0
        )
        assert after.rollouts["m"].baseline == "2.0"

    def test_unknown_names(self, models):
        with pytest.raises(ModelNotFound):
            registry_changes.start(models, "n", PLAN, "r1", 1.0)
        with pytest.raises(VersionNotFound):
            begun(models, replace(PLAN, to="4.0"))
        with pytest.raises(
            RolloutNotFound, match=r"^Model m has had no rollout; begin one: POST /models/m/rollout$"
        ):
            registry_changes.find(models, "m")
        with pytest.raises(ModelNotFound):
            registry_changes.find(models, "n")

    def test_not_to_the_version_that_has_all(self, models):
        with pytest.raises(BadRequest, match=r"version 1\.0 has all requests of model m already"):
            begun(models, replace(PLAN, to="1.0"))

    def test_not_beside_nobody(self, models):
        nobody = scale(models, "m", "1.0", 0, 0)[0]
        with pytest.raises(BadRequest, match=r"1\.0, which has all requests.*PUT /models/m/2\.0/set-default"):
            begun(nobody)

    def test_not_beside_a_split(self, models):
        split = set_policy(models, "m", policies.read({"versions": {"1.0": 9_000, "2.0": 1_000}}))
        with pytest.raises(Conflict, match=r"splits requests among several versions.*PUT /models/m/traffic"):
            begun(split)

    def test_not_beside_an_experiment(self, models):
        arms = {"a": Arm("1.0", 5_000), "b": Arm("2.0", 5_000)}
        experiment = Experiment("first", arms, (ExperimentMetric("seconds"),), "a", id="e1", model="m")
        tried = start_experiment(models, experiment)
        with pytest.raises(
            Conflict, match="the experiment 'first' is running; stop it first: DELETE /experiments/e1"
        ):
            begun(tried)
        begun(stop_experiment(tried, "e1", 1.0))

    def test_not_beside_another(self, models):
        with pytest.raises(
            Conflict, match=r"a rollout of version 2\.0 is under way.*POST /models/m/rollout/abort"
        ):
            begun(begun(models), replace(PLAN, to="3.0"))

    def test_while_it_is_on_nobody_else_deals(self, models):
        after = running(models)
        with pytest.raises(Conflict):
            set_default(after, "m", "2.0")
        with pytest.raises(Conflict):
            set_policy(after, "m", policies.read({"versions": {"1.0": 9_000, "2.0": 1_000}}))
        for version in ("1.0", "2.0"):
            with pytest.raises(Conflict, match=r"a rollout of version 2\.0 is under way"):
                unregister(after, "m", version)


class TestEnd:
    def test_promoted_it_is_the_default_on_the_fast_path(self, models):
        assert set(routes(running(models)).values()) == {"/predictions/m/1.0", "/predictions/m/2.0"}
        after = promoted(models)
        assert after.models["m"].default == "2.0"
        assert active_split(after, "m") is None
        assert routes(after) == {"1.0": "/predictions/m/1.0", "2.0": "/predictions/m"}
        assert workers(after, "1.0") == (2, 2)
        assert after.rollouts["m"].previous_workers == (2, 2)

    def test_of_its_policy_what_speaks_of_no_share_stays(self, models):
        result = {"versions": {"1.0": 10_000}, "header": "x-version", "labels": {"stable": "1.0"}}
        after = promoted(set_policy(models, "m", policies.read({**result, "shadow": {"version": "2.0"}})))
        assert policies.write(after.models["m"].policy) == {
            "policy": "default",
            "header": "x-version",
            "labels": {"stable": "1.0"},
        }
        assert version_router.sole_version(TableBuilder().build(after, {}, {}, 1, True).models["m"]) == "2.0"

    def test_a_shadow_of_another_stays(self, models):
        shadowed = set_policy(
            scale(models, "m", "3.0", 1, 1)[0], "m", policies.read({"shadow": {"version": "3.0"}})
        )
        assert promoted(shadowed).models["m"].policy.shadow.version == "3.0"

    @pytest.mark.parametrize("how", ["rolled_back", "aborted"])
    def test_back_everything_is_as_before(self, models, how):
        after = running(models)
        rollout = after.rollouts["m"]
        bad = {"candidate": ArmStats(100, failed={"handler_failed": 50}), "baseline": ArmStats(1_900)}
        over = state_machine.evaluate(rollout, [bad], 105.0)
        if how == "aborted":
            over = state_machine.apply_action(rollout, "abort", 105.0, [bad])
        after = registry_changes.apply_decision(after, over)
        assert after.rollouts["m"].state == how
        assert replace(after, rollouts={}) == models
        assert active_split(after, "m") is None
        assert routes(after)["1.0"] == "/predictions/m"


class TestCooling:
    def cooled(self, registry: Registry) -> Registry:
        after = registry_changes.scale_down_previous(registry, registry.rollouts["m"], 700.0)
        assert after.rollouts["m"].previous_workers is None
        assert after.rollouts["m"].decisions[-1].verdict == "scaled_down"
        return after

    def test_its_workers_are_taken_away(self, models):
        after = self.cooled(promoted(models))
        assert workers(after, "1.0") == (0, 0)
        assert after.rollouts["m"].decisions[-1].reason == "its workers are taken away"
        assert registry_changes.scale_down_previous(after, after.rollouts["m"], 701.0) is after

    def test_never_where_the_plan_says_so(self, models):
        after = promoted(models, replace(PLAN, keep_warm_s=None))
        assert after.rollouts["m"].previous_workers is None

    @pytest.mark.parametrize(
        ("change", "why"),
        [
            (lambda r: scale(r, "m", "1.0", 1, 3)[0], "its workers were changed meanwhile"),
            (lambda r: set_default(r, "m", "1.0")[0], "the default version was changed meanwhile"),
            (lambda r: set_policy(r, "m", policies.read({"labels": {"old": "1.0"}})), "the label 'old'"),
            (lambda r: set_policy(r, "m", policies.read({"shadow": {"version": "1.0"}})), "the shadow"),
            (
                lambda r: set_policy(r, "m", policies.read({"versions": {"1.0": 5, "2.0": 9_995}})),
                "5 basis points",
            ),
        ],
    )
    def test_not_where_somebody_has_a_use_for_it(self, models, change, why):
        changed = change(promoted(models))
        after = self.cooled(changed)
        assert workers(after, "1.0") == workers(changed, "1.0") != (0, 0)
        assert after.rollouts["m"].decisions[-1].reason.startswith("it keeps its workers, because ")
        assert why in after.rollouts["m"].decisions[-1].reason

    def test_one_that_was_removed(self, models):
        after = self.cooled(unregister(promoted(models), "m", "1.0")[0])
        assert after.rollouts["m"].decisions[-1].reason == "it was removed"

    def test_the_next_rollout_does_not_wait_for_it(self, models):
        after = begun(promoted(models), replace(PLAN, to="3.0"), "r2", 200.0)
        assert workers(after, "1.0") == (0, 0)
        assert after.rollouts["m"].id == "r2"

    def test_the_way_back_finds_it_warm(self, models):
        after = begun(promoted(models), replace(PLAN, to="1.0"), "r2", 200.0)
        assert workers(after, "1.0") == (2, 2)
        assert (after.rollouts["m"].baseline, after.rollouts["m"].workers_added) == ("2.0", False)


def test_the_next_leader_continues_the_rollout(models, tmp_path: Path):
    """Every decision in the database, and another process after each of them."""
    url, before, after = f"sqlite:///{tmp_path / 'registry.db'}", Registry(), models
    states: list[tuple[str, int]] = []
    now = 100.0
    while True:
        database = Database(url)
        assert database.load() == before
        database.save(before, after)
        database.close()
        reader = Database(url)
        before = reader.load()
        reader.close()
        rollout: Rollout | None = before.rollouts.get("m")
        if rollout is not None:
            states.append((rollout.state, rollout.step))
        if rollout is None:
            after = begun(before, now=now)
        elif rollout.state == "starting":
            after = registry_changes.apply_decision(before, state_machine.enter_first_step(rollout, now))
        elif rollout.active:
            figures = [CALLS] * (rollout.step + 1)
            assert state_machine.evaluate(rollout, figures, rollout.step_started_at + 9.9) is rollout
            after = registry_changes.apply_decision(
                before, state_machine.evaluate(rollout, figures, rollout.step_started_at + 10)
            )
        elif rollout.previous_workers is not None:
            after = registry_changes.scale_down_previous(before, rollout, now)
        else:
            break
        now += 7
    assert states == [("starting", 0), ("running", 0), ("running", 1), ("promoted", 1), ("promoted", 1)]
    assert [d.verdict for d in before.rollouts["m"].decisions] == [
        "started",
        "step",
        "step",
        "promoted",
        "scaled_down",
    ]
