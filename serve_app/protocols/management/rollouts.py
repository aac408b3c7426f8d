"""``/models/{model}/rollout``: progressive rollouts, with automatic rollback."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, get_args

from starlette.routing import Route

from serve_app.control.api import ControlPlane
from serve_app.protocols.http import json_body
from serve_app.protocols.http.exchange import HttpExchange
from serve_app.protocols.management.routing import route

_PATH = "/models/{model}/rollout"
_Verb = Literal["pause", "resume", "abort"]


def build_routes(control: ControlPlane, limit: int) -> list[Route]:
    """Return the routes, which send the state of the rollout after the request.

    POST starts one from a document of at most ``limit`` bytes; POST of a verb pauses, resumes or aborts it.
    """

    async def start(exchange: HttpExchange, model: str) -> Any:
        return await control.start_rollout(model, await json_body.read(exchange, limit))

    async def update(exchange: HttpExchange, model: str, verb: _Verb) -> Any:
        return await control.api.update_rollout(model, verb)

    return [
        route(_PATH, GET=lambda exchange, model: control.api.get_rollout(model), POST=start),
        *(route(f"{_PATH}/{verb}", POST=partial(update, verb=verb)) for verb in get_args(_Verb)),
    ]
