"""One real server for the whole run of tests; its class is in parts.py."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from parts import Server
from xdist.scheduler import LoadScopeScheduling

# The same examples each time, and none that fails because the machine stood still.
hypothesis.settings.load_profile("ci")
os.environ.pop("COLUMNS", None)  # rich's consoles, made when they are imported, would keep it


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the tests of the cluster, which take longest, to the front."""
    items.sort(key=lambda item: item.get_closest_marker("cluster") is None)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """Schedule all tests of the cluster on one process, and distribute the others file by file."""
    return ClusterApart(config, log)


class ClusterApart(LoadScopeScheduling):
    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "cluster" if _of_cluster(self.config.rootpath / file) else file


@cache
def _of_cluster(file: Path) -> bool:
    return "pytest.mark.cluster" in file.read_text()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("no NVIDIA GPU is here")


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Start one real Ray cluster for the whole run of tests."""
    server = Server(tmp_path_factory.mktemp("home"))
    try:
        server.start()
        yield server
    finally:
        server.close()
