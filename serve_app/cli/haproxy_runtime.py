"""The ports and files of HAProxy that several servers of one machine must not share."""

from __future__ import annotations

import os
import shutil
import socket
import stat
from collections.abc import MutableMapping
from hashlib import sha256
from pathlib import Path

from serve_app.cli.errors import StartError
from serve_app.net.bind import free_port

# The ports that Ray Serve binds besides ours, and the variables that change them.
PORTS = {
    "RAY_SERVE_HAPROXY_STATS_PORT": 8404,
    "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": 8500,
    "RAY_SERVE_HAPROXY_METRICS_PORT": 9101,
    "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": 9500,
}
_FILES = {
    "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": "haproxy.cfg",
    "RAY_SERVE_HAPROXY_SOCKET_PATH": "admin.sock",
    "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": "",
    "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": "server-state",
    "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": "metrics.sock",
}
# Ray Serve adds a folder with the node's id (56 characters), and HAProxy ".<pid>.tmp" to the socket's name. A
# Unix socket's path has at most 107 bytes.
_MAX_FOLDER_BYTES = 107 - len(f"/{'0' * 56}/admin.sock.4194304.tmp")


def claim_ports(env: MutableMapping[str, str]) -> list[socket.socket]:
    """Choose the ports that ``env`` does not set: Ray's own, or free ones where those are taken.

    The sockets that are returned claim them against servers that start at the same time. They are bound and
    do not listen, and Linux lets the process bind that will.
    """
    claims = []
    for name, default in PORTS.items():
        port = default
        while name not in env:
            claim = socket.socket()
            try:
                # Without SO_REUSEADDR this fails at a claim, too.
                claim.bind(("0.0.0.0", port))
            except OSError:
                claim.close()
                port = free_port()
                continue
            claim.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            claims.append(claim)
            env[name] = str(port)
    return claims


def release_ports(claims: list[socket.socket]) -> None:
    """Close the claims; a server that has bound its ports does not need them."""
    for claim in claims:
        claim.close()


def make_folder(state_dir: Path, env: MutableMapping[str, str]) -> None:
    """Create the folder of HAProxy's files, which only its owner can enter, and add its paths to ``env``.

    Paths that are set already stay. Raises StartError.
    """
    names = [name for name in _FILES if name not in env]
    if not names:
        return
    folder = _folder(state_dir)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise StartError(f"{folder}: it belongs to another user; remove it, or set {names[0]}")
    folder.chmod(0o700)
    env.update((name, str(folder / _FILES[name])) for name in names)


def remove_folder(state_dir: Path) -> None:
    """Remove HAProxy's files of a server that has ended."""
    shutil.rmtree(_folder(state_dir), ignore_errors=True)


def _folder(state_dir: Path) -> Path:
    folder = state_dir.absolute() / "haproxy"
    if len(os.fsencode(folder)) <= _MAX_FOLDER_BYTES:
        return folder
    return Path("/tmp") / f"torchrelay-{sha256(os.fsencode(state_dir.absolute())).hexdigest()[:8]}"
