"""TLS of the inference port.

Ray Serve 2.60 passes ``ssl_certfile`` and ``ssl_keyfile`` to its Python proxy and to the replicas, but not to
HAProxy, which would serve plain HTTP in front of them. So HAProxy terminates TLS at the configured address
(`deployments/ray_internals/haproxy.py` adds it), and Ray Serve's own plain port moves to loopback.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from serve_app.net.bind import free_port
from serve_app.settings import HAPROXY_TLS_BIND, HAPROXY_TLS_CERTIFICATE


def configure(document: Mapping[str, Any], folder: Path) -> tuple[Path, int, dict[str, str]]:
    """Write the configuration of an application behind TLS.

    Returns its new file, the plain port on loopback, and variables to add to the environment. ``document`` is
    the configuration of `serve run`, with its ``http_options.ssl_*``. The files are written to ``folder``,
    and only their owner can read them.
    """
    plain = copy.deepcopy(dict(document))
    http = plain["http_options"]
    certificate, key = Path(http.pop("ssl_certfile")), Path(http.pop("ssl_keyfile"))
    host, port = http.get("host", "127.0.0.1"), http.get("port", 8000)
    http["host"], http["port"] = "127.0.0.1", free_port()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    config, pem = folder / "app.yaml", folder / "certificate.pem"
    _write(config, yaml.safe_dump(plain, sort_keys=False))
    _write(pem, certificate.read_text().rstrip() + "\n" + key.read_text())
    bind = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return config, http["port"], {HAPROXY_TLS_BIND: bind, HAPROXY_TLS_CERTIFICATE: str(pem)}


def _write(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
