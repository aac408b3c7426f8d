"""Keys over REST, for a key that may manage every model: created, listed, rotated and revoked by name."""

from __future__ import annotations

from typing import Any

from starlette.routing import Route

from serve_app.control.api import ControlPlane
from serve_app.domain.api_key import KeyList, NewKeyDocument
from serve_app.protocols.http import json_body
from serve_app.protocols.http.exchange import HttpExchange
from serve_app.protocols.http.json_errors import send_json
from serve_app.protocols.management.routing import route


def build_routes(control: ControlPlane, limit: int) -> list[Route]:
    """Return the routes of keys; a body has at most ``limit`` bytes."""

    async def list_all(exchange: HttpExchange) -> KeyList:
        return {"keys": await control.api.list_keys(exchange.grant)}

    async def create(exchange: HttpExchange) -> None:
        document = await json_body.read(exchange, limit)
        await _send_new_key(exchange, await control.create_key(document, exchange.grant))

    async def rotate(exchange: HttpExchange, name: str) -> None:
        body = await exchange.read_body(limit)
        document = json_body.parse_object(body) if body.strip() else {}
        await _send_new_key(exchange, await control.rotate_key(name, document, exchange.grant))

    async def revoke(exchange: HttpExchange, name: str) -> Any:
        await control.api.revoke_key(name, exchange.grant)
        return {"status": f'Key "{name}" revoked'}

    return [
        route("/keys", GET=list_all, POST=create),
        route("/keys/{name}", DELETE=revoke),
        route("/keys/{name}/rotate", POST=rotate),
    ]


async def _send_new_key(exchange: HttpExchange, document: NewKeyDocument) -> None:
    await send_json(exchange, document, 202 if "status" in document else 200)
