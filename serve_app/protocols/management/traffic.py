"""``/models/{model}/traffic``: a model's traffic policy."""

from __future__ import annotations

from typing import Any

from starlette.routing import Route

from serve_app.control.api import ControlPlane
from serve_app.protocols.http import json_body
from serve_app.protocols.http.exchange import HttpExchange
from serve_app.protocols.management.routing import route
from serve_app.protocols.torchserve import openapi


def build_routes(control: ControlPlane, limit: int) -> list[Route]:
    """Return the route, which sends the policy that is active after the request.

    A body has at most ``limit`` bytes.
    """

    async def put(exchange: HttpExchange, model: str) -> Any:
        return await control.set_traffic(model, await json_body.read(exchange, limit))

    async def describe(exchange: HttpExchange, model: str) -> Any:
        await control.api.get_traffic(model)
        return openapi.describe_model_management(model)

    return [
        route(
            "/models/{model}/traffic",
            GET=lambda exchange, model: control.api.get_traffic(model),
            PUT=put,
            DELETE=lambda exchange, model: control.reset_traffic(model),
            OPTIONS=describe,
        )
    ]
