"""What a rollout decides by its figures and the time; nothing here waits for either."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from serve_app.control.rollouts import state_machine
from serve_app.control.rollouts.guardrails import Figures, evaluate_guardrails
from serve_app.control.rollouts.state_machine import (
    apply_action,
    create,
    describe_wait,
    enter_first_step,
    evaluate,
    format_decision,
    to_document,
)
from serve_app.dataplane.experiment_collector import ArmStats, bin_index
from serve_app.domain.rollout import Guardrails, Rollout, RolloutPlan

PLAN = RolloutPlan("2.0", bake_s=60.0, min_calls=50)
QUICK = 0.01  # seconds


def arm(calls: int = 0, failed: int = 0, reason: str = "handler_failed", slow: int = 0, **more) -> ArmStats:
    """Return the statistics of calls of 10 ms, but for ``slow`` ones of 100."""
    latency = {bin_index(QUICK): calls - failed - slow, bin_index(10 * QUICK): slow}
    return ArmStats(calls, calls, {reason: failed} if failed else {}, latency=latency, **more)


def split(candidate: ArmStats, baseline: ArmStats | None = None) -> dict[str, ArmStats]:
    return {"candidate": candidate, "baseline": arm(10_000) if baseline is None else baseline}


def at(step: int, plan: RolloutPlan = PLAN, since: float = 100.0) -> Rollout:
    return replace(enter_first_step(create(plan, "r1", "m", "1.0", False, 1.0), since), step=step)


def reading(name: str, rollout: Rollout, figures: Figures):
    return next(r for r in evaluate_guardrails(rollout, figures) if r.name == name)


def verdict(rollout: Rollout) -> str:
    return rollout.decisions[-1].verdict


class TestTheWay:
    def test_a_good_candidate_takes_every_step_and_is_promoted(self):
        rollout = enter_first_step(create(PLAN, "r1", "m", "1.0", False, 0.0), 0.0)
        now, figures = 0.0, []
        while rollout.active:
            figures.append(split(arm(50)))
            step = rollout.step
            assert evaluate(rollout, figures, now + 59.9) is rollout, "not before its bake time is over"
            now += 60
            rollout = evaluate(rollout, figures, now)
            assert rollout.step == step + 1 or rollout.state == "promoted"
        assert [decision.percent for decision in rollout.decisions] == [0, 1, 5, 25, 50, 100, 100]
        assert (rollout.state, rollout.percent, rollout.ended_at) == ("promoted", 100, 300)
        assert rollout.decisions[-1].figures["candidate"]["calls"] == 50
        assert "1.0 keeps its workers for 600 s" in rollout.decisions[-1].reason

    def test_it_waits_for_calls_and_says_so_once(self):
        rollout = at(0)
        held = evaluate(rollout, [split(arm(12))], 160.0)
        assert (verdict(held), held.step, held.percent) == ("held", 0, 1)
        assert "60 s are over, and 38 requests of the candidate are missing" in held.decisions[-1].reason
        assert evaluate(held, [split(arm(49))], 170.0) is held
        assert evaluate(held, [split(arm(50))], 170.0).step == 1

    def test_calls_of_the_steps_before_do_not_count_for_this_one(self):
        rollout = at(1)
        assert verdict(evaluate(rollout, [split(arm(500)), split(arm(3))], 200.0)) == "held"

    @pytest.mark.parametrize(
        ("rollout", "calls", "now", "result"),
        [
            (create(PLAN, "r1", "m", "1.0", False, 1.0), 0, 2.0, "the workers of 2.0"),
            (at(0), 50, 147.2, "13 s of bake time"),
            (at(0), 12, 170.0, "38 more requests of the candidate"),
            (at(0), 49, 159.5, "1 s of bake time and 1 more request of the candidate"),
            (at(0), 50, 170.0, "the next look"),
            (replace(at(0), state="paused"), 12, 170.0, "somebody to resume it"),
            (replace(at(0), state="aborted"), 12, 170.0, ""),
        ],
    )
    def test_what_it_waits_for(self, rollout, calls, now, result):
        assert describe_wait(rollout, [split(arm(calls))], now) == result

    def test_a_candidate_that_cannot_run_goes_back(self):
        starting = create(PLAN, "r1", "m", "1.0", True, 1.0)
        assert "gets as many workers as 1.0 has" in starting.decisions[0].reason
        back = evaluate(starting, [], 5.0, "ValueError: no weights")
        assert (back.state, back.percent, back.ended_at) == ("rolled_back", 0, 5.0)
        why = "no worker of 2.0 runs: ValueError: no weights; 1.0 has all requests, 2.0 loses the workers"
        assert back.decisions[-1].reason == f"{why} that it was given"

    @pytest.mark.parametrize("state", ["running", "paused"])
    def test_one_that_runs_no_more_goes_back_and_keeps_its_workers(self, state):
        back = evaluate(
            replace(at(1), workers_added=True, state=state), [split(arm(9)), split(arm(9))], 101.0, "killed"
        )
        assert back.state == "rolled_back"
        assert back.decisions[-1].reason.endswith("2.0 keeps its workers")

    def test_decisions_are_bounded(self):
        rollout = at(0)
        for _ in range(400):
            rollout = apply_action(apply_action(rollout, "pause", 1.0, []), "resume", 2.0, [])
        assert len(rollout.decisions) == 500


class TestSteering:
    def test_paused_it_stays_and_is_still_watched(self):
        paused = apply_action(at(1), "pause", 110.0, [])
        assert (paused.state, paused.percent) == ("paused", 5)
        good, bad = split(arm(1_000)), split(arm(1_000, failed=200))
        assert evaluate(paused, [good, good], 1e6) is paused
        assert evaluate(paused, [good, bad], 111.0).state == "rolled_back"

    def test_resumed_it_goes_on_where_it_was(self):
        resumed = apply_action(apply_action(at(1), "pause", 110.0, []), "resume", 130.0, [])
        assert (resumed.state, resumed.step_started_at, resumed.step) == ("running", 100.0, 1)
        assert evaluate(resumed, [split(arm(50))] * 2, 160.0).step == 2, (
            "it held for its bake time all the while"
        )

    def test_aborted_the_baseline_has_all(self):
        aborted = apply_action(at(2), "abort", 110.0, [split(arm(50))] * 3)
        assert (aborted.state, aborted.percent, aborted.ended_at) == ("aborted", 0, 110.0)
        assert aborted.decisions[-1].figures["candidate"]["calls"] == 50

    def test_what_is_so_already_stays_as_it_is(self):
        paused = apply_action(at(1), "pause", 110.0, [])
        assert apply_action(paused, "pause", 111.0, []) is paused
        assert apply_action(at(1), "resume", 111.0, []) == at(1)

    @pytest.mark.parametrize("verb", ["pause", "resume", "abort"])
    def test_nothing_steers_what_is_over(self, verb):
        with pytest.raises(
            ValueError, match=r"it is over \(aborted\); begin another: POST /models/m/rollout"
        ):
            apply_action(replace(at(1), state="aborted"), verb, 110.0, [])

    @pytest.mark.parametrize("verb", ["pause", "resume"])
    def test_before_its_first_step_it_can_only_be_aborted(self, verb):
        starting = create(PLAN, "r1", "m", "1.0", False, 1.0)
        with pytest.raises(ValueError, match=r"the workers of 2.0 are starting"):
            apply_action(starting, verb, 2.0, [])
        assert apply_action(starting, "abort", 2.0, []).state == "aborted"


class TestGuardrails:
    def test_errors_and_their_messages(self):
        figures = [split(arm(82), arm(7_806)), split(arm(412, failed=42), arm(7_806))]
        back = evaluate(at(1), figures, 101.0)
        assert (back.state, back.percent) == ("rolled_back", 0)
        [broken] = back.decisions[-1].figures["guardrails"]
        assert (broken["name"], broken["limit"], broken["calls"]) == ("error_rate", 0.01, 494)
        assert broken["value"] == pytest.approx(42 / 494)
        assert 0.02 < broken["surely"] < 0.06
        result = format_decision(at(1), back)
        assert result.startswith("m: 2.0 rolled back at 5 %: error_rate 8.5 % of 494 requests against 0 % ")
        assert "; at most 1 % more is allowed (surely above: " in result
        assert result.endswith(" %); 1.0 has all requests, 2.0 keeps its workers")

    def test_one_that_always_fails_goes_back_within_few_calls(self):
        """At one percent, call by call, as they come."""
        for calls in range(1, 30):
            if (
                evaluate(at(0), [split(arm(calls, failed=calls), arm(99 * calls))], 101.0).state
                == "rolled_back"
            ):
                break
        assert calls <= 8

    def test_one_that_always_fails_at_half_of_the_calls(self):
        plan = replace(PLAN, steps=(50, 100))
        for calls in range(1, 60):
            if (
                evaluate(at(0, plan), [split(arm(calls, failed=calls), arm(calls))], 101.0).state
                == "rolled_back"
            ):
                break
        assert calls <= 30

    def test_a_fault_of_everybodys_is_none_of_the_candidates(self):
        figures = [split(arm(1_000, failed=300), arm(19_000, failed=5_700))]
        assert evaluate(at(0), figures, 101.0).active

    def test_a_bad_hour_weighs_the_same_on_both_sides(self):
        """Ten percent of all calls fail in this step and none did before: added up plainly, the candidate
        looks bad.
        """
        before, now = split(arm(100), arm(9_900)), split(arm(5_000, failed=500), arm(5_000, failed=500))
        plan = replace(PLAN, steps=(1, 50, 100))
        shown = reading("error_rate", at(1, plan), [before, now])
        assert shown.value == pytest.approx(shown.baseline, abs=1e-9)
        assert (shown.calls, shown.baseline_calls) == (5_100, 14_900)
        assert (shown.surely, shown.broken) == (0.0, False)

    def test_what_is_too_rare_for_one_step_is_found_in_several(self):
        plan = replace(PLAN, steps=(1, 2, 3, 4, 100))
        figures = [split(arm(60, failed=4), arm(6_000)) for _ in range(4)]
        shown = [reading("error_rate", at(step, plan), figures[: step + 1]).broken for step in range(4)]
        assert shown[0] is False
        assert shown[3] is True

    def test_slowness(self):
        slow = split(arm(400, slow=40), arm(8_000, slow=8))
        shown = reading("p99", at(0), [slow])
        assert shown.broken
        assert (shown.value, shown.baseline) == (pytest.approx(0.1, rel=0.06), pytest.approx(0.01, rel=0.06))
        assert "10 % took longer than 1.5 times that, 1 % may (surely above: " in shown.words
        assert not reading("p99", at(0), [split(arm(400, slow=2), arm(8_000, slow=8))]).broken
        patient = replace(PLAN, guardrails=Guardrails(p99=20.0))
        assert not reading("p99", at(0, patient), [slow]).broken

    def test_slowness_of_everybody(self):
        assert not reading("p99", at(0), [split(arm(400, slow=40), arm(8_000, slow=800))]).broken

    @pytest.mark.parametrize(("calls", "others"), [(400, 99), (99, 10_000)])
    def test_of_few_calls_slowness_is_not_known(self, calls, others):
        """The first calls of new workers are slow, and that is no fault of the version's."""
        shown = reading("p99", at(0), [split(arm(calls, slow=calls), arm(others))])
        assert not shown.broken
        assert shown.words == "p99: not known before 100 answers of each"

    def test_slow_first_calls_are_forgiven(self):
        assert not reading("p99", at(0), [split(arm(100, slow=4), arm(9_900))]).broken

    @pytest.mark.parametrize("name", ["non_finite", "empty"])
    def test_answers_that_hold_nothing_of_use(self, name):
        figures = [split(arm(200, **{name: 20}), arm(10_000))]
        back = evaluate(at(0), figures, 101.0)
        assert back.state == "rolled_back"
        assert f"{name} 10 % of 200 answers against 0 % of 10,000; at most " in back.decisions[-1].reason
        assert evaluate(at(0), [split(arm(200, **{name: 20}), arm(10_000, **{name: 1_000}))], 101.0).active

    def test_memory_that_ran_out(self):
        lenient = replace(PLAN, guardrails=Guardrails(error_rate=None))
        once = [split(arm(200, failed=1, reason="out_of_memory"))]
        back = evaluate(at(0, lenient), once, 101.0)
        assert back.state == "rolled_back"
        result = "out_of_memory 0.5 % of 200 requests against 0 % of 10,000; 1 in all, at most 0 may be"
        assert back.decisions[-1].reason.startswith(result)
        thrice = replace(lenient, guardrails=replace(lenient.guardrails, out_of_memory=3))
        assert evaluate(at(0, thrice), once, 101.0).active
        both = [
            split(arm(200, failed=1, reason="out_of_memory"), arm(10_000, failed=50, reason="out_of_memory"))
        ]
        assert evaluate(at(0, lenient), both, 101.0).active, "the baseline's run out as often"

    def test_what_is_passed_over(self):
        blind = replace(PLAN, guardrails=Guardrails(None, None, None, None, None))
        assert evaluate_guardrails(at(0, blind), [split(arm(400, failed=400))]) == []

    def test_at_all_calls_the_baseline_is_that_of_the_steps_before(self):
        plan = replace(PLAN, steps=(50, 100))
        figures = [split(arm(4_000), arm(4_000)), {"candidate": arm(400, failed=40)}]
        back = evaluate(at(1, plan), figures, 101.0)
        assert back.state == "rolled_back"
        assert (
            "error_rate 10 % of 400 requests against 0 % of 4,000 in the steps before"
            in back.decisions[-1].reason
        )
        assert not back.decisions[-1].figures["guardrails"][0]["concurrent"]

    def test_at_all_calls_from_the_first_on_the_margin_is_all_there_is(self):
        plan = replace(PLAN, steps=(100,))
        back = evaluate(at(0, plan), [{"candidate": arm(400, failed=40)}], 101.0)
        assert "error_rate 10 % of 400 requests, with nothing to compare with; at most 1 % is allowed" in (
            back.decisions[-1].reason
        )
        assert evaluate(at(0, plan), [{"candidate": arm(400)}], 101.0).active

    def test_nothing_is_known_without_calls(self):
        for step, plan in ((0, PLAN), (4, PLAN), (0, replace(PLAN, steps=(100,)))):
            assert not any(r.broken for r in evaluate_guardrails(at(step, plan), [{}] * (step + 1)))
            assert evaluate(at(step, plan), [{}] * (step + 1), 101.0).active
        assert reading("error_rate", at(0), []).words.startswith("error_rate: no requests yet")


class TestLooking:
    """A look after every few calls, through all steps; a fifth of all calls is slow, and each seventeenth
    fails.
    """

    STEPS = (5.0, 25.0, 50.0, 100.0)

    def run(self, seed: int, failing: float, slow: float) -> Rollout:
        draw = random.Random(seed)
        plan = replace(PLAN, steps=self.STEPS, bake_s=0.0, min_calls=500)
        rollout, figures, now = at(0, plan), [split(arm(), arm())], 0.0
        while rollout.active:
            share = self.STEPS[rollout.step] / 100
            if len(figures) <= rollout.step:
                figures.append(split(arm(), arm()))
            for _ in range(400):
                mine = draw.random() < share
                side = figures[rollout.step]["candidate" if mine else "baseline"]
                side.calls += 1
                if draw.random() < (failing if mine else 1 / 17):
                    side.failed["handler_failed"] = side.failed.get("handler_failed", 0) + 1
                else:
                    bin = bin_index(QUICK * draw.lognormvariate(0, 1) * (slow if mine else 1))
                    side.latency[bin] = side.latency.get(bin, 0) + 1
            now += 1
            rollout = evaluate(rollout, figures, now)
        return rollout

    def test_one_that_is_as_good_is_promoted_however_often_it_is_looked_at(self):
        assert {self.run(seed, 1 / 17, 1.0).state for seed in range(5)} == {"promoted"}

    def test_one_that_fails_more_goes_back_early(self):
        ends = [self.run(seed, 1 / 17 + 0.1, 1.0) for seed in range(3)]
        assert {rollout.state for rollout in ends} == {"rolled_back"}
        assert max(rollout.step for rollout in ends) <= 1

    def test_one_that_is_slower_goes_back(self):
        ends = [self.run(seed, 1 / 17, 3.0) for seed in range(3)]
        assert {rollout.state for rollout in ends} == {"rolled_back"}
        assert all("p99" in rollout.decisions[-1].reason for rollout in ends)


def test_the_document_says_everything():
    rollout = at(1)
    figures = [split(arm(60)), split(arm(12, failed=3), arm(200))]
    result = to_document(rollout, figures, 112.5)
    assert result["next"] == "48 s of bake time and 38 more requests of the candidate"
    reported = [result[key] for key in ("state", "percent", "step", "to", "baseline")]
    assert reported == ["running", 5, 1, "2.0", "1.0"]
    assert result["figures"]["candidate"] == {
        "calls": 12,
        "failed": {"handler_failed": 3},
        "error_rate": 0.25,
        "p50": pytest.approx(0.01, rel=0.06),
        "p99": pytest.approx(0.01, rel=0.06),
        "non_finite": 0,
        "empty": 0,
    }
    assert [guardrail["name"] for guardrail in result["guardrails"]] == [
        "error_rate",
        "non_finite",
        "empty",
        "p99",
        "out_of_memory",
    ]
    assert result["plan"]["steps"] == [1, 5, 25, 50, 100]
    assert [decision["verdict"] for decision in result["decisions"]] == ["started", "step"]
    starting = to_document(create(PLAN, "r1", "m", "1.0", False, 1.0), [], 2.0)
    assert (starting["guardrails"], starting["next"], starting["percent"]) == ([], "the workers of 2.0", 0)


@pytest.mark.parametrize(
    ("after", "result"),
    [
        (create(PLAN, "r1", "m", "1.0", False, 1.0), "m: 2.0 rollout begins: 2.0 replaces 1.0 step by step"),
        (at(0), "m: 2.0 gets 1 %: 2.0 runs"),
        (apply_action(at(1), "pause", 1.0, []), "m: 2.0 paused at 5 %: held by an operator"),
        (apply_action(at(1), "abort", 1.0, []), "m: 2.0 aborted at 5 %: ended by an operator"),
        (state_machine.mark_scaled_down(at(1), 1.0, "because"), "m: 1.0 is no longer kept warm: because"),
    ],
)
def test_a_line_for_the_log(after, result):
    assert format_decision(at(1), after).startswith(result)
