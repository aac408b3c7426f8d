"""Keys over REST: the rights of the request's own, and the administration of all, by name."""

from __future__ import annotations

from typing import Annotated, Any

from typing_extensions import TypedDict

from serve_app.domain.access import ROLES, Right
from serve_app.domain.access_keys import KeyList, KeyRequest, NewKeyDocument, RotationRequest
from serve_app.domain.validation import documented
from serve_app.protocols.http import json_body
from serve_app.protocols.http.endpoints import API, Content, delete, get, json, post
from serve_app.protocols.http.json_errors import CHANGED, ERRORS
from serve_app.protocols.management.request import ManagementRequest


class AccessDocument(TypedDict):
    """The rights of a key; without required keys, every right."""

    required: Annotated[bool, documented("Whether requests need a key.")]
    name: Annotated[str, documented("The key's name; empty where no key is required.")]
    rights: list[Right]
    models: Annotated[list[str], documented("Patterns of the models that the key covers.")]
    expires: Annotated[float | None, documented("In seconds since the epoch; null: never.")]


async def get_access(request: ManagementRequest) -> AccessDocument:
    grant = request.exchange.grant
    if request.control.access is None or grant is None:
        every = sorted(ROLES["manage"])
        return {"required": False, "name": "", "rights": every, "models": ["*"], "expires": None}
    return {
        "required": True,
        "name": grant.name,
        "rights": sorted(grant.rights),
        "models": list(request.allowed_models),
        "expires": grant.expires,
    }


ENDPOINTS = (
    get(
        "/access",
        "access",
        "Get the rights of the request's key.",
        AccessDocument,
        call=get_access,
        rights=("infer", "observe", "manage", "token"),
    ),
)


async def list_keys(request: ManagementRequest) -> KeyList:
    return {"keys": await request.control.api.list_keys(request.exchange.grant)}


async def create_key(request: ManagementRequest) -> None:
    document = await request.read_json()
    await _send_new_key(request, await request.control.create_key(document, request.exchange.grant))


async def rotate_key(request: ManagementRequest, key_name: str) -> None:
    body = await request.exchange.read_body(request.max_body_size)
    document = json_body.parse_object(body) if body.strip() else {}
    await _send_new_key(request, await request.control.rotate_key(key_name, document, request.exchange.grant))


async def revoke_key(request: ManagementRequest, key_name: str) -> Any:
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
        get("/keys", "keys", "List the keys by name.", KeyList, (409,), call=list_keys, rights=("manage",)),
        post(
            "/keys",
            "create_key",
            "Create a key, which is returned once.",
            _NEW_KEY,
            (403, 409),
            KeyRequest,
            call=create_key,
        ),
        delete("/keys/{key_name}", "revoke_key", "Revoke a key.", CHANGED, (409,), call=revoke_key),
        post(
            "/keys/{key_name}/rotate",
            "rotate_key",
            "Replace a key, and accept the old one for a while.",
            _NEW_KEY,
            (403, 409),
            Content({"application/json": RotationRequest}, "The grace of the old key.", required=False),
            call=rotate_key,
        ),
    ),
)
