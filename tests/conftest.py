"""One real server for the whole run of tests; what it is made of is in parts.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from parts import Server


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("no NVIDIA GPU is here")


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One real Ray cluster for the whole run of tests."""
    server = Server(tmp_path_factory.mktemp("home"))
    try:
        server.start()
        yield server
    finally:
        server.close()
