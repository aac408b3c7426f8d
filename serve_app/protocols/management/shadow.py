"""``/models/{model}/shadow``: the comparison of shadow responses with live ones."""

from __future__ import annotations

from typing import Any

from serve_app.control.api import ControlPlane
from serve_app.errors import MethodNotAllowed
from serve_app.protocols.http.exchange import HttpExchange
from serve_app.protocols.torchserve import errors, openapi


async def handle(exchange: HttpExchange, control: ControlPlane, model: str) -> None:
    """Handle GET, which returns the comparison, and DELETE, which deletes it with the inputs that it stores.

    A shadow is configured with the model's traffic policy.
    """
    document: Any
    if exchange.method == "GET":
        document = await control.get_shadow(model)
    elif exchange.method == "DELETE":
        await control.reset_shadow(model)
        document = {"status": f'Comparison of the shadow of model "{model}" deleted'}
    elif exchange.method == "OPTIONS":
        await control.get_traffic(model)
        document = openapi.describe_model_management(model)
    else:
        raise MethodNotAllowed()
    await errors.send_json(exchange, document)
