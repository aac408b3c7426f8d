"""Experiments over REST: begun and listed under their model, asked for, stopped and told of rewards by their id."""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qs

from serve_app.controlplane import ControlPlane
from serve_app.doors import auth, documents
from serve_app.doors.exchange import Exchange
from serve_app.doors.torchserve.errors import reply_json
from serve_app.errors import MethodNotAllowed, ResourceNotFound


async def of_model(exchange: Exchange, control: ControlPlane, model: str, limit: int) -> None:
    """``/models/{model}/experiments``: POST begins one, GET lists them."""
    if exchange.method == "POST":
        document = await documents.read(exchange, limit)
        await reply_json(exchange, await control.begin_experiment(model, document))
    elif exchange.method == "GET":
        await reply_json(exchange, {"experiments": await control.experiments(model)})
    else:
        raise MethodNotAllowed()


async def by_id(exchange: Exchange, control: ControlPlane, rest: list[str], limit: int) -> None:
    """``/experiments``: GET lists those of every model that the request's key is for.

    ``/experiments/{id}``: GET says what is known by now, DELETE stops it, and with ``forget=true`` drops it afterwards.
    ``/experiments/{id}/events``: POST says what became of calls that it has dealt out.
    """
    within = auth.within(exchange)
    match [exchange.method, *rest]:
        case ["GET"]:
            said: Any = {"experiments": await control.experiments(within=within)}
        case ["GET", id]:
            said = await control.experiment(id, within)
        case ["DELETE", id] if _forget(exchange):
            await control.forget_experiment(id, within)
            said = {"status": f'Experiment "{id}" forgotten'}
        case ["DELETE", id]:
            said = await control.stop_experiment(id, within)
        case ["POST", id, "events"]:
            said = await control.reward(id, await documents.read(exchange, limit), within)
        case [_] | [_, _] | [_, _, "events"]:
            raise MethodNotAllowed()
        case _:
            raise ResourceNotFound()
    await reply_json(exchange, said)


def _forget(exchange: Exchange) -> bool:
    query = parse_qs(exchange.scope.get("query_string", b"").decode("latin-1"))
    return query.get("forget", [""])[-1].lower() == "true"
