"""The parts of the console that need no browser: figures, weights, code, and graphs."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.client import formats
from serve_app.client.prometheus_text import parse, quantile
from serve_app.console import charts
from serve_app.console.code_samples import CodeSamples
from serve_app.console.forms import RequestContent, example_tensors, example_text, select_kind
from serve_app.console.pages.overview import count_replicas
from serve_app.console.pages.traffic import balance, to_basis_points
from serve_app.console.pages.workflows import list_edges, place_steps

WEIGHTS = st.dictionaries(st.sampled_from("abcde"), st.floats(0, 100), min_size=1)


@given(WEIGHTS, st.floats(-10, 200))
def test_weights_sum_to_the_whole_after_any_move(weights: dict[str, float], value: float) -> None:
    name = next(iter(weights))
    moved = balance(weights, name, value)
    assert moved.keys() == weights.keys()
    assert sum(moved.values()) == pytest.approx(100)
    assert all(weight >= 0 for weight in moved.values())
    points = to_basis_points(moved)
    assert sum(points.values()) == 10_000
    assert all(count > 0 for count in points.values())


def test_other_weights_keep_their_ratio() -> None:
    assert balance({"a": 50, "b": 30, "c": 20}, "a", 0) == {"a": 0, "b": 60, "c": 40}
    assert balance({"a": 100, "b": 0, "c": 0}, "a", 40) == {"a": 40, "b": 30, "c": 30}


@pytest.mark.parametrize(
    ("q", "expected"),
    # Prometheus' histogram_quantile for the buckets 0.1: 10, 0.5: 90, +Inf: 100
    [(0.05, 0.05), (0.1, 0.1), (0.5, 0.3), (0.9, 0.5), (0.99, 0.5)],
)
def test_quantiles_are_those_of_prometheus(q: float, expected: float) -> None:
    assert quantile([(0.1, 10), (0.5, 90), (math.inf, 100)], q) == pytest.approx(expected)


def test_a_time_axis_spans_its_points_and_a_minute_at_least() -> None:
    def limits(*moments: float) -> tuple[float, float] | None:
        axis = charts.time_series("t", "", {"a": [(moment, 1.0) for moment in moments], "b": []})["xAxis"]
        return (axis["min"] / 1000, axis["max"] / 1000) if "min" in axis else None

    assert limits(1000.0) == limits(970.0, 1000.0) == (940.0, 1000.0)
    assert limits(500.0, 1000.0) == (500.0, 1000.0)
    assert limits() is None


def test_quantile_of_nothing_is_unknown() -> None:
    assert formats.milliseconds(None) == "–"
    assert quantile([], 0.5) is None
    assert quantile([(0.1, 0), (math.inf, 0)], 0.5) is None


def test_metrics_page_is_parsed_with_escapes_and_without_comments() -> None:
    page = '# HELP x y\nx_total{model="a\\"b\\\\c\\nd",v="1.0"} 2\nx_total{} 3\nbroken line\nz 1e3\n'
    samples = parse(page)
    assert [(dict(labels), value) for labels, value in samples["x_total"]] == [
        ({"model": 'a"b\\c\nd', "v": "1.0"}, 2.0),
        ({}, 3.0),
    ]
    assert samples["z"][0].value == 1000


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (None, "–"), (math.nan, "–"), (1234.5, "1,234"), (0.012345, "0.0123"), (-2.5, "-2.50")],
)
def test_numbers(value: float | None, text: str) -> None:
    assert formats.number(value) == text


def test_sizes_and_durations() -> None:
    assert [formats.size(n) for n in (0, 512, 3 << 20, 5 << 50)] == ["–", "512 B", "3.00 MiB", "5,120 TiB"]
    assert [formats.duration(s) for s in (2.5, 61, 7300)] == ["2.5 s", "1 min 01 s", "2 h 01 min"]
    assert formats.parse_time("2026-11-20T13:24:41.180Z") == pytest.approx(1795181081.18)
    assert formats.parse_time("never") == 0


@pytest.mark.integration
@pytest.mark.parametrize("has_file", [True, False])
def test_curl_and_python_code_send_the_form(
    fake_server: Callable[..., Any], tmp_path: Path, has_file: bool
) -> None:
    address = fake_server().inference
    body = b'{"text": "it\'s"}'
    (tmp_path / "my file.json").write_bytes(body)
    content = RequestContent(body, "application/json", "my file.json" if has_file else "")
    code = CodeSamples(address, "m", "1.0", "json", content, False)
    run = {"cwd": tmp_path, "capture_output": True, "timeout": 60, "check": True}
    curl = subprocess.run(["bash", "-c", code.curl()], **run)  # type: ignore[call-overload]
    assert json.loads(curl.stdout) == {"text": "it's"}
    source = code.python().replace("from torchrelay import", "from serve_app.client import")
    python = subprocess.run([sys.executable, "-c", source], **run)  # type: ignore[call-overload]
    assert python.stdout.startswith(b"200 ")
    assert b"it" in python.stdout


def test_code_reads_the_key_from_a_variable() -> None:
    code = CodeSamples("http://s", "m", "", "json", None, True).by_language()
    assert all("TORCHRELAY_TOKEN" in code[language] for language in ("curl", "Python"))


def test_a_model_class_has_the_form_of_its_annotation() -> None:
    schema = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
    tensors = {"inputs": [{"name": "text", "datatype": "BYTES", "shape": [1]}]}
    described = {"inputType": "application/json"}
    described["schemas"] = {"input": {"mediaType": "application/json", "schema": schema}}
    kind, metadata = select_kind(tensors, described)
    assert kind == "json"
    assert json.loads(example_text(kind, metadata)) == {"text": "text"}
    described["schemas"] = {"input": {"mediaType": "text/plain", "schema": {}}}
    assert select_kind(tensors, described)[0] == "text"
    described = {"schemas": {"input": {"mediaType": "image/*", "schema": {}}}, "inputType": "image/*"}
    assert select_kind({}, described)[0] == "image"
    assert select_kind(tensors, {})[0] == "tensors"
    assert select_kind({}, {"task": "automatic-speech-recognition"})[0] == "audio"
    assert select_kind({}, {"handler": "image_text_to_text"})[0] == "chat"


def test_example_tensors_have_the_shape_of_the_signature() -> None:
    metadata = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 3]}]}
    assert example_tensors(metadata) == {
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [0, 0, 0]}]
    }


def test_replicas_are_counted_by_state_and_node() -> None:
    workers = [{"status": "READY", "node": "b"}, {"status": "READY", "node": "a"}, {"status": "LOADING"}]
    assert count_replicas(workers) == "1 loading, 1 ready on a, 1 ready on b"


def test_steps_are_placed_to_the_right_of_their_sources() -> None:
    steps: dict[str, Any] = {
        "read": {"model": "ocr", "inputs": ""},
        "left": {"model": "a", "inputs": {"text": "read.text"}},
        "right": {"model": "b", "each": "read.lines"},
        "join": {"function": "f", "inputs": {"a": "left", "b": "right.score", "c": "request"}},
    }
    assert place_steps(steps) == {"read": (0, 0), "left": (1, 0), "right": (1, 1), "join": (2, 0)}
    assert list_edges(steps) == [
        ("read", "left"),
        ("read", "right"),
        ("left", "join"),
        ("right", "join"),
    ]
