"""What the calls of one process said of trials."""

from __future__ import annotations

import logging
import math
import pickle

import pytest

from serve_app.experiment import GROUPS
from serve_app.policy import Key, Trial, allocate
from serve_app.telemetry.observations import ArmFigures, Observations, bin_of, quantile, slower, upper
from serve_app.traffic import Choice
from serve_app.types import Reply, VersionRow

ROW = VersionRow("1.0", "ready", 1)


def trial(id: str = "t", **more) -> Trial:
    return Trial(id, {"a": "1.0", "b": "2.0"}, allocate({"a": 5000, "b": 5000}), "a", **more)


def choice(of: Trial, arm: str = "a", bucket: int = 7, unit: str = "") -> Choice:
    return Choice(ROW, of, arm, bucket, unit, by_policy=True)


def answered(of: Trial, *bodies: bytes, **more) -> ArmFigures:
    """What one arm's figures are after these answers, each of 10 ms."""
    observations = Observations()
    for body in bodies:
        observations.answered(choice(of), "r", Reply(body, **more), 0.01)
    return observations.take().figures[of.id]["a"]


class TestHistogram:
    def test_a_bin_is_five_percent_wide_and_holds_what_it_says(self) -> None:
        for seconds in (2e-6, 0.0003, 0.01, 0.9, 1.0, 75.0, 4000.0):
            bin = bin_of(seconds)
            assert upper(bin - 1) <= seconds * (1 + 1e-9)
            assert seconds <= upper(bin) * (1 + 1e-9)
            assert upper(bin) / upper(bin - 1) == pytest.approx(1.05)
        assert bin_of(0.0) == bin_of(1e-9) == 0

    def test_a_quantile_is_true_to_five_percent(self) -> None:
        latency: dict[int, int] = {}
        for n in range(1, 1001):
            bin = bin_of(n / 1000)
            latency[bin] = latency.get(bin, 0) + 1
        for q in (0.01, 0.5, 0.95, 0.99, 1.0):
            assert q <= quantile(latency, q) <= q * 1.05
        assert math.isnan(quantile({}, 0.5))

    def test_slower_calls_are_those_that_are_so_for_sure(self) -> None:
        latency = {bin_of(0.1): 5, bin_of(0.2): 3, bin_of(0.4): 2}
        assert [slower(latency, s) for s in (0.05, 0.1, 0.15, 0.2, 0.399, 1)] == [10, 5, 5, 2, 0, 0]


class TestFigures:
    def test_answers_and_failures_of_each_arm(self) -> None:
        of, observations = trial(), Observations()
        observations.answered(choice(of, "a", 7), "r1", Reply(b"ok"), 0.5)
        observations.answered(choice(of, "a", 7 + GROUPS), "r2", Reply(b"ok"), 1.5)
        observations.answered(choice(of, "a", 8), "r3", Reply(b"no", status=503), 0.1)
        observations.failed(choice(of, "a", 7), "r4", "queue_full")
        observations.failed(choice(of, "b", 9), "r5", "queue_full")
        seen = observations.take()
        assert seen.exposures == []
        a, b = seen.figures["t"]["a"], seen.figures["t"]["b"]
        assert (a.calls, a.units, a.failed, a.failures) == (4, 4, {"status_503": 1, "queue_full": 1}, 2)
        assert a.latency == {bin_of(0.5): 1, bin_of(1.5): 1}
        assert a.sums == {"latency": {7: (2, 2.0)}, "error_rate": {7: (3, 1), 8: (1, 1)}}
        assert (b.calls, b.failures, b.latency, b.sums) == (1, 1, {}, {"error_rate": {9: (1, 1)}})

    def test_what_was_taken_is_not_taken_again(self) -> None:
        of, observations = trial(), Observations()
        assert observations.take() is None
        observations.answered(choice(of), "r", Reply(b""), 0.01)
        seen = observations.take()
        assert pickle.loads(pickle.dumps(seen)) == seen
        assert observations.take() is None
        observations.answered(choice(of), "r", Reply(b""), 0.01)
        assert observations.take() == seen

    def test_figures_add_up(self) -> None:
        of = trial(outputs=(("score", "s"),), checks=True)
        bodies = [b'{"s": 1}', b"", b'{"s": NaN}', b'{"s": 4}']
        whole = answered(of, *bodies)
        parts = ArmFigures()
        for body in bodies:
            parts.add(answered(of, body))
        assert parts == whole

    def test_trials_are_apart(self) -> None:
        observations = Observations()
        for id in ("r1:0", "r1:1"):
            observations.answered(choice(trial(id)), "r", Reply(b""), 0.01)
        assert set(observations.take().figures) == {"r1:0", "r1:1"}


class TestOutputs:
    OF = trial(outputs=(("score", "$.out[0].score"), ("up", "up")))

    def test_numbers_are_summed_by_group_and_truth_is_one(self) -> None:
        figures = answered(self.OF, b'{"out": [{"score": 1.5}], "up": true}', b'{"out": [{"score": 2}], "up": false}')
        assert figures.sums["output:score"] == {7: (2, 3.5)}
        assert figures.sums["output:up"] == {7: (2, 1)}
        assert figures.missing == {}

    @pytest.mark.parametrize(
        "body",
        [
            b"",
            b"no JSON",
            b"[]",
            b"null",
            b'{"out": []}',
            b'{"out": [{"score": "3"}]}',
            b'{"out": [{"score": null}]}',
            b'{"out": [{"score": [1]}]}',
            b'{"out": [{"score": NaN}]}',
            b'{"out": [{"score": -Infinity}]}',
            b'{"out": [{"score": 1e300}]}',
            b'{"out": [{"score": ' + b"9" * 5000 + b"}]}",
            b"[" * 100_000,
        ],
    )
    def test_no_number_is_missing_and_no_value(self, body: bytes) -> None:
        figures = answered(self.OF, body)
        assert figures.missing["output:score"] == 1
        assert "output:score" not in figures.sums
        assert figures.calls == 1

    def test_a_number_beside_a_nan_counts(self) -> None:
        figures = answered(self.OF, b'{"out": [{"score": 1.5, "other": NaN}]}')
        assert figures.sums["output:score"] == {7: (1, 1.5)}

    def test_of_failures_and_streams_nothing_is_looked_at(self) -> None:
        assert answered(self.OF, b'{"up": 1}', status=500).missing == {}
        observations = Observations()
        observations.answered(choice(self.OF), "r", Reply(b""), 0.01, streamed=True)
        figures = observations.take().figures["t"]["a"]
        assert (figures.calls, figures.missing, figures.latency) == (1, {}, {bin_of(0.01): 1})


class TestChecks:
    @pytest.mark.parametrize("body", [b"", b"  \n", b'""', b"[]", b"[\n]", b"{ }", b"null", b' ""\n', b'" "'])
    def test_empty_answers(self, body: bytes) -> None:
        assert answered(trial(checks=True), body).empty == 1

    @pytest.mark.parametrize("body", [b"0", b"false", b"[0]", b'"-"', b"[null]", b"{}x", b"[[]]" * 9])
    def test_answers_that_are_not(self, body: bytes) -> None:
        assert answered(trial(checks=True), body).empty == 0

    @pytest.mark.parametrize("body", [b"NaN", b"[1, NaN]", b'{"a": [[Infinity]]}', b"-Infinity"])
    def test_non_finite_answers(self, body: bytes) -> None:
        assert answered(trial(checks=True), body).non_finite == 1

    @pytest.mark.parametrize("body", [b'"NaN"', b'{"Infinity": 1}', b"NaN NaN is text", b"[" * 100_000 + b"NaN", b"1"])
    def test_answers_that_are_finite_or_no_json(self, body: bytes) -> None:
        assert answered(trial(checks=True), body).non_finite == 0

    def test_only_where_a_trial_asks(self) -> None:
        figures = answered(trial(), b"", b"NaN")
        assert (figures.empty, figures.non_finite) == (0, 0)

    def test_not_of_a_stream(self) -> None:
        observations = Observations()
        observations.answered(choice(trial(checks=True)), "r", Reply(b""), 0.01, streamed=True)
        assert observations.take().figures["t"]["a"].empty == 0


class TestExposures:
    def test_each_call_of_a_trial_without_a_key(self) -> None:
        of, observations = trial(exposures=True), Observations()
        observations.answered(choice(of, "a", 1), "r1", Reply(b""), 0.01)
        observations.failed(choice(of, "b", 2), "r2", "deadline")
        seen = observations.take()
        assert seen.exposures == [("t", "r1", "a", 1), ("t", "r2", "b", 2)]
        assert [figures.units for figures in seen.figures["t"].values()] == [0, 0], "whoever keeps them counts them"
        assert observations.take() is None

    def test_a_key_is_told_once(self) -> None:
        of, observations = trial(exposures=True, key=Key(header="x-user")), Observations()
        other = trial("t2", exposures=True, key=Key(header="x-user"))
        for request, unit in enumerate(("ann", "bob", "ann")):
            observations.answered(choice(of, "a", 1, unit), str(request), Reply(b""), 0.01)
        assert [e[1] for e in observations.take().exposures] == ["ann", "bob"]
        observations.answered(choice(of, "a", 1, "ann"), "4", Reply(b""), 0.01)
        observations.answered(choice(other, "a", 1, "ann"), "5", Reply(b""), 0.01)
        seen = observations.take()
        assert seen.exposures == [("t2", "ann", "a", 1)]
        assert seen.figures["t"]["a"].calls == 1

    def test_where_rewards_come_calls_are_told_beside_keys(self) -> None:
        of, observations = trial(exposures=True, key=Key(header="x-user"), rewards=True), Observations()
        for request in ("r1", "r2"):
            observations.answered(choice(of, "a", 1, "ann"), request, Reply(b""), 0.01)
        assert observations.take().exposures == [
            ("t/calls", "r1", "a", 1),
            ("t", "ann", "a", 1),
            ("t/calls", "r2", "a", 1),
        ]

    def test_memory_is_bounded_and_a_key_that_fell_out_is_told_again(self) -> None:
        of, observations = trial(exposures=True, key=Key(header="x-user")), Observations(exposures=10)

        def comes(*units: int) -> list[str]:
            told: list[str] = []
            for unit in units:
                observations.answered(choice(of, "a", 1, str(unit)), "r", Reply(b""), 0.01)
                told += [e[1] for e in observations.take().exposures]
            return told

        comes(0)
        assert comes(0) == []
        comes(*range(1, 25))
        assert comes(24, 11) == []
        assert comes(0) == ["0"]

    @pytest.mark.parametrize("key", [None, Key(header="x-user")])
    def test_while_nobody_fetches_the_oldest_are_lost_and_it_is_said_once(
        self, key: Key | None, caplog: pytest.LogCaptureFixture
    ) -> None:
        of, observations = trial(exposures=True, key=key), Observations(exposures=10)
        with caplog.at_level(logging.WARNING, "torchrelay.observations"):
            for n in range(100):
                observations.answered(choice(of, "a", 1, f"u{n}"), f"u{n}", Reply(b""), 0.01)
        seen = observations.take()
        assert [e[1] for e in seen.exposures] == [f"u{n}" for n in range(90, 100)]
        assert seen.figures["t"]["a"].calls == 100
        assert len(caplog.records) == 1
        observations.answered(choice(of, "a", 1, "u0"), "u0", Reply(b""), 0.01)
        assert [e[1] for e in observations.take().exposures] == ["u0"], "what was lost may be told again"
