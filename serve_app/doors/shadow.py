"""``/models/{model}/shadow``: how the answers of a model's shadow agree with the live ones."""

from __future__ import annotations

from serve_app.controlplane import ControlPlane
from serve_app.doors.exchange import Exchange
from serve_app.doors.torchserve import errors, openapi
from serve_app.errors import MethodNotAllowed


async def answer(exchange: Exchange, control: ControlPlane, model: str) -> None:
    """GET says it, DELETE forgets it, with the inputs that are kept; a shadow is set with the model's traffic."""
    if exchange.method == "GET":
        said = await control.shadow(model)
    elif exchange.method == "DELETE":
        await control.forget_shadow(model)
        said = {"status": f'What was compared of the shadow of model "{model}" is forgotten'}
    elif exchange.method == "OPTIONS":
        await control.traffic(model)
        said = openapi.management_of(model)
    else:
        raise MethodNotAllowed()
    await errors.reply_json(exchange, said)
