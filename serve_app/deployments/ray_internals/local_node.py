"""Ray's processes on this machine, without those that one machine does not use.

Of what ``ray start --head`` starts, a local node omits the autoscaler's monitor, the log monitor (the
supervisor copies the logs) and the dashboard.
"""

from __future__ import annotations

from typing import Any

from ray._common.utils import get_system_memory
from ray._private.authentication.authentication_token_setup import ensure_token_if_auth_enabled
from ray._private.node import Node
from ray._private.parameter import RayParams
from ray._raylet import DASHBOARD_AGENT_LISTEN_PORT_NAME, persist_port  # type: ignore[attr-defined]

from serve_app.net.bind import free_port

_MEMORY_SHARE = 0.9  # of the machine's memory, for the claims of replicas; Ray's default is what is free now


class LocalNode(Node):
    """The GCS, the raylet and its agents; the kernel ends them with this process.

    ``ray.init`` lets the agents choose their ports. The raylet then waits 15 s for each agent and ends: on a
    busy machine the imports of an agent take longer.
    """

    def __init__(self, **options: Any) -> None:
        """Start the processes; ``options`` are those of Ray's ``RayParams``."""
        ensure_token_if_auth_enabled({}, create_token_if_missing=True)
        self._agent_port = free_port()
        parameters = RayParams(
            memory=int(_MEMORY_SHARE * get_system_memory()),
            include_dashboard=False,
            include_log_monitor=False,
            no_monitor=True,
            metrics_agent_port=free_port(),
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
        super().start_raylet(*args, **options)
