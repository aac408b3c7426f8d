"""The servers that tests share, each started once in a run, and the rules of the run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import hypothesis
import pytest

from tests.support.server import POOL_MIB, Server

if TYPE_CHECKING:
    from tests.support.observed_server import Observed

pytest_plugins = ["tests.support.suite_rules"]

# The same examples each time, and none that fails because the machine stood still.
hypothesis.settings.load_profile("ci")
os.environ.pop("COLUMNS", None)  # rich's consoles, made when they are imported, would keep it


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs an NVIDIA GPU")


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Start a server with the defaults, a limit of bodies that tests can exceed quickly, and two pools."""
    server = Server(
        tmp_path_factory.mktemp("home"),
        inference={"max_request_size": 6_553_500},
        pools={"p": {"memory": POOL_MIB}, "two": {"memory": 100, "hosts": 2}},
    )
    try:
        server.start()
        yield server
    finally:
        server.close()


@pytest.fixture(scope="session")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Observed]:
    """Start a server with traces, metrics of a file, captured requests and webhooks."""
    from tests.support.observed_server import run_observed

    with run_observed(tmp_path_factory.mktemp("observed")) as observed:
        yield observed
