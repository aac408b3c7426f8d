"""Outgoing requests: which addresses are public, and to which address a connection goes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import httpx
import pytest

from serve_app.net.egress import AsyncPublicTransport, PrivateAddress, PublicTransport, is_public, resolve
from tests.support.http_server import serving

PRIVATE = [
    "127.0.0.1",
    "127.1.2.3",
    "10.0.0.1",
    "172.16.0.1",
    "192.168.1.1",
    "169.254.169.254",
    "100.64.0.1",
    "0.0.0.0",
    "224.0.0.1",
    "240.0.0.1",
    "255.255.255.255",
    "192.0.2.1",
    "198.18.0.1",
    "::",
    "::1",
    "fe80::1",
    "fe80::1%eth0",
    "fc00::1",
    "fd00:ec2::254",
    "fec0::1",
    "ff02::1",
    "2001:db8::1",
    "::ffff:127.0.0.1",
    "::ffff:169.254.169.254",
    "::127.0.0.1",
    "64:ff9b::7f00:1",
    "2002:7f00:1::",
    "2001:0:0:0:0:0:80ff:fffe",
    "localhost",
    "2130706433",
]
PUBLIC = [
    "8.8.8.8",
    "1.1.1.1",
    "2606:4700:4700::1111",
    "::ffff:8.8.8.8",
    "64:ff9b::808:808",
    "2002:808:808::",
]


@pytest.mark.parametrize("address", PRIVATE)
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", PUBLIC)
def test_public_addresses(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "[::ffff:127.0.0.1]", "2130706433", "0x7f000001", "127.1", "localhost", "0"]
)
def test_forms_of_the_loopback_address_are_refused(host: str) -> None:
    with (
        serving(lambda handler: handler.send_error(500)) as address,
        httpx.Client(transport=PublicTransport()) as client,
    ):
        port = address.rpartition(":")[2]
        with pytest.raises(PrivateAddress, match="is not a public address"):
            client.get(f"http://{host}:{port}/")


def test_only_public_addresses_of_a_name_are_used() -> None:
    resolved: list[str] = []

    def resolver(host: str, port: int) -> list[str]:
        resolved.append(host)
        return ["10.0.0.1", "169.254.169.254"]

    with httpx.Client(transport=PublicTransport(resolver)) as client, pytest.raises(PrivateAddress):
        client.get("http://models.example/m.mar")
    assert resolved == ["models.example"]


@contextlib.contextmanager
def connections(monkeypatch: pytest.MonkeyPatch, target: str) -> Iterator[list[str]]:
    """Send each connection to the server ``target``; yield the addresses that were to be connected to."""
    port = int(target.rpartition(":")[2])
    connect = socket.create_connection
    addresses: list[str] = []

    def to_target(address: tuple[str, int], *more: object, **options: object) -> socket.socket:
        addresses.append(address[0])
        return connect(("127.0.0.1", port), *more, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "create_connection", to_target)
    yield addresses


def test_the_checked_address_is_connected_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name server that answers a second question with a private address is not resolved one."""
    answers = iter([["8.8.8.8"], ["127.0.0.1"]])
    hosts = []

    def answer(handler) -> None:
        hosts.append(handler.headers["host"])
        handler.send_response(204)
        handler.end_headers()

    with serving(answer) as target, connections(monkeypatch, target) as connected:
        transport = PublicTransport(lambda host, port: next(answers))
        with httpx.Client(transport=transport, trust_env=False, timeout=60) as client:
            assert client.get("http://models.example/m.mar").status_code == 204
            with pytest.raises(PrivateAddress):  # a new request resolves anew, and is checked anew
                client.get("http://models.example/m.mar")
    assert (connected, hosts) == (["8.8.8.8"], ["models.example"])


def test_every_redirect_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    def redirect(handler) -> None:
        handler.send_response(302)
        handler.send_header("Location", "http://169.254.169.254/latest/meta-data")
        handler.end_headers()

    def resolver(host: str, port: int) -> list[str]:
        return ["8.8.8.8"] if host == "models.example" else resolve(host, port)

    with (
        serving(redirect) as target,
        connections(monkeypatch, target) as connected,
        httpx.Client(transport=PublicTransport(resolver), follow_redirects=True, timeout=60) as client,
        pytest.raises(PrivateAddress, match=r"169\.254\.169\.254"),
    ):
        client.get("http://models.example/m.mar")
    assert connected == ["8.8.8.8"]


def test_a_proxy_gets_the_name_unless_it_is_private_here(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = []

    def answer(handler) -> None:
        lines.append(handler.requestline)
        handler.send_response(204)
        handler.end_headers()

    def resolver(host: str, port: int) -> list[str]:
        if host == "inside.example":
            return ["10.0.0.1"]
        raise socket.gaierror(-2, "Name or service not known")

    with serving(answer) as proxy:
        monkeypatch.setenv("http_proxy", proxy)
        monkeypatch.setenv("no_proxy", "direct.example")
        with httpx.Client(transport=PublicTransport(resolver), timeout=60) as client:
            assert client.get("http://models.example/m.mar").status_code == 204
            with pytest.raises(PrivateAddress):
                client.get("http://inside.example/")
            with pytest.raises(httpx.ConnectError, match="cannot be resolved"):
                client.get("http://direct.example/")
    assert lines == ["GET http://models.example/m.mar HTTP/1.1"]


def test_exempt_urls_may_be_private() -> None:
    def answer(handler) -> None:
        handler.send_response(204)
        handler.end_headers()

    async def get(port: str) -> None:
        transport = AsyncPublicTransport(lambda url: url.path == "/mine")
        async with httpx.AsyncClient(transport=transport, timeout=60) as client:
            assert (await client.get(f"http://127.0.0.1:{port}/mine")).status_code == 204
            with pytest.raises(PrivateAddress):
                await client.get(f"http://127.0.0.1:{port}/other")

    with serving(answer) as address:
        asyncio.run(get(address.rpartition(":")[2]))
