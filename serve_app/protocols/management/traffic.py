"""``/models/{model}/traffic``: a model's traffic policy."""

from __future__ import annotations

from typing import Any

from serve_app.control.api import ControlPlane
from serve_app.errors import MethodNotAllowed
from serve_app.protocols.http import json_body
from serve_app.protocols.http.exchange import HttpExchange
from serve_app.protocols.torchserve import errors, openapi


async def handle(exchange: HttpExchange, control: ControlPlane, model: str, limit: int) -> None:
    """Send the policy that is active after the request; a body has at most ``limit`` bytes."""
    document: Any
    if exchange.method == "GET":
        document = await control.get_traffic(model)
    elif exchange.method == "PUT":
        document = await control.set_traffic(model, await json_body.read(exchange, limit))
    elif exchange.method == "DELETE":
        document = await control.reset_traffic(model)
    elif exchange.method == "OPTIONS":
        await control.get_traffic(model)
        document = openapi.describe_model_management(model)
    else:
        raise MethodNotAllowed()
    await errors.send_json(exchange, document)
