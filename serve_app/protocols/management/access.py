"""``/access``: the rights of the request's key, for programs that adapt to them."""

from __future__ import annotations

from typing import Annotated

from starlette.routing import Route
from typing_extensions import TypedDict

from serve_app.control.api import ControlPlane
from serve_app.domain.access import ROLES, Right
from serve_app.domain.validation import documented
from serve_app.protocols.http import auth
from serve_app.protocols.http.exchange import HttpExchange
from serve_app.protocols.management.routing import route


class AccessDocument(TypedDict):
    """The rights of a key; without required keys, every right."""

    required: Annotated[bool, documented("Whether requests need a key.")]
    name: Annotated[str, documented("The key's name; empty where no key is required.")]
    rights: list[Right]
    models: Annotated[list[str], documented("Patterns of the models that the key covers.")]
    expires: Annotated[float | None, documented("In seconds since the epoch; null: never.")]


def build_routes(control: ControlPlane) -> list[Route]:
    """Return the route, which any valid key may use."""

    async def get(exchange: HttpExchange) -> AccessDocument:
        grant = exchange.grant
        if control.access is None or grant is None:
            every = sorted(ROLES["manage"])
            return {"required": False, "name": "", "rights": every, "models": ["*"], "expires": None}
        return {
            "required": True,
            "name": grant.name,
            "rights": sorted(grant.rights),
            "models": list(auth.get_allowed_models(exchange)),
            "expires": grant.expires,
        }

    return [route("/access", GET=get)]
