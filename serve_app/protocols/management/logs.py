"""``/logs`` and ``/events``: what the server and its models logged, and the events of all models' starts."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from typing_extensions import NotRequired, TypedDict

from serve_app.domain.log_query import LOG_NAMES, MAX_LOG_RECORDS, LogName, LogPage, LogQuery
from serve_app.domain.model import EventQuery
from serve_app.domain.validation import documented
from serve_app.errors import BadRequest, ModelNotAllowed
from serve_app.protocols.http import auth
from serve_app.protocols.http.endpoints import get
from serve_app.protocols.http.exchange import parse_limit
from serve_app.protocols.management.request import ManagementRequest
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


async def list_records(request: ManagementRequest) -> LogPage:
    """Return records for a key of all models, or for one of the model that the query names."""
    query = _parse_log_query(request.query)
    if "*" not in request.allowed_models:
        if not query.model or query.log == "server":  # the server's log has records of every model
            raise ModelNotAllowed("*")
        auth.require_model(request.exchange, query.model)
    return {"log": query.log, "records": await asyncio.to_thread(read_records, request.settings, query)}


async def list_events(request: ManagementRequest) -> EventPage:
    limit = parse_limit(request.query.get("limit", "100"), MAX_LOG_RECORDS)
    query = EventQuery(limit, request.query.get("model", ""), request.query.get("stage", ""))
    events = await request.control.api.list_events(query, request.allowed_models)
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


ENDPOINTS = (
    get(
        "/events",
        "all_events",
        "List events of models, newest first.",
        EventPage,
        query=EventListParameters,
        call=list_events,
    ),
    get(
        "/logs",
        "logs",
        "List records of a log, newest first.",
        LogPage,
        query=LogParameters,
        call=list_records,
        rights=("manage",),
    ),
)
