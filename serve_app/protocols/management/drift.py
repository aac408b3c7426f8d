"""``/models/{model}/drift``: the drift of captured requests from their reference."""

from __future__ import annotations

from typing import Any

from starlette.routing import Route

from serve_app.control.api import ControlPlane
from serve_app.protocols.http.exchange import HttpExchange
from serve_app.protocols.management.routing import route


def build_routes(control: ControlPlane) -> list[Route]:
    """Return the routes: GET of all versions or of one, and POST that makes the window the reference."""

    async def get(exchange: HttpExchange, model: str, version: str | None = None) -> Any:
        return await control.api.get_drift(model, version)

    async def reset(exchange: HttpExchange, model: str, version: str) -> Any:
        return await control.api.reset_drift(model, version)

    return [
        route("/models/{model}/drift", GET=get),
        route("/models/{model}/{version}/drift", GET=get),
        route("/models/{model}/{version}/drift/reset", POST=reset),
    ]
