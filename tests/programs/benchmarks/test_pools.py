"""The benchmark of pools, with few models."""

from __future__ import annotations

import pytest

from tests.benchmarks import pools

pytestmark = pytest.mark.nightly


def test_every_request_of_many_models_is_answered(capsys: pytest.CaptureFixture[str]) -> None:
    assert pools.main(["--models", "30", "--seconds", "5"]) == 0
    table = capsys.readouterr().out
    assert "| models | 30 of " in table
    assert ", 0 failed | 0 failed |" in table
