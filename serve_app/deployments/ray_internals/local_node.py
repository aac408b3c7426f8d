"""Ray's processes on this machine, without those that one machine does not use.

Of what ``ray start --head`` starts, a local node omits the autoscaler's monitor, the log monitor (the
supervisor copies the logs), the dashboard, and the dashboard's agent where nothing uses it.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from typing import Any

from ray._common.utils import get_system_memory
from ray._private import services
from ray._private.authentication.authentication_token_setup import ensure_token_if_auth_enabled
from ray._private.node import Node
from ray._private.parameter import RayParams
from ray._raylet import DASHBOARD_AGENT_LISTEN_PORT_NAME, persist_port  # type: ignore[attr-defined]

from serve_app.net.bind import free_port

_MEMORY_SHARE = 0.9  # of the machine's memory, for the claims of replicas; Ray's default is what is free now
_METRICS_COLLECTION = "RAY_enable_metrics_collection"  # Ray's variable
_DASHBOARD_AGENT = "--dashboard_agent_command="
_RUNTIME_ENV_AGENT = "--runtime_env_agent_command="
# A process in the place of an agent, 0.2 MiB: the raylet requires one, and ends with it. Its standard input
# is a pipe from the raylet. The raylet appends arguments, which the shell ignores.
_NO_AGENT = subprocess.list2cmdline(["sh", "-c", "exec cat"])


class LocalNode(Node):
    """The GCS, the raylet and its agents; the kernel ends them with this process.

    ``ray.init`` lets the agents choose their ports. The raylet then waits 15 s for each agent and ends: on a
    busy machine the imports of an agent take longer.

    The dashboard's agent, 81 MiB and a CPU second at the start, runs only for ``dashboard`` and for Ray's own
    metrics. ``runtime_env_agent`` are a program and arguments before the command of Ray's other agent.
    """

    def __init__(
        self, dashboard: bool = False, runtime_env_agent: Sequence[str] = (), **options: Any
    ) -> None:
        """Start the processes; ``options`` are those of Ray's ``RayParams``."""
        ensure_token_if_auth_enabled({}, create_token_if_missing=True)
        collects = os.environ.get(_METRICS_COLLECTION, "1").lower() not in ("0", "false")
        self._has_dashboard_agent = dashboard or collects
        self._runtime_env_agent = runtime_env_agent
        self._agent_port = free_port()
        parameters = RayParams(
            memory=int(_MEMORY_SHARE * get_system_memory()),
            include_dashboard=False,
            include_log_monitor=False,
            no_monitor=True,
            # Without an agent Ray's processes would look for it for 30 s, and log an error.
            metrics_agent_port=free_port() if self._has_dashboard_agent else -1,
            metrics_export_port=free_port(),
            dashboard_agent_listen_port=self._agent_port,
            runtime_env_agent_port=free_port(),
            **options,
        )
        # With ``spawn_reaper`` the kernel ends Ray's processes with this one.
        super().__init__(
            parameters, head=True, shutdown_at_exit=False, spawn_reaper=True, ray_init_cluster=True
        )

    def start_api_server(self, *, include_dashboard: bool | None, raise_on_failure: bool) -> None:
        """Start no dashboard: Ray waits for it, 1.5 s, before it starts the raylet."""

    def start_dashboard(self) -> None:
        super().start_api_server(include_dashboard=True, raise_on_failure=False)

    def start_raylet(self, *args: Any, **options: Any) -> None:
        """Write the file of the dashboard agent's port, which Ray does not pass to the raylet."""
        persist_port(
            self.get_session_dir_path(), self.node_id, DASHBOARD_AGENT_LISTEN_PORT_NAME, self._agent_port
        )
        module: Any = services
        start = module.start_ray_process

        def start_with_own_agents(command: Sequence[str], *args: Any, **options: Any) -> Any:
            command = with_own_agents(command, self._has_dashboard_agent, self._runtime_env_agent)
            return start(command, *args, **options)

        module.start_ray_process = start_with_own_agents
        try:
            super().start_raylet(*args, **options)
        finally:
            module.start_ray_process = start


def with_own_agents(
    command: Sequence[str], has_dashboard_agent: bool, runtime_env_agent: Sequence[str]
) -> list[str]:
    """Return the command of the raylet with what it starts as agents, as ``LocalNode`` describes."""
    arguments = []
    for argument in command:
        if argument.startswith(_DASHBOARD_AGENT) and not has_dashboard_agent:
            argument = _DASHBOARD_AGENT + _NO_AGENT
        elif argument.startswith(_RUNTIME_ENV_AGENT) and runtime_env_agent:
            agent = argument.removeprefix(_RUNTIME_ENV_AGENT)
            argument = f"{_RUNTIME_ENV_AGENT}{subprocess.list2cmdline(runtime_env_agent)} {agent}"
        arguments.append(argument)
    return arguments
