"""Ray's processes of one host: ``python start_ray.py ADDRESS [HEAD]``; they end with this process.

As `torchrelay start`, it starts a fork server, and neither a dashboard, the autoscaler's monitor nor the log
monitor: three hosts on two cores start in 45 s instead of 80.
"""

import os
import subprocess
import sys
from typing import Any

from ray._private.node import Node
from ray._private.parameter import RayParams
from ray._raylet import persist_port

from serve_app.deployments.ray_internals import fork_worker
from serve_app.net.fork_client import SOCKET

PORTS = {  # of this host's agents
    "metrics_agent_port": 8901,
    "metrics_export_port": 8902,
    "dashboard_agent_listen_port": 8903,
    "runtime_env_agent_port": 8904,
}


class HostNode(Node):
    """A node whose workers are forks, without the dashboard's server."""

    def start_api_server(self, **_: Any) -> None:
        pass

    def start_raylet(self, *args: Any, **options: Any) -> None:
        os.environ[SOCKET] = os.path.join(self.get_sockets_dir_path(), "fork_server")
        # The raylet waits 15 s for these files of its agents, which start later on a busy machine.
        for name, port in PORTS.items():
            persist_port(self.get_session_dir_path(), self._node_id, name, port)
        super().start_raylet(*args, **options)


address, *head = sys.argv[1:]
fork_server = subprocess.Popen(
    [sys.executable, "-m", "serve_app.deployments.ray_internals.fork_server"],
    stdin=subprocess.PIPE,
    text=True,
)
parameters = RayParams(
    node_ip_address=address,
    gcs_server_port=None if head else 6379,
    gcs_address=f"{head[0]}:6379" if head else None,
    num_cpus=2,
    memory=4 << 30,
    object_store_memory=100_000_000,
    **PORTS,
    include_dashboard=False,
    include_log_monitor=False,
    no_monitor=True,
    setup_worker_path=fork_worker.__file__,
)
node = HostNode(
    parameters,
    head=not head,
    shutdown_at_exit=False,
    spawn_reaper=True,
    ray_init_cluster=not head,
)
assert fork_server.stdin is not None
with fork_server.stdin as requests:
    requests.write(f"{os.environ[SOCKET]} {node.all_processes['raylet'][0].process.pid}\n")
print("started", flush=True)
# As `ray start --block`, it ends with the raylet, whose host was away for too long.
sys.exit(node.all_processes["raylet"][0].process.wait())
