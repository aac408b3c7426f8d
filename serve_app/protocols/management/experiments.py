"""Experiments over REST: started and listed under their model, read, stopped and rewarded by their id."""

from __future__ import annotations

from typing import Annotated, Any, Literal
from urllib.parse import parse_qs

from typing_extensions import TypedDict

from serve_app.control.api import ControlPlane
from serve_app.domain.experiment import ExperimentSummary
from serve_app.domain.validation import documented
from serve_app.errors import MethodNotAllowed, ResourceNotFound
from serve_app.protocols.http import auth, json_body
from serve_app.protocols.http.exchange import HttpExchange
from serve_app.protocols.torchserve.errors import send_json


class ExperimentList(TypedDict):
    """Experiments without their results, the newest first."""

    experiments: list[ExperimentSummary]


class PurgeParameters(TypedDict):
    purge: Annotated[Literal["true", "false"], documented("true: delete it with its measurements.")]


async def handle_model(exchange: HttpExchange, control: ControlPlane, model: str, limit: int) -> None:
    """Handle ``/models/{model}/experiments``: POST starts one, GET lists them."""
    if exchange.method == "POST":
        document = await json_body.read(exchange, limit)
        await send_json(exchange, await control.start_experiment(model, document))
    elif exchange.method == "GET":
        experiments: ExperimentList = {"experiments": await control.list_experiments(model)}
        await send_json(exchange, experiments)
    else:
        raise MethodNotAllowed()


async def handle(exchange: HttpExchange, control: ControlPlane, rest: list[str], limit: int) -> None:
    """Handle ``/experiments``, ``/experiments/{id}`` and ``/experiments/{id}/events``.

    GET lists the experiments of every model that the request's key covers. By id, GET returns the results so
    far; DELETE stops an experiment, and with ``purge=true`` deletes a stopped one. POST of events records
    rewards for requests that the experiment routed.
    """
    allowed_models = auth.get_allowed_models(exchange)
    match [exchange.method, *rest]:
        case ["GET"]:
            document: Any = {"experiments": await control.list_experiments(allowed_models=allowed_models)}
        case ["GET", id]:
            document = await control.get_experiment(id, allowed_models)
        case ["DELETE", id] if _should_forget(exchange):
            await control.delete_experiment(id, allowed_models)
            document = {"status": f'Experiment "{id}" forgotten'}
        case ["DELETE", id]:
            document = await control.stop_experiment(id, allowed_models)
        case ["POST", id, "events"]:
            document = await control.record_rewards(id, await json_body.read(exchange, limit), allowed_models)
        case [_] | [_, _] | [_, _, "events"]:
            raise MethodNotAllowed()
        case _:
            raise ResourceNotFound()
    await send_json(exchange, document)


def _should_forget(exchange: HttpExchange) -> bool:
    query = parse_qs(exchange.scope.get("query_string", b"").decode("latin-1"))
    return query.get("purge", [""])[-1].lower() == "true"
