"""All fuzzed functions by name."""

from __future__ import annotations

from tests.fuzz import parsers, servers
from tests.fuzz.target import TARGETS

__all__ = ["TARGETS", "parsers", "servers"]
