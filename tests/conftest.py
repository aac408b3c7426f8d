"""The servers that tests share, and the rules of the run."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import hypothesis
import pytest

from tests.support.server import Server
from tests.support.shared_servers import SHARED_SERVERS, run_plain

if TYPE_CHECKING:
    from tests.support.observed_server import Observed

pytest_plugins = ["tests.support.suite_rules"]

# The same examples each time, and none that fails because the machine stood still.
hypothesis.settings.load_profile("ci")
# A CI service may set them: rich's and typer's consoles would keep a width, or write colours to a file.
for name in ("COLUMNS", "FORCE_COLOR", "GITHUB_ACTIONS", "PY_COLORS", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
    os.environ.pop(name, None)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs an NVIDIA GPU")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Server:
    """Return the shared server with the defaults."""
    shared: Server = SHARED_SERVERS.get("server", lambda: run_plain(tmp_path_factory.mktemp("home")))
    return shared


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Observed:
    """Return the shared server with traces, metrics of a file, captured requests and webhooks."""
    from tests.support.observed_server import run_observed

    shared: Observed = SHARED_SERVERS.get("observed", lambda: run_observed(tmp_path_factory.mktemp("home")))
    return shared
