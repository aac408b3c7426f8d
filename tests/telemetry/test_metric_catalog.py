"""Errors of a metrics.yaml."""

from __future__ import annotations

from pathlib import Path

import pytest

from serve_app.errors import ConfigurationError
from serve_app.settings import load
from serve_app.telemetry import torchserve
from serve_app.telemetry.torchserve import catalog


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "line 1: expected the node content"),
        ("- a", "must be a mapping of keys to values"),
        ("model_metric: {}", "unknown key 'model_metric'; did you mean 'model_metrics'?"),
        ("ts_metrics: []", "ts_metrics: Input should be a valid dictionary"),
        (
            "ts_metrics: {counters: []}",
            "ts_metrics.counters: Input should be 'counter', 'gauge' or 'histogram'",
        ),
        ("ts_metrics: {counter: {a: b}}", "ts_metrics.counter: Input should be a valid list"),
        (
            "model_metrics: {gauge: [a]}",
            "model_metrics.gauge.0: Input should be a dictionary",
        ),
        ("model_metrics: {gauge: [{name: a, dimensions: []}]}", "gauge.0.unit: Field required"),
        ("model_metrics: {gauge: [{name: a, unit: b}]}", "gauge.0.dimensions: Field required"),
        ("model_metrics: {gauge: [{name: a b, unit: c, dimensions: []}]}", "other characters"),
        ("model_metrics: {gauge: [{name: a, unit: c, dimensions: [x-y]}]}", "the dimension 'x-y'"),
        ("model_metrics: {gauge: [{name: a, unit: c, dimensions: [x, x]}]}", "is given twice"),
        (
            "model_metrics: {gauge: [{name: torchrelay_a, unit: c, dimensions: []}]}",
            "prefix of the server's own metrics",
        ),
        (
            "model_metrics:\n  gauge: [{name: a, unit: b, dimensions: []}]\n"
            "  counter: [{name: a, unit: b, dimensions: []}]",
            "counter[0]: a is declared twice",
        ),
        (
            "ts_metrics: {gauge: [{name: QueueTime, unit: b, dimensions: [a]}]}",
            "QueueTime has the dimensions Level, H",
        ),
        (
            "ts_metrics: {gauge: [{name: a, unit: b, dimensions: []}]}\n"
            "model_metrics: {gauge: [{name: a, unit: b, dimensions: []}]}",
            "a is in both sections",
        ),
    ],
)
def test_invalid_file_is_reported_with_place_and_remedy(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "metrics.yaml"
    file.write_text(text)
    with pytest.raises(ConfigurationError) as caught:
        catalog.load(file)
    assert str(caught.value).startswith(str(file)) and message in str(caught.value)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"No such file.*set telemetry.metrics_config"):
        torchserve.load_catalog(load({"home": str(tmp_path), "telemetry": {"metrics_config": "none.yaml"}}))
