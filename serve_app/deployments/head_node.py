"""The first process of a server: it starts Ray on this machine and becomes the supervisor.

``python -m serve_app.deployments.head_node CONFIG [--dashboard]``. Of what `ray start --head` starts it omits
what one machine does not use: the autoscaler's monitor, the log monitor (the supervisor copies the logs) and,
without ``--dashboard``, the dashboard. The fork server imports the server's modules meanwhile.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from typing import Any

from serve_app.net.bind import free_port
from serve_app.net.fork_client import SOCKET

_DESCRIPTORS = 65536  # as `ray.init` raises the limit
_MEMORY_SHARE = 0.9  # of the machine's memory, for the claims of replicas; Ray's default is what is free now


def main() -> None:
    """Start Ray and replace this program by the supervisor."""
    config, *options = sys.argv[1:]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < (wanted := min(hard, _DESCRIPTORS)):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    command = [sys.executable, "-m", "serve_app.deployments.fork_server"]
    fork_server = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)
    node = start_node(fork_server, "--dashboard" in options)
    supervisor = ["-m", "serve_app.cli.supervisor", node.get_logs_dir_path(), node.address, config]
    os.execv(sys.executable, [sys.executable, *supervisor])


def start_node(fork_server: subprocess.Popen[str], dashboard: bool) -> Any:
    """Start Ray's processes, which end with this process, and return Ray's handle of them."""
    from ray._common.utils import get_system_memory
    from ray._private.authentication.authentication_token_setup import ensure_token_if_auth_enabled
    from ray._private.node import Node
    from ray._private.parameter import RayParams
    from ray._raylet import DASHBOARD_AGENT_LISTEN_PORT_NAME, persist_port  # type: ignore[attr-defined]

    from serve_app.deployments import fork_worker

    class HeadNode(Node):
        def start_api_server(self, *, include_dashboard: bool | None, raise_on_failure: bool) -> None:
            """Start no dashboard: Ray waits for it, 1.5 s, before it starts the raylet."""

        def start_raylet(self, *args: Any, **options: Any) -> None:
            os.environ[SOCKET] = os.path.join(self.get_sockets_dir_path(), "fork_server")
            # Ray does not pass this port to the raylet, which waits for the agent's file.
            persist_port(
                self.get_session_dir_path(),
                self.node_id,
                DASHBOARD_AGENT_LISTEN_PORT_NAME,
                parameters.dashboard_agent_listen_port,
            )
            super().start_raylet(*args, **options)

    ensure_token_if_auth_enabled({}, create_token_if_missing=True)
    parameters = RayParams(
        memory=int(_MEMORY_SHARE * get_system_memory()),
        include_dashboard=False,
        include_log_monitor=False,
        no_monitor=True,
        setup_worker_path=fork_worker.__file__,
        # With ports that the agents choose, the raylet waits 15 s for each agent, and ends: on a busy machine
        # the imports of an agent take longer.
        metrics_agent_port=free_port(),
        metrics_export_port=free_port(),
        dashboard_agent_listen_port=free_port(),
        runtime_env_agent_port=free_port(),
    )
    # With ``spawn_reaper`` the kernel ends Ray's processes with this one.
    node = HeadNode(parameters, head=True, shutdown_at_exit=False, spawn_reaper=True, ray_init_cluster=True)
    # Not before: the raylet ends where its agents do not start within 15 s, beside the fork server's imports.
    assert fork_server.stdin is not None
    with fork_server.stdin as requests:
        requests.write(f"{os.environ[SOCKET]} {node.all_processes['raylet'][0].process.pid}\n")
    if dashboard:
        Node.start_api_server(node, include_dashboard=True, raise_on_failure=False)
    return node


if __name__ == "__main__":
    main()
