"""The first process of a server: it starts Ray on this machine and becomes the supervisor.

``python -m serve_app.deployments.ray_internals.head_node CONFIG [--dashboard]``. The
fork server imports the server's modules meanwhile.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from serve_app.net.fork_client import SOCKET

if TYPE_CHECKING:
    from serve_app.deployments.ray_internals.local_node import LocalNode

_DESCRIPTORS = 65536  # as `ray.init` raises the limit


def main() -> None:
    """Start Ray and replace this program by the supervisor."""
    config, *options = sys.argv[1:]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < (wanted := min(hard, _DESCRIPTORS)):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    command = [sys.executable, "-m", "serve_app.deployments.ray_internals.fork_server"]
    fork_server = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)
    node = start_node(fork_server, "--dashboard" in options)
    supervisor = ["-m", "serve_app.cli.supervisor", node.get_logs_dir_path(), node.address, config]
    os.execv(sys.executable, [sys.executable, *supervisor])


def start_node(fork_server: subprocess.Popen[str], dashboard: bool) -> LocalNode:
    """Start Ray's processes and return Ray's handle of them."""
    from serve_app.deployments.ray_internals import fork_agent, fork_worker
    from serve_app.deployments.ray_internals.local_node import LocalNode

    class HeadNode(LocalNode):
        def start_raylet(self, *args: Any, **options: Any) -> None:
            os.environ[SOCKET] = os.path.join(self.get_sockets_dir_path(), "fork_server")
            super().start_raylet(*args, **options)
            # The fork server imports Ray while the raylet starts, not before: Ray's native library reads the
            # raylet's process id when it is imported.
            assert fork_server.stdin is not None
            with fork_server.stdin as requests:
                requests.write(f"{os.environ[SOCKET]} {self.all_processes['raylet'][0].process.pid}\n")

    node = HeadNode(
        dashboard,
        runtime_env_agent=[sys.executable, fork_agent.__file__],
        setup_worker_path=fork_worker.__file__,
    )
    if dashboard:
        node.start_dashboard()
    return node


if __name__ == "__main__":
    main()
