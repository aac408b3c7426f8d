"""``/models/{model}/traffic``: which version of a model gets which of its calls."""

from __future__ import annotations

from serve_app.controlplane import ControlPlane
from serve_app.doors import documents
from serve_app.doors.exchange import Exchange
from serve_app.doors.torchserve import errors, openapi
from serve_app.errors import MethodNotAllowed


async def answer(exchange: Exchange, control: ControlPlane, model: str, limit: int) -> None:
    """Answer with the policy that holds after the request; a body has at most ``limit`` bytes."""
    if exchange.method == "GET":
        said = await control.traffic(model)
    elif exchange.method == "PUT":
        said = await control.set_traffic(model, await documents.read(exchange, limit))
    elif exchange.method == "DELETE":
        said = await control.reset_traffic(model)
    elif exchange.method == "OPTIONS":
        await control.traffic(model)
        said = openapi.management_of(model)
    else:
        raise MethodNotAllowed()
    await errors.reply_json(exchange, said)
