"""The analysis of an experiment: verdicts, figures in readable units, sentences."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest

from serve_app.control.experiments.analysis import ArmTotals, assess
from serve_app.domain.experiment import ExperimentMetric
from serve_app.domain.sequential_statistics import Estimate, Groups, difference

LATENCY = ExperimentMetric("latency", "latency")
ERRORS = ExperimentMetric("failures", "error_rate")
SCORE = ExperimentMetric("score", "output", path="score")
REWARD = ExperimentMetric("clicks", "reward")


def grouped(values: np.ndarray, groups: int = 1_000, seed: int = 0) -> Groups:
    places = np.random.default_rng(seed).integers(0, groups, len(values))
    counts, sums = (
        np.bincount(places, minlength=groups),
        np.bincount(places, weights=values, minlength=groups),
    )
    return {group: (int(counts[group]), float(sums[group])) for group in range(groups) if counts[group]}


def arm(name: str, units: int, weight: int = 5_000, **values: np.ndarray) -> ArmTotals:
    groups = {metric: grouped(each) for metric, each in values.items()}
    return ArmTotals(name, {"a": "1.0", "b": "2.0"}.get(name, "3.0"), weight, units, units, groups)


def latencies(count: int, seconds: float, seed: int = 1) -> np.ndarray:
    return seconds * np.exp(0.3 * np.random.default_rng(seed).standard_normal(count))


def rate(count: int, share: float) -> np.ndarray:
    return (np.arange(count) < count * share).astype(float)


def against(a: ArmTotals, b: ArmTotals, metric: ExperimentMetric) -> dict[str, Any]:
    result = assess([a, b], [metric], "a")
    json.dumps(result, allow_nan=False)
    return result["metrics"][metric.name]["differences"]["b"]


def test_better_by_so_and_so_much() -> None:
    result = assess(
        [
            arm("a", 4_198, latency=latencies(4_198, 0.100, 1)),
            arm("b", 4_210, latency=latencies(4_210, 0.088, 2)),
        ],
        [LATENCY],
        "a",
    )
    compared = result["metrics"]["latency"]["differences"]["b"]
    assert compared["verdict"] == "better" and compared["trusted"] is True
    assert re.fullmatch(
        r"b is better than a on latency: 1[1-4]\.\d ms less, ± [12]\.\d \(95 %\), over 4,210 and "
        r"4,198 requests\.",
        compared["sentence"],
    )
    assert compared["low"] < compared["difference"] < compared["high"] < 0
    relative = compared["relative_percent"]
    assert -14 < relative["low"] < relative["difference"] < relative["high"] < -9
    assert result["sentence"] == "b is better on latency, compared with a."
    of_a = result["metrics"]["latency"]["arms"]["a"]
    assert of_a["count"] == 4_198 and of_a["low"] < 104.6 < of_a["high"]  # milliseconds
    assert (result["metrics"]["latency"]["unit"], result["metrics"]["latency"]["goal"]) == ("ms", "decrease")
    assert result["arms"]["b"] == {"version": "2.0", "weight": 5_000, "units": 4_210, "calls": 4_210}
    assert result["sample_ratio"]["alarm"] is False


@pytest.mark.parametrize(
    ("goal", "verdict"), [(None, "better"), ("increase", "better"), ("decrease", "worse")], ids=str
)
def test_more_is_better_or_worse(goal: Any, verdict: str) -> None:
    random = np.random.default_rng(3)
    compared = against(
        arm("a", 900, score=random.normal(0.5, 0.1, 900)),
        arm("b", 900, score=random.normal(0.6, 0.1, 900)),
        ExperimentMetric("score", "output", goal=goal, path="score"),
    )
    assert compared["verdict"] == verdict
    assert re.fullmatch(
        rf"b is {verdict} than a on score: 0\.\d+ more, ± 0\.0\d+ \(95 %\), over 900 and 900 values\.",
        compared["sentence"],
    )


def test_error_rates_are_in_percentage_points() -> None:
    compared = against(
        arm("a", 2_000, failures=rate(2_000, 0.01)), arm("b", 2_000, failures=rate(2_000, 0.012)), ERRORS
    )
    assert compared["verdict"] == "not_yet_known"
    assert compared["difference"] == pytest.approx(0.2)
    assert re.fullmatch(
        r"Not yet known: b's failures differs from a's by 0\.2 ± 1\.\d percentage points \(95 %\), "
        r"over 2,000 and "
        r"2,000 requests; about \d+,000 more would show a difference of half a percentage point\.",
        compared["sentence"],
    )
    assert compared["more_calls"] >= 1_000

    worse = assess(
        [arm("a", 600, failures=rate(600, 0.0)), arm("b", 600, failures=rate(600, 0.1))], [ERRORS], "a"
    )["metrics"]["failures"]
    assert worse["differences"]["b"]["verdict"] == "worse"
    assert worse["differences"]["b"]["relative_percent"] is None  # of a baseline that may be zero
    assert worse["arms"]["a"]["mean"] == worse["arms"]["a"]["low"] == 0.0
    assert 0 < worse["arms"]["a"]["high"] < 2.5
    assert worse["arms"]["b"]["mean"] == pytest.approx(10)


def test_no_difference_is_a_finding_once_one_would_have_been_seen() -> None:
    compared = against(
        arm("a", 9_000, latency=latencies(9_000, 0.1, 4)),
        arm("b", 9_000, latency=latencies(9_000, 0.1, 5)),
        LATENCY,
    )
    assert compared["verdict"] == "no_difference_seen"
    assert compared["sentence"].startswith("No difference seen: b's latency differs from a's by ")
    assert compared["sentence"].endswith(", so by less than 10 %.")
    assert compared["more_calls"] is None


@pytest.mark.parametrize(
    ("a", "b", "why"),
    [
        (arm("a", 0), arm("b", 0), "clicks of b and a have 0 and 0 values; each arm needs at least 100"),
        (
            arm("a", 500, clicks=rate(500, 0.2)),
            arm("b", 99, clicks=rate(99, 0.2)),
            "clicks of b and a have 99 and 500 values; each arm needs at least 100",
        ),
        (
            arm("a", 500, clicks=rate(500, 0.2)),
            ArmTotals("b", "2.0", 5_000, 12, 500, {"clicks": grouped(rate(500, 0.2), groups=12)}),
            "few keys send most of b's requests, and 30 that send as many are needed at least",
        ),
        (
            arm("a", 300, clicks=rate(300, 0)),
            arm("b", 300, clicks=rate(300, 0)),
            "clicks of b and a was the same in all requests",
        ),
        (
            arm("a", 300, clicks=rate(300, 0.2)),
            arm("b", 300, clicks=np.append(rate(299, 0.2), np.inf)),
            "clicks of b has values that are no finite numbers",
        ),
    ],
    ids=["nothing", "little", "few keys", "one value", "infinite"],
)
def test_why_nothing_is_known(a: ArmTotals, b: ArmTotals, why: str) -> None:
    compared = against(a, b, REWARD)
    assert compared["verdict"] == "not_yet_known"
    assert compared["sentence"].startswith(f"Not yet known: {why}")
    assert compared["low"] is None and compared["high"] is None and compared["relative_percent"] is None


def test_alpha_is_divided_among_all_comparisons() -> None:
    arms = [
        arm(name, 3_000, weight, latency=latencies(3_000, 0.1 * factor, seed), clicks=rate(3_000, 0.1))
        for seed, (name, weight, factor) in enumerate(
            [("a", 3_334, 1.0), ("b", 3_333, 0.8), ("c", 3_333, 1.2)]
        )
    ]
    result = assess(arms, [LATENCY, REWARD], "a", alpha=0.1)
    assert (result["comparisons"], result["alpha_per_comparison"]) == (4, 0.025)
    gap = difference(*(Estimate.from_groups(arms[place].groups["latency"]) for place in (1, 0)), 0.025)
    compared = result["metrics"]["latency"]["differences"]["b"]
    assert (compared["low"], compared["high"]) == (1000 * gap.low, 1000 * gap.high)
    assert "(90 %)" in compared["sentence"]
    assert list(result["metrics"]["latency"]["differences"]) == ["b", "c"]
    assert result["sentence"] == (
        "b is better on latency, compared with a; clicks not yet known. "
        "c is worse on latency, compared with a; clicks not yet known."
    )


def test_nothing_is_to_be_trusted_when_an_arm_lost_callers() -> None:
    a = arm("a", 5_000, latency=latencies(5_000, 0.1, 6))
    b = arm("b", 4_300, latency=latencies(4_300, 0.08, 7))
    result = assess([a, b], [LATENCY], "a")
    ratio = result["sample_ratio"]
    assert ratio["alarm"] is True and ratio["p_value"] < 1e-6
    assert ratio["observed"] == {"a": 5_000, "b": 4_300}
    assert ratio["expected"] == {"a": 4_650.0, "b": 4_650.0}
    assert "a 5,000 of 4,650, b 4,300 of 4,650 expected" in ratio["sentence"]
    compared = result["metrics"]["latency"]["differences"]["b"]
    assert compared["verdict"] == "better" and compared["trusted"] is False
    assert compared["sentence"].endswith("Not to be trusted: the arms' sizes do not fit their weights.")
    assert result["sentence"].startswith("Not to be trusted")


def test_an_alarm_stays() -> None:
    fair = [arm("a", 5_000), arm("b", 5_000)]
    assert assess(fair, [LATENCY], "a")["sample_ratio"]["alarm"] is False
    later = assess(fair, [LATENCY], "a", p_value=0.003)["sample_ratio"]
    assert later["alarm"] is True and later["p_value"] == 0.003


def test_an_arm_without_the_metric_is_an_arm_without_values() -> None:
    result = assess([arm("a", 10), arm("b", 10)], [SCORE, ERRORS], "a")
    assert result["metrics"]["score"]["arms"]["a"] == {"count": 0, "mean": None, "low": None, "high": None}
    assert result["sentence"] == "b compared with a: score and failures not yet known."


def test_the_baseline_is_one_of_the_arms() -> None:
    with pytest.raises(ValueError, match="baseline 'z' is none of the arms a, b"):
        assess([arm("a", 1), arm("b", 1)], [LATENCY], "z")
