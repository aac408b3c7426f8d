"""A server starts on a machine where Ray's agents take long to start."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.server import ROOT, Server

pytestmark = [pytest.mark.cluster, pytest.mark.own_server, pytest.mark.slow]

# Longer than the 15 s for which the raylet waits for the ports of its agents.
_SITE = """
import sys, time
if any("dashboard/agent.py" in word or "runtime_env/agent/main.py" in word for word in sys.orig_argv):
    time.sleep(20)
"""


@pytest.mark.nightly
def test_agents_that_start_slowly_do_not_end_the_raylet(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(_SITE)
    home = tmp_path / "home"
    home.mkdir()
    path = os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")])
    server = Server(home, env={"PYTHONPATH": path})
    try:
        server.start()
        assert server.client.ready()
    finally:
        server.close()
