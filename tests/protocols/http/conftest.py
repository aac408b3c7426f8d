"""A server with async predictions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.async_server import Server, server_runs


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    with server_runs(tmp_path) as start_server:
        yield start_server
