"""``/access``: the rights of the request's key, for programs that adapt to them."""

from __future__ import annotations

from typing import Annotated

from typing_extensions import TypedDict

from serve_app.domain.access import ROLES, Right
from serve_app.domain.validation import documented
from serve_app.protocols.http.endpoints import get
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
