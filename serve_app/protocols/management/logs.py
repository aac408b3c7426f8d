"""``/logs`` and ``/events``: what the server and its models logged, and the events of all models' starts."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from starlette.routing import Route
from typing_extensions import NotRequired, TypedDict

from serve_app.control.api import ControlPlane
from serve_app.domain.log_query import LOG_NAMES, MAX_LOG_RECORDS, LogName, LogPage, LogQuery
from serve_app.domain.model import EventQuery
from serve_app.domain.validation import documented
from serve_app.errors import BadRequest, ModelNotAllowed
from serve_app.protocols.http import auth
from serve_app.protocols.http.exchange import HttpExchange
from serve_app.protocols.http.numbers import parse_limit
from serve_app.protocols.management.routing import route
from serve_app.protocols.torchserve.parameters import parse_query
from serve_app.settings import Settings
from serve_app.telemetry.log_reader import read_records
from serve_app.telemetry.logs import LEVELS

_Limit = Annotated[int, documented("The number of records.", minimum=1, maximum=MAX_LOG_RECORDS)]
_MAX_TEXT = 200  # characters of a searched text


class LogParameters(TypedDict, total=False):
    log: Annotated[LogName, documented("The log; default: server.")]
    limit: _Limit
    level: Annotated[str, documented("Only this level and higher ones.", enum=list(LEVELS))]
    model: Annotated[str, documented("Only records of this model.")]
    text: Annotated[str, documented("Only records with this text.", maxLength=_MAX_TEXT)]


class EventListParameters(TypedDict, total=False):
    limit: _Limit
    model: Annotated[str, documented("Only events of this model.")]
    stage: Annotated[str, documented("Only this stage, such as failed.")]


class EventDocument(TypedDict):
    """A stage of a model's start, with the fields of that stage."""

    id: int
    time: Annotated[float, documented("In seconds since the epoch.")]
    model: str
    version: str
    registration: str
    stage: str
    details: NotRequired[dict[str, Any]]


class EventPage(TypedDict):
    """Events, the newest first."""

    events: list[EventDocument]


def build_routes(control: ControlPlane, settings: Settings) -> list[Route]:
    """Return the routes; the logs need a key that may manage, and one of all models unless they name one."""

    async def list_records(exchange: HttpExchange) -> LogPage:
        query = _parse_log_query(parse_query(exchange))
        allowed_models = auth.get_allowed_models(exchange)
        if "*" not in allowed_models:
            if not query.model or query.log == "server":  # the server's log has records of every model
                raise ModelNotAllowed("*")
            auth.require_model(exchange, query.model)
        return {"log": query.log, "records": await asyncio.to_thread(read_records, settings, query)}

    async def list_events(exchange: HttpExchange) -> EventPage:
        parameters = parse_query(exchange)
        limit = parse_limit(parameters.get("limit", "100"), MAX_LOG_RECORDS)
        query = EventQuery(limit, parameters.get("model", ""), parameters.get("stage", ""))
        events = await control.api.list_events(query, auth.get_allowed_models(exchange))
        return {
            "events": [
                {
                    "id": event.id,
                    "time": round(event.time, 3),
                    "model": event.model,
                    "version": event.version,
                    "registration": event.registration,
                    "stage": event.stage,
                    "details": dict(event.details),
                }
                for event in events
            ]
        }

    return [route("/logs", GET=list_records), route("/events", GET=list_events)]


def _parse_log_query(parameters: dict[str, str]) -> LogQuery:
    """Return the filter that query parameters describe. Raises BadRequest."""
    log, level = parameters.get("log", "server"), parameters.get("level", "").upper()
    text = parameters.get("text", "")
    if log not in LOG_NAMES:
        raise BadRequest(f"log is {log[:80]!r}; it must be one of {', '.join(LOG_NAMES)}.")
    if level and level not in LEVELS:
        raise BadRequest(f"level is {level[:80]!r}; it must be one of {', '.join(LEVELS)}.")
    if len(text) > _MAX_TEXT:
        raise BadRequest(f"text has {len(text)} characters; it may have {_MAX_TEXT}.")
    limit = parse_limit(parameters.get("limit", "100"), MAX_LOG_RECORDS)
    return LogQuery(log, limit, level, parameters.get("model", ""), text)
