"""Constant times for the variants of ``torchrelay optimize``: a loaded machine cannot change the winner."""

from __future__ import annotations

import sys

import pytest

from serve_app.cli import variant_search

PROGRAM = """
from handlers.optimize import search

def time_calls(variant, size):
    return [{seconds}.get(variant.name, 0.004)] * 3

search._time_calls = time_calls
search.main()
"""


def fix_timings(monkeypatch: pytest.MonkeyPatch, seconds: dict[str, float] | None = None) -> None:
    """Let a call of each variant take a constant time: of the plain model 8 ms, of others 4 ms."""
    program = PROGRAM.format(seconds={"plain": 0.008} | (seconds or {}))
    monkeypatch.setattr(variant_search, "SEARCH_COMMAND", (sys.executable, "-c", program))
