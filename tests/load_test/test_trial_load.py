"""The loads of trials: their length and their samples."""

from __future__ import annotations

from pathlib import Path

import pytest

from serve_app.load_test.candidate_deployments import TuningError
from serve_app.load_test.trial_load import GenerationLoad, SampleRequests, step_seconds


@pytest.mark.parametrize(
    ("limit", "rate", "seconds"),
    [
        (0.02, 500.0, 2.0),
        (0.02, 50.0, 4.0),  # 200 requests
        (1.0, 500.0, 10.0),  # ten times the limit
        (0.02, 1.0, 20.0),  # at most ten times the given seconds
    ],
)
def test_a_load_is_long_enough_for_its_p99(limit: float, rate: float, seconds: float) -> None:
    assert step_seconds(2.0, limit, rate) == pytest.approx(seconds)


def test_samples_of_text_generation(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Mary")
    assert GenerationLoad.parse(SampleRequests.read([tmp_path / "a.txt"])) == [{"prompt": "Mary"}]
    for body, parsed in (
        (b'"Mary"', {"prompt": "Mary"}),
        (b'{"inputs": "Mary", "max_new_tokens": 3}', {"prompt": "Mary", "max_tokens": 3}),
        (b'{"messages": [], "seed": 1}', {"messages": [], "seed": 1}),
    ):
        assert GenerationLoad.parse(SampleRequests([body], "application/json")) == [parsed]
    for body, message in ((b"[1]", "neither prompt nor messages"), (b"{", "is no text or JSON")):
        with pytest.raises(TuningError, match=message):
            GenerationLoad.parse(SampleRequests([body], "application/json"))
