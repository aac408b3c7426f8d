"""``/models/{model}/rollout``: a version that takes over step by step, or goes back by itself."""

from __future__ import annotations

from serve_app.controlplane import ControlPlane
from serve_app.doors import documents
from serve_app.doors.exchange import Exchange
from serve_app.doors.torchserve import errors
from serve_app.errors import MethodNotAllowed, ResourceNotFound


async def answer(exchange: Exchange, control: ControlPlane, model: str, verb: list[str], limit: int) -> None:
    """Answer with the rollout as it is after the request. POST begins one, of at most ``limit`` bytes, or steers it."""
    match [exchange.method, *verb]:
        case ["GET"]:
            said = await control.rollout(model)
        case ["POST"]:
            said = await control.begin_rollout(model, await documents.read(exchange, limit))
        case ["POST", ("pause" | "resume" | "abort") as steer]:
            said = await control.steer_rollout(model, steer)
        case [_] | [_, "pause" | "resume" | "abort"]:
            raise MethodNotAllowed()
        case _:
            raise ResourceNotFound()
    await errors.reply_json(exchange, said)
