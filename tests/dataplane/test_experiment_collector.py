"""What the calls of one process said of trials."""

from __future__ import annotations

import logging
import math
import pickle

import pytest

from serve_app.dataplane.experiment_collector import (
    ArmStats,
    ExperimentCollector,
    bin_index,
    bin_upper_bound,
    count_slower,
    quantile,
)
from serve_app.dataplane.routing.version_router import VersionSelection
from serve_app.domain.experiment import BUCKET_GROUPS
from serve_app.domain.request import InferenceResponse
from serve_app.domain.routing_table import VersionRoute
from serve_app.domain.traffic_policy import ActiveSplit, StickyKey, allocate

ROW = VersionRoute("1.0", "ready", 1)


def trial(id: str = "t", **more) -> ActiveSplit:
    return ActiveSplit(id, {"a": "1.0", "b": "2.0"}, allocate({"a": 5000, "b": 5000}), "a", **more)


def choice(of: ActiveSplit, arm: str = "a", bucket: int = 7, unit: str = "") -> VersionSelection:
    return VersionSelection(ROW, of, arm, bucket, unit, routed_by_policy=True)


def answered(of: ActiveSplit, *bodies: bytes, **more) -> ArmStats:
    """Return the statistics of one arm after these responses, each of 10 ms."""
    observations = ExperimentCollector()
    for body in bodies:
        observations.record_response(choice(of), "r", InferenceResponse(body, **more), 0.01)
    return observations.drain().figures[of.id]["a"]


class TestHistogram:
    def test_a_bin_is_five_percent_wide_and_holds_what_it_says(self) -> None:
        for seconds in (2e-6, 0.0003, 0.01, 0.9, 1.0, 75.0, 4000.0):
            bin = bin_index(seconds)
            assert bin_upper_bound(bin - 1) <= seconds * (1 + 1e-9)
            assert seconds <= bin_upper_bound(bin) * (1 + 1e-9)
            assert bin_upper_bound(bin) / bin_upper_bound(bin - 1) == pytest.approx(1.05)
        assert bin_index(0.0) == bin_index(1e-9) == 0

    def test_a_quantile_is_true_to_five_percent(self) -> None:
        latency: dict[int, int] = {}
        for n in range(1, 1001):
            bin = bin_index(n / 1000)
            latency[bin] = latency.get(bin, 0) + 1
        for q in (0.01, 0.5, 0.95, 0.99, 1.0):
            assert q <= quantile(latency, q) <= q * 1.05
        assert math.isnan(quantile({}, 0.5))

    def test_slower_calls_are_those_that_are_so_for_sure(self) -> None:
        latency = {bin_index(0.1): 5, bin_index(0.2): 3, bin_index(0.4): 2}
        assert [count_slower(latency, s) for s in (0.05, 0.1, 0.15, 0.2, 0.399, 1)] == [10, 5, 5, 2, 0, 0]


class TestFigures:
    def test_answers_and_failures_of_each_arm(self) -> None:
        of, observations = trial(), ExperimentCollector()
        observations.record_response(choice(of, "a", 7), "r1", InferenceResponse(b"ok"), 0.5)
        observations.record_response(choice(of, "a", 7 + BUCKET_GROUPS), "r2", InferenceResponse(b"ok"), 1.5)
        observations.record_response(choice(of, "a", 8), "r3", InferenceResponse(b"no", status=503), 0.1)
        observations.record_failure(choice(of, "a", 7), "r4", "queue_full")
        observations.record_failure(choice(of, "b", 9), "r5", "queue_full")
        seen = observations.drain()
        assert seen.exposures == []
        a, b = seen.figures["t"]["a"], seen.figures["t"]["b"]
        assert (a.calls, a.units, a.failed, a.failures) == (4, 4, {"status_503": 1, "queue_full": 1}, 2)
        assert a.latency == {bin_index(0.5): 1, bin_index(1.5): 1}
        assert a.sums == {"latency": {7: (2, 2.0)}, "error_rate": {7: (3, 1), 8: (1, 1)}}
        assert (b.calls, b.failures, b.latency, b.sums) == (1, 1, {}, {"error_rate": {9: (1, 1)}})

    def test_what_was_taken_is_not_taken_again(self) -> None:
        of, observations = trial(), ExperimentCollector()
        assert observations.drain() is None
        observations.record_response(choice(of), "r", InferenceResponse(b""), 0.01)
        seen = observations.drain()
        assert pickle.loads(pickle.dumps(seen)) == seen
        assert observations.drain() is None
        observations.record_response(choice(of), "r", InferenceResponse(b""), 0.01)
        assert observations.drain() == seen

    def test_figures_add_up(self) -> None:
        of = trial(outputs=(("score", "s"),), checks=True)
        bodies = [b'{"s": 1}', b"", b'{"s": NaN}', b'{"s": 4}']
        whole = answered(of, *bodies)
        parts = ArmStats()
        for body in bodies:
            parts.add(answered(of, body))
        assert parts == whole

    def test_trials_are_apart(self) -> None:
        observations = ExperimentCollector()
        for id in ("r1:0", "r1:1"):
            observations.record_response(choice(trial(id)), "r", InferenceResponse(b""), 0.01)
        assert set(observations.drain().figures) == {"r1:0", "r1:1"}


class TestOutputs:
    OF = trial(outputs=(("score", "$.out[0].score"), ("up", "up")))

    def test_numbers_are_summed_by_group_and_truth_is_one(self) -> None:
        figures = answered(
            self.OF, b'{"out": [{"score": 1.5}], "up": true}', b'{"out": [{"score": 2}], "up": false}'
        )
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
        observations = ExperimentCollector()
        observations.record_response(choice(self.OF), "r", InferenceResponse(b""), 0.01, streamed=True)
        figures = observations.drain().figures["t"]["a"]
        assert (figures.calls, figures.missing, figures.latency) == (1, {}, {bin_index(0.01): 1})


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

    def test_numbers_that_the_replica_wrote_as_null(self) -> None:
        assert answered(trial(checks=True), b"[null]", non_finite=True).non_finite == 1
        assert answered(trial(checks=True), b"[null]").non_finite == 0

    @pytest.mark.parametrize(
        "body", [b'"NaN"', b'{"Infinity": 1}', b"NaN NaN is text", b"[" * 100_000 + b"NaN", b"1"]
    )
    def test_answers_that_are_finite_or_no_json(self, body: bytes) -> None:
        assert answered(trial(checks=True), body).non_finite == 0

    def test_only_where_a_trial_asks(self) -> None:
        figures = answered(trial(), b"", b"NaN")
        assert (figures.empty, figures.non_finite) == (0, 0)

    def test_not_of_a_stream(self) -> None:
        observations = ExperimentCollector()
        observations.record_response(
            choice(trial(checks=True)), "r", InferenceResponse(b""), 0.01, streamed=True
        )
        assert observations.drain().figures["t"]["a"].empty == 0


class TestExposures:
    def test_each_call_of_a_trial_without_a_key(self) -> None:
        of, observations = trial(exposures=True), ExperimentCollector()
        observations.record_response(choice(of, "a", 1), "r1", InferenceResponse(b""), 0.01)
        observations.record_failure(choice(of, "b", 2), "r2", "deadline")
        seen = observations.drain()
        assert seen.exposures == [("t", "r1", "a", 1), ("t", "r2", "b", 2)]
        assert [figures.units for figures in seen.figures["t"].values()] == [0, 0], (
            "whoever keeps them counts them"
        )
        assert observations.drain() is None

    def test_a_key_is_reported_once(self) -> None:
        of, observations = trial(exposures=True, key=StickyKey(header="x-user")), ExperimentCollector()
        other = trial("t2", exposures=True, key=StickyKey(header="x-user"))
        for request, unit in enumerate(("ann", "bob", "ann")):
            observations.record_response(choice(of, "a", 1, unit), str(request), InferenceResponse(b""), 0.01)
        assert [e[1] for e in observations.drain().exposures] == ["ann", "bob"]
        observations.record_response(choice(of, "a", 1, "ann"), "4", InferenceResponse(b""), 0.01)
        observations.record_response(choice(other, "a", 1, "ann"), "5", InferenceResponse(b""), 0.01)
        seen = observations.drain()
        assert seen.exposures == [("t2", "ann", "a", 1)]
        assert seen.figures["t"]["a"].calls == 1

    def test_with_rewards_request_ids_are_reported_beside_keys(self) -> None:
        of, observations = (
            trial(exposures=True, key=StickyKey(header="x-user"), rewards=True),
            ExperimentCollector(),
        )
        for request in ("r1", "r2"):
            observations.record_response(choice(of, "a", 1, "ann"), request, InferenceResponse(b""), 0.01)
        assert observations.drain().exposures == [
            ("t/calls", "r1", "a", 1),
            ("t", "ann", "a", 1),
            ("t/calls", "r2", "a", 1),
        ]

    def test_memory_is_bounded_and_an_evicted_key_is_reported_again(self) -> None:
        of, observations = (
            trial(exposures=True, key=StickyKey(header="x-user")),
            ExperimentCollector(max_exposures=10),
        )

        def comes(*units: int) -> list[str]:
            reported: list[str] = []
            for unit in units:
                observations.record_response(choice(of, "a", 1, str(unit)), "r", InferenceResponse(b""), 0.01)
                reported += [e[1] for e in observations.drain().exposures]
            return reported

        comes(0)
        assert comes(0) == []
        comes(*range(1, 25))
        assert comes(24, 11) == []
        assert comes(0) == ["0"]

    @pytest.mark.parametrize("key", [None, StickyKey(header="x-user")])
    def test_without_a_reader_the_oldest_are_dropped_with_one_warning(
        self, key: StickyKey | None, caplog: pytest.LogCaptureFixture
    ) -> None:
        of, observations = trial(exposures=True, key=key), ExperimentCollector(max_exposures=10)
        with caplog.at_level(logging.WARNING, "serve_app.dataplane.experiment_collector"):
            for n in range(100):
                observations.record_response(
                    choice(of, "a", 1, f"u{n}"), f"u{n}", InferenceResponse(b""), 0.01
                )
        seen = observations.drain()
        assert [e[1] for e in seen.exposures] == [f"u{n}" for n in range(90, 100)]
        assert seen.figures["t"]["a"].calls == 100
        assert len(caplog.records) == 1
        observations.record_response(choice(of, "a", 1, "u0"), "u0", InferenceResponse(b""), 0.01)
        assert [e[1] for e in observations.drain().exposures] == ["u0"], "what was lost may be told again"
