"""Windows of features: sketches that add up, bounds, and the comparison of two windows."""

from __future__ import annotations

import json

import numpy as np
import pytest

from serve_app.domain import drift
from serve_app.domain.drift_window import FeatureWindow, compare_windows, merge_windows, worst_level
from serve_app.domain.sketches import MAX_CATEGORIES, CategorySketch, QuantileSketch

RANDOM = np.random.default_rng(7)


def window(rows, limit: int = 50) -> FeatureWindow:
    made = FeatureWindow(limit)
    for row in rows:
        made.add(row.items())
    return made


def sketch(values) -> QuantileSketch:
    made = QuantileSketch()
    made.add(map(float, values))
    return made


@pytest.mark.parametrize("count", [1, 255, 256, 1000, 100_000])
def test_a_sketch_has_the_quantiles_of_its_values(count: int) -> None:
    values = RANDOM.lognormal(0, 2, count)
    made = sketch(values)
    found, weights = made.weighted()
    assert made.count == count == weights.sum()
    assert drift.ks_statistic((found, weights), drift.to_weighted(values)) <= (0 if count < 256 else 0.02)
    assert len(found) < 6000


def test_sketches_of_several_processes_add_up() -> None:
    parts = [RANDOM.normal(i, 1, 3000) for i in range(8)]
    total = QuantileSketch()
    for part in parts:
        total.merge(sketch(part))
    assert total.count == 24_000
    everything = drift.to_weighted(np.concatenate(parts))
    assert drift.ks_statistic(total.weighted(), everything) < 0.02
    again = QuantileSketch.from_list(json.loads(json.dumps(total.to_list())))
    assert again.count == total.count
    assert (again.weighted()[0] == total.weighted()[0]).all()


def test_categories_are_bounded() -> None:
    made = CategorySketch()
    for i in range(200):
        made.add(f"value {i}")
    made.add("x" * 1000)
    assert (len(made.counts), made.other, made.count) == (MAX_CATEGORIES, 151, 201)


def test_features_are_bounded_and_the_others_are_reported() -> None:
    made = window([{f"f{i}": float(i) for i in range(60)}], limit=50)
    assert len(made.features) == 50
    assert made.omitted == {f"f{i}" for i in range(50, 60)}


def test_a_value_of_another_type_is_ignored() -> None:
    made = window([{"f": 1.0}, {"f": "text"}, {"f": 2.0}])
    assert made.features["f"].count == 2
    made.merge(window([{"f": "text"}]))
    assert made.features["f"].count == 2


def rows(count: int, age: float = 40.0, cats: float = 0.5) -> list[dict]:
    return [
        {
            "age": float(RANDOM.normal(age, 10)),
            "pet": "cat" if RANDOM.random() < cats else "dog",
            "text": "".join(RANDOM.choice(list("abcdefgh"), 20)) + " " * int(RANDOM.integers(0, 20)),
        }
        for _ in range(count)
    ]


def test_only_the_shifted_feature_drifts() -> None:
    reference = window(rows(800))
    same = compare_windows(reference, window(rows(800)))
    assert {feature["level"] for feature in same} == {"none"}
    assert {feature["name"]: feature["kind"] for feature in same} == {
        "age": "numeric",
        "pet": "categorical",
        "text": "text_length",
    }
    shifted = compare_windows(reference, window(rows(800, cats=0.1)))
    assert (shifted[0]["name"], shifted[0]["level"]) == ("pet", "major")
    assert {feature["level"] for feature in shifted[1:]} == {"none"}
    assert worst_level(shifted) == "major"
    older = compare_windows(reference, window(rows(800, age=55)))[0]
    assert (older["name"], older["level"]) == ("age", "major")
    assert older["ks"] > older["ks_critical"]
    assert older["ks"] == pytest.approx(0.55, abs=0.08), "of normal distributions 1.5 deviations apart"


def test_charts_are_compact_and_sum_up_to_one() -> None:
    features = {f["name"]: f for f in compare_windows(window(rows(500)), window(rows(500, age=60)))}
    chart = features["age"]["histogram"]
    assert len(chart["edges"]) == 21 and len(chart["reference"]) == len(chart["current"]) == 20
    pets = features["pet"]["histogram"]
    assert sorted(pets["categories"]) == ["(other)", "cat", "dog"]
    for histogram in (chart, pets):
        for name in ("reference", "current"):
            assert sum(histogram[name]) == pytest.approx(1, abs=0.01)


def test_an_unknown_category_counts_as_another() -> None:
    found = compare_windows(window([{"c": "a"}] * 100), window([{"c": "b"}] * 100))[0]
    assert (found["level"], found["histogram"]["current"]) == ("major", [0.0, 1.0])


def test_few_values_have_no_statistics() -> None:
    found = compare_windows(window([{"x": 1.0}] * 100), window([{"x": 9.0}] * 29))[0]
    assert (found["psi"], found["ks"], found["level"], found["current_count"]) == (None, None, "none", 29)
    missing = compare_windows(window([{"x": 1.0}] * 100), window([{"y": 9.0}] * 100))[0]
    assert (missing["name"], missing["current_count"]) == ("x", 0)


def test_a_window_survives_as_json() -> None:
    first, second = window(rows(300)), window(rows(300, age=50))
    again = [FeatureWindow.from_dict(json.loads(json.dumps(w.to_dict()))) for w in (first, second)]
    assert compare_windows(*again) == compare_windows(first, second)
    total = merge_windows(again, 50)
    assert total.requests == 600 and total.since == first.since and total.until == second.until
