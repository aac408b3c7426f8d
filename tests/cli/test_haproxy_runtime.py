"""The ports and files that two servers of one machine have apart."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from serve_app.cli import haproxy_runtime
from serve_app.cli.errors import StartError
from tests.support.ports import free_port


@pytest.fixture
def defaults(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Ports that take the place of Ray's own, which another server of this machine may have."""
    ports = {name: free_port() for name in haproxy_runtime.PORTS}
    monkeypatch.setattr(haproxy_runtime, "PORTS", ports)
    return ports


def test_servers_that_start_at_once_have_ports_of_their_own(defaults: dict[str, int]) -> None:
    first: dict[str, str] = {}
    second: dict[str, str] = {}
    claims = haproxy_runtime.claim_ports(first) + haproxy_runtime.claim_ports(second)
    assert first == {name: str(port) for name, port in defaults.items()}
    assert not set(first.values()) & set(second.values()) and second.keys() == defaults.keys()
    for port in (*first.values(), *second.values()):  # whose owner can use them nevertheless
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", int(port)))
            listener.listen()
    haproxy_runtime.release_ports(claims)


def test_a_port_of_the_operator_stays(defaults: dict[str, int]) -> None:
    name = next(iter(defaults))
    env = {name: "1234"}
    haproxy_runtime.release_ports(haproxy_runtime.claim_ports(env))
    assert env.pop(name) == "1234" and len(env) == len(defaults) - 1


@pytest.mark.parametrize("parent", ["", "a" * 60])
def test_the_files_are_in_a_private_folder_that_a_socket_fits_in(tmp_path: Path, parent: str) -> None:
    state, env = tmp_path / parent / "state", {"RAY_SERVE_HAPROXY_SERVER_STATE_FILE": "/x"}
    try:
        haproxy_runtime.make_folder(state, env)
        assert env.pop("RAY_SERVE_HAPROXY_SERVER_STATE_FILE") == "/x"
        folder = Path(env["RAY_SERVE_HAPROXY_CONFIG_FILE_LOC"]).parent
        assert all(folder in Path(path).parents for name, path in env.items() if not name.endswith("BASE"))
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        node = folder / ("0" * 56)
        node.mkdir()
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(node / f"admin.sock.{1 << 22}.tmp"))
        other: dict[str, str] = {}
        haproxy_runtime.make_folder(state.with_name("other"), other)
        assert not set(other.values()) & set(env.values())
    finally:
        haproxy_runtime.remove_folder(state)
        haproxy_runtime.remove_folder(state.with_name("other"))
    assert not folder.exists()


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env: dict[str, str] = {}
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    state = tmp_path / "state"
    try:
        with pytest.raises(
            StartError, match="it belongs to another user; remove it, or set RAY_SERVE_HAPROXY"
        ):
            haproxy_runtime.make_folder(state, env)
    finally:
        haproxy_runtime.remove_folder(state)
