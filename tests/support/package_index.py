"""A skip of tests of uv's resolver where the package index fails."""

from __future__ import annotations

import re

import pytest

# What uv prints where an index is not reached, is overloaded, or responds too slowly.
_NO_INDEX = re.compile(
    "error sending request|error decoding response|Failed to fetch|dns error"
    "|server error|Too Many Requests|timed out"
)


def skip_without_index(errors: str) -> None:
    """Skip a test if the errors of its resolver are those of a package index."""
    if _NO_INDEX.search(errors):
        pytest.skip("needs a package index")
