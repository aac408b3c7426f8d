"""The chart of the comparison, from given results."""

from __future__ import annotations

import re

import pytest

from serve_app.load_test import LoadResult
from tests.benchmarks import chart, report
from tests.benchmarks.report import Case

pytestmark = pytest.mark.nightly


def result(rate: float, p99: float) -> LoadResult:
    return LoadResult("wrk", 32, 2.0, int(rate), int(rate / 2), 0.001, 0.001, p99, p99, {})


MLP = {
    report.RELAY1: [result(7000, 0.010), result(7200, 0.009), result(7400, 0.011)],
    report.SERVE1: [result(6300, 0.0094)],
    "BentoML": [result(790, 0.193)],
    report.RELAY2: [result(8200, 0.013)],  # not in the chart
}


def test_the_chart_has_the_medians_of_each_server_in_both_forms(tmp_path):
    files = chart.draw({Case("mlp", 32): MLP}, tmp_path)
    assert [file.name for file in files] == ["benchmark-light.svg", "benchmark-dark.svg"]
    for file in files:
        words = re.findall(r"<text[^>]*>([^<]+)</text>", file.read_text())
        assert {"Torchrelay", "TorchServe", "BentoML", "10.0", "9.4", "193.0"} <= set(words)
        assert [word for word in words if "Echo" in word or "FastAPI" in word] == []
    assert files[0].read_text() != files[1].read_text()


def test_nothing_is_drawn_without_figures(tmp_path):
    assert chart.draw({}, tmp_path / "images") == []
    assert not (tmp_path / "images").exists()
