"""``/models/{model}/rollout``: progressive rollouts, with automatic rollback."""

from __future__ import annotations

from serve_app.control.api import ControlPlane
from serve_app.errors import MethodNotAllowed, ResourceNotFound
from serve_app.protocols.http import json_body
from serve_app.protocols.http.exchange import HttpExchange
from serve_app.protocols.torchserve import errors


async def handle(
    exchange: HttpExchange, control: ControlPlane, model: str, verb: list[str], limit: int
) -> None:
    """Send the state of the rollout after the request.

    POST starts one from a document of at most ``limit`` bytes; POST of a verb pauses, resumes or aborts it.
    """
    match [exchange.method, *verb]:
        case ["GET"]:
            document = await control.get_rollout(model)
        case ["POST"]:
            document = await control.start_rollout(model, await json_body.read(exchange, limit))
        case ["POST", ("pause" | "resume" | "abort") as action]:
            document = await control.update_rollout(model, action)
        case [_] | [_, "pause" | "resume" | "abort"]:
            raise MethodNotAllowed()
        case _:
            raise ResourceNotFound()
    await errors.send_json(exchange, document)
