"""The client's address and the key's name in the access log, over ASGI and over our listener."""

from __future__ import annotations

import asyncio
from hashlib import sha256
from typing import Any

import httpx
import pytest

from serve_app.control.api import ControlPlane
from serve_app.deployments.listeners.http import HttpListener
from serve_app.domain.access import AccessTable, KeyGrant
from serve_app.domain.routing_table import ModelRoute, RoutingTable, VersionRoute
from serve_app.protocols.http_app import management_app
from serve_app.settings import load
from tests.support.ports import free_port
from tests.support.protocol_fakes import FakeControlAPI, RecordingAccessLog, echo

ROUTES = {"m": ModelRoute("1.0", {"1.0": VersionRoute("1.0", "ready", 1)})}
FORWARDED = {"X-Forwarded-For": "192.0.2.7"}


def test_header_of_a_client_is_not_its_address(inference: Any) -> None:
    app = inference(echo)
    app("POST", "/predictions/m", b"x", FORWARDED)
    assert [line[0] for line in app.access_log] == ["127.0.0.1:40000"]


@pytest.mark.parametrize(("proxies", "client"), [([], "127.0.0.1:"), (["127.0.0.1"], "192.0.2.7:0")])
def test_listener_believes_configured_proxies_alone(proxies: list[str], client: str) -> None:
    log = RecordingAccessLog()
    settings = load({"telemetry": {"trusted_proxies": proxies}})
    app = management_app(ControlPlane(FakeControlAPI(), settings), settings, log)  # type: ignore[arg-type]
    port = free_port()

    async def ask() -> None:
        listener = HttpListener(app, "127.0.0.1", port, "management.port")
        await listener.open()
        async with httpx.AsyncClient(timeout=60) as http:
            await http.get(f"http://127.0.0.1:{port}/models", headers=FORWARDED)
        await listener.close()

    asyncio.run(ask())
    assert log.lines[0][0].startswith(client)


def test_name_of_the_key_is_logged_also_where_its_rights_do_not_suffice(inference: Any) -> None:
    grants = {
        sha256(name.encode()).digest(): KeyGrant(frozenset((right,)), name=name)  # type: ignore[arg-type]
        for name, right in (("team", "infer"), ("eye", "observe"))
    }
    app = inference(echo, RoutingTable(1, ROUTES, startup_complete=True, access=AccessTable(grants)))
    for key in ("team", "eye", "none"):
        app("POST", "/predictions/m", b"x", {"Authorization": f"Bearer {key}"})
    assert [line[-1] for line in app.access_log] == ["team", "eye", ""]
