"""The benchmark of text generation, with a model small enough for a test."""

from __future__ import annotations

import re

import pytest

from tests.benchmarks import generation

pytestmark = pytest.mark.nightly


def test_three_ways_to_the_same_answers(capsys: pytest.CaptureFixture[str]) -> None:
    assert generation.main(["--width", "64", "--rounds", "1"]), "continuous batching answers as generate does"
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert re.match(r"\| 16 requests, [\d,]+ tokens in, [\d,]+ out \| s \|", lines[0])
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[1:]]
    rows = {way: [float(number.replace(",", "")) for number in numbers] for way, *numbers in cells}
    assert list(rows) == [generation.ALONE, generation.STATIC, generation.CONTINUOUS]
    assert rows[generation.ALONE][2] == 1.0
    assert all(number > 0 for row in rows.values() for number in row)
