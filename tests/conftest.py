"""One real server for the whole run of tests, and the rules of the run."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.support.server import Server

# The same examples each time, and none that fails because the machine stood still.
hypothesis.settings.load_profile("ci")
os.environ.pop("COLUMNS", None)  # rich's consoles, made when they are imported, would keep it


# Seconds after which a test that hangs fails with the stacks of its threads; `make test` needs no more.
TIMEOUTS = {"slow": 1200, "": 400}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--budget", type=float, help="Seconds after which no further test starts; the rest are skipped."
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.option.budget is not None and not hasattr(config.option, "deadline"):
        config.option.deadline = time.time() + config.option.budget  # the processes of xdist receive it


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip files without a test of the selected tier: importing them takes longer than some tiers."""
    if not collection_path.match("test_*.py"):
        return None
    selected, excluded = str(config.option.markexpr), re.findall(r"not (\w+)", config.option.markexpr)
    if any(f"pytest.mark.{mark}" in _module_marks(collection_path) for mark in excluded):
        return True
    return (selected == "slow" and "pytest.mark.slow" not in collection_path.read_text()) or None


@cache
def _module_marks(file: Path) -> str:
    """Return the statement ``pytestmark = …`` of a file, or an empty string."""
    found = re.search(r"^pytestmark = (\[.*?\]|[^\[\n]*)$", file.read_text(), re.MULTILINE | re.DOTALL)
    return found[0] if found else ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the tests of the cluster, which take longest, to the front."""
    items.sort(key=lambda item: item.get_closest_marker("cluster") is None)
    for item in items:
        seconds = TIMEOUTS["slow" if item.get_closest_marker("slow") else ""]
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(seconds))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """Schedule all tests of the shared server on one process, and distribute the others file by file.

    The slow tier has more tests of the server than others: there each process starts one.
    """
    shared = config.option.markexpr != "slow"
    return SharedServerScheduling(config, log) if shared else LoadScopeScheduling(config, log)


class SharedServerScheduling(LoadScopeScheduling):
    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        text = (self.config.rootpath / file).read_text()
        uses_server = "pytest.mark.cluster" in text and "pytest.mark.own_server" not in text
        return "shared server" if uses_server else file


def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.time() > getattr(item.config.option, "deadline", math.inf):
        pytest.skip("over the --budget of this run")
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs an NVIDIA GPU")


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Start one real Ray cluster for the whole run of tests."""
    limits = {"max_request_size": 6_553_500}  # bodies of the default, 64 MiB, take seconds
    server = Server(tmp_path_factory.mktemp("home"), inference=limits)
    try:
        server.start()
        yield server
    finally:
        server.close()
