"""Experiments over REST: started and listed under their model, read, stopped and rewarded by their id."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from starlette.routing import Route
from typing_extensions import TypedDict

from serve_app.control.api import ControlPlane
from serve_app.domain.experiment import ExperimentSummary
from serve_app.domain.validation import documented
from serve_app.protocols.http import auth, json_body
from serve_app.protocols.http.exchange import HttpExchange
from serve_app.protocols.management.routing import route
from serve_app.protocols.torchserve.parameters import parse_bool, parse_query


class ExperimentList(TypedDict):
    """Experiments without their results, the newest first."""

    experiments: list[ExperimentSummary]


class PurgeParameters(TypedDict):
    purge: Annotated[Literal["true", "false"], documented("true: delete it with its measurements.")]


def build_routes(control: ControlPlane, limit: int) -> list[Route]:
    """Return the routes of experiments; a body has at most ``limit`` bytes.

    By id, GET returns the results so far; DELETE stops an experiment, and with ``purge=true`` deletes a
    stopped one. The list of all experiments has those of every model that the request's key covers.
    """

    async def start(exchange: HttpExchange, model: str) -> Any:
        return await control.start_experiment(model, await json_body.read(exchange, limit))

    async def list_of_model(exchange: HttpExchange, model: str) -> ExperimentList:
        return {"experiments": await control.list_experiments(model)}

    async def list_all(exchange: HttpExchange) -> ExperimentList:
        allowed_models = auth.get_allowed_models(exchange)
        return {"experiments": await control.list_experiments(allowed_models=allowed_models)}

    async def get(exchange: HttpExchange, id: str) -> Any:
        return await control.api.get_experiment(id, auth.get_allowed_models(exchange))

    async def get_history(exchange: HttpExchange, id: str) -> Any:
        return await control.api.get_experiment_history(id, auth.get_allowed_models(exchange))

    async def delete(exchange: HttpExchange, id: str) -> Any:
        allowed_models = auth.get_allowed_models(exchange)
        if not parse_bool(parse_query(exchange).get("purge")):
            return await control.api.stop_experiment(id, allowed_models)
        await control.api.delete_experiment(id, allowed_models)
        return {"status": f'Experiment "{id}" forgotten'}

    async def record(exchange: HttpExchange, id: str) -> Any:
        return await record_rewards(exchange, control, id, limit)

    return [
        route("/models/{model}/experiments", GET=list_of_model, POST=start),
        route("/experiments", GET=list_all),
        route("/experiments/{id}", GET=get, DELETE=delete),
        route("/experiments/{id}/history", GET=get_history),
        route("/experiments/{id}/events", POST=record),
    ]


async def record_rewards(exchange: HttpExchange, control: ControlPlane, id: str, limit: int) -> Any:
    """Record rewards for requests that an experiment routed; return the document of the response."""
    document = await json_body.read(exchange, limit)
    return await control.record_rewards(id, document, auth.get_allowed_models(exchange))
