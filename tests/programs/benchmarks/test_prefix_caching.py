"""The benchmark of prefix caching, with a model small enough for a test."""

from __future__ import annotations

import re

import pytest

from tests.benchmarks import prefix_caching

pytestmark = pytest.mark.nightly


def test_both_engines_generate_the_same_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    assert prefix_caching.main(["--width", "64", "--rounds", "1"])
    head, _, *rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert head == "| 512 shared tokens of 544 | first token, ms | ratio |"
    for row, name in zip(rows, (prefix_caching.UNCACHED_PREFIX, prefix_caching.CACHED_PREFIX), strict=True):
        assert re.fullmatch(rf"\| {name} \| \d+ \| \d\.\d\d \|", row)
