"""Keys over REST, for a key that may manage every model: created, listed, rotated and revoked by name."""

from __future__ import annotations

from typing import Any

from serve_app.domain.api_key import KeyList, KeyRequest, NewKeyDocument, RotationRequest
from serve_app.protocols.http import json_body
from serve_app.protocols.http.endpoints import API, Content, delete, get, json, post
from serve_app.protocols.http.json_errors import CHANGED, ERRORS
from serve_app.protocols.management.request import ManagementRequest


async def list_all(request: ManagementRequest) -> KeyList:
    return {"keys": await request.control.api.list_keys(request.exchange.grant)}


async def create(request: ManagementRequest) -> None:
    document = await request.read_json()
    await _send_new_key(request, await request.control.create_key(document, request.exchange.grant))


async def rotate(request: ManagementRequest, key_name: str) -> None:
    body = await request.exchange.read_body(request.max_body_size)
    document = json_body.parse_object(body) if body.strip() else {}
    await _send_new_key(request, await request.control.rotate_key(key_name, document, request.exchange.grant))


async def revoke(request: ManagementRequest, key_name: str) -> Any:
    await request.control.api.revoke_key(key_name, request.exchange.grant)
    return {"status": f'Key "{key_name}" revoked'}


async def _send_new_key(request: ManagementRequest, document: NewKeyDocument) -> None:
    await request.send(document, 202 if "status" in document else 200)


_NEW_KEY = {200: NewKeyDocument, 202: json(NewKeyDocument, "Some processes do not accept the key yet.")}
KEYS = API(
    "Keys",
    "Keys for requests, for a key that may manage every model.",
    ERRORS,
    (
        get("/keys", "keys", "List the keys by name.", KeyList, (409,), call=list_all, rights=("manage",)),
        post(
            "/keys",
            "create_key",
            "Create a key, which is returned once.",
            _NEW_KEY,
            (403, 409),
            KeyRequest,
            call=create,
        ),
        delete("/keys/{key_name}", "revoke_key", "Revoke a key.", CHANGED, (409,), call=revoke),
        post(
            "/keys/{key_name}/rotate",
            "rotate_key",
            "Replace a key, and accept the old one for a while.",
            _NEW_KEY,
            (403, 409),
            Content({"application/json": RotationRequest}, "The grace of the old key.", required=False),
            call=rotate,
        ),
    ),
)
