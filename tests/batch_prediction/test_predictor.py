"""Blocks of rows through a real handler: batches, errors of single rows, streams, asynchronous handlers."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from serve_app.batch_prediction.predictor import BlockPredictor
from serve_app.batch_prediction.rows import BatchRow, RowResult
from serve_app.domain.model import ModelSpec
from serve_app.settings import Settings

pytestmark = pytest.mark.integration

HANDLER = """
from handlers import PredictionException

def handle(data, context):
    if data is None:
        return
    values = [row["body"] for row in data]
    if "crash" in values:
        raise ValueError("no such word")
    bad = PredictionException("bad word", 422)
    return [bad if value == "bad" else [value, len(values)] for value in values]
"""
STREAM = """
def handle(data, context):
    if data is None:
        return
    for index in range(len(data)):
        context.emit(index, "one ")
    return ["two"] * len(data)
"""
ASYNCHRONOUS = """
async def handle(data, context):
    return [len(row["body"]) for row in data or ()]
"""
Predict = Callable[..., list[RowResult]]


@pytest.fixture
def predict(tmp_path: Path) -> Iterator[Predict]:
    before = os.getcwd()

    def predict(handler: str, *words: str) -> list[RowResult]:
        (tmp_path / "handler.py").write_text(handler)
        manifest = {"model": {"modelName": "m", "modelVersion": "1.0", "handler": "handler.py"}}
        (tmp_path / "MAR-INF").mkdir()
        (tmp_path / "MAR-INF" / "MANIFEST.json").write_text(json.dumps(manifest))
        spec = ModelSpec("m", "1.0", "m.mar", "d" * 64, "m", "handler.py", batch_size=4)
        predictor = BlockPredictor(spec, tmp_path, Settings(), None)
        rows = [BatchRow(n, word.encode(), "text/plain") for n, word in enumerate(words, 1)]
        try:
            return predictor.predict([*rows, BatchRow(99, problem="line 99 is not JSON")])
        finally:
            predictor.close()

    yield predict
    os.chdir(before)


def test_rows_run_in_batches_and_fail_alone(predict: Predict) -> None:
    results = predict(HANDLER, "a", "bad", "crash", "b", "c", "d")
    assert [result.number for result in results] == [1, 2, 3, 4, 5, 6, 99]
    values = {result.number: result.prediction for result in results if not result.reason}
    assert {number: value[0] for number, value in values.items()} == {1: "a", 4: "b", 5: "c", 6: "d"}
    assert max(value[1] for value in values.values()) > 1
    errors = {result.number: (result.reason, result.message) for result in results if result.reason}
    assert errors[2] == ("handler_rejected", "bad word")
    assert errors[3] == ("handler_failed", "Prediction failed: ValueError: no such word")
    assert errors[99] == ("invalid_input", "line 99 is not JSON")


def test_a_stream_is_one_value(predict: Predict) -> None:
    assert predict(STREAM, "a")[0].prediction == "one two"


def test_an_asynchronous_handler(predict: Predict) -> None:
    assert [result.prediction for result in predict(ASYNCHRONOUS, "a", "abc")[:2]] == [1, 3]
