"""Ray Serve's HAProxy in front of one server: the same binary, and the configuration of a fast-path route.

``python -m tests.benchmarks.haproxy_front NAME PORT FRONT_PORT FOLDER`` renders it with Ray Serve's own code
and the template of ``serve_app.deployments.ray_internals.haproxy``, and becomes HAProxy. The environment must
have the variables of configs/serve.env, from which Ray Serve takes its values. The route is
``/predictions/NAME``; the server replaces the gateway at ``/`` too.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from ray.serve._private import haproxy as ray_haproxy
from ray.serve.config import HTTPOptions

from serve_app.deployments.ray_internals import haproxy


def render(name: str, port: int, front_port: int, folder: Path) -> Path:
    """Write the configuration into ``folder`` and return its file."""
    haproxy.apply_changes()
    config = ray_haproxy.HAProxyConfig(
        socket_path=str(folder / "admin.sock"),
        server_state_base=str(folder),
        server_state_file=str(folder / "server-state"),
        http_options=HTTPOptions(host="127.0.0.1", port=front_port, keep_alive_timeout_s=75),
        has_received_routes=True,
        has_received_servers=True,
        is_head=True,
    )
    servers = [ray_haproxy.ServerConfig(name="server", host="127.0.0.1", port=port)]
    routes = {f"http-{name}--1.0": f"/predictions/{name}", "http-gateway": "/"}
    backends = {
        backend: ray_haproxy.BackendConfig(backend, route, servers=servers, app_name=backend)
        for backend, route in routes.items()
    }
    api = haproxy.HAProxyApi(config, backends, str(folder / "haproxy.cfg"))
    api._generate_config_file_internal()
    return Path(api.config_file_path)


if __name__ == "__main__":
    name, port, front_port, folder = sys.argv[1:]
    file = render(name, int(port), int(front_port), Path(folder))
    binary = ray_haproxy.get_haproxy_binary()
    os.execv(binary, [binary, "-db", "-f", str(file), "-dR"])
