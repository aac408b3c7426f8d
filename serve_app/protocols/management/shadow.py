"""``/models/{model}/shadow``: the comparison of shadow responses with live ones."""

from __future__ import annotations

from typing import Any

from starlette.routing import Route

from serve_app.control.api import ControlPlane
from serve_app.protocols.http.exchange import HttpExchange
from serve_app.protocols.management.routing import route
from serve_app.protocols.torchserve import openapi


def build_routes(control: ControlPlane) -> list[Route]:
    """Return the routes: GET returns the comparison, DELETE deletes it with the inputs that it stores.

    A shadow is configured with the model's traffic policy.
    """

    async def reset(exchange: HttpExchange, model: str) -> Any:
        await control.api.reset_shadow(model)
        return {"status": f'Comparison of the shadow of model "{model}" deleted'}

    async def describe(exchange: HttpExchange, model: str) -> Any:
        await control.api.get_traffic(model)
        return openapi.describe_model_management(model)

    return [
        route(
            "/models/{model}/shadow",
            GET=lambda exchange, model: control.api.get_shadow(model),
            DELETE=reset,
            OPTIONS=describe,
        ),
        route(
            "/models/{model}/shadow/history",
            GET=lambda exchange, model: control.api.get_shadow_history(model),
        ),
    ]
