"""What the raylet of one machine starts as its agents."""

from __future__ import annotations

import inspect
import shlex
import subprocess

import pytest
from ray._private import services

from serve_app.deployments.ray_internals.local_node import with_own_agents

COMMAND = [
    "raylet",
    "--head",
    '--dashboard_agent_command=python -u agent.py "--a b"',
    '--runtime_env_agent_command=python -u main.py "--c d"',
]


def test_the_dashboards_agent_is_replaced_by_a_process_that_ends_with_the_raylet() -> None:
    [agent] = [a for a in with_own_agents(COMMAND, False, []) if a.startswith("--dashboard_agent")]
    command = [*shlex.split(agent.partition("=")[2]), "--disable-metrics-collection"]  # as the raylet adds
    process = subprocess.Popen(command, stdin=subprocess.PIPE)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.2)
    process.communicate()  # the raylet's end of the pipe closes
    assert process.returncode == 0


def test_the_agent_of_runtime_environments_is_started_by_the_program_before_it() -> None:
    changed = with_own_agents(COMMAND, True, ["python", "/a folder/fork_agent.py"])
    assert changed[:3] == COMMAND[:3]
    command = changed[3].removeprefix("--runtime_env_agent_command=")
    assert shlex.split(command) == ["python", "/a folder/fork_agent.py", "python", "-u", "main.py", "--c d"]


def test_nothing_else_is_changed() -> None:
    assert with_own_agents(COMMAND, True, []) == COMMAND


@pytest.mark.parametrize("option", ["--dashboard_agent_command=", "--runtime_env_agent_command="])
def test_ray_passes_the_commands_as_options(option: str) -> None:
    assert f'"{option}{{}}"' in inspect.getsource(services.start_raylet)
