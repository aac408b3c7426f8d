"""``GET /models/{model_name}/events``: the stages of a model's registration, as server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, Any

import orjson
from typing_extensions import TypedDict

from serve_app.domain.model import FINAL_STAGES, ModelEvent
from serve_app.domain.request import InferenceResponse, ResponseStream
from serve_app.domain.validation import documented
from serve_app.errors import BadRequest
from serve_app.protocols.http import auth
from serve_app.protocols.http.endpoints import Content, get
from serve_app.protocols.http.exchange import ClientDisconnected, parse_decimal
from serve_app.protocols.http.sse import EVENT_STREAM, HEARTBEAT_INTERVAL_S, KEEP_ALIVE_COMMENT
from serve_app.protocols.management.request import ManagementRequest
from serve_app.protocols.torchserve.parameters import Flag, parse_bool

_HEADERS = [(b"content-type", EVENT_STREAM.encode()), (b"x-accel-buffering", b"no")]


class EventParameters(TypedDict):
    since: Annotated[int, documented("Only events after this one.", minimum=0)]
    follow: Annotated[Flag, documented("true: continue the stream after the model is ready or has failed.")]
    registration: Annotated[str, documented("Only the registration with this name.")]


EventHeaders = TypedDict(
    "EventHeaders", {"last-event-id": Annotated[str, documented("As since.", pattern="^[0-9]+$")]}
)


async def stream(request: ManagementRequest, model_name: str) -> None:
    """Stream the events of a model's last registration, or those after ``since``, up to its last stage.

    Query: ``since`` (or the header Last-Event-ID), ``registration`` (the events of that one only), and
    ``follow=true`` (do not end at the last stage).
    """
    exchange, control, query = request.exchange, request.control, request.query
    since = _parse_event_id(query.get("since") or exchange.headers.get("last-event-id"))
    registration = query.get("registration") or None
    follow = parse_bool(query.get("follow"))
    # Looked up before the response starts, because the status may be 404.
    first_events = await control.api.poll_events(model_name, registration, since, 0.0)

    async def encode_events() -> AsyncIterator[bytes]:
        last_id, events = since, first_events
        while auth.is_still_allowed(control.access, exchange, model_name, "observe"):
            for event in events:
                yield _encode(event)
                if event.stage in FINAL_STAGES and not follow:
                    return
                last_id = event.id
            events = await control.api.poll_events(model_name, registration, last_id, HEARTBEAT_INTERVAL_S)
            if not events and last_id is None:
                return  # the registration never started
            if not events:
                yield KEEP_ALIVE_COMMENT

    exchange.cancel_on_disconnect()
    try:
        response = ResponseStream(InferenceResponse(b""), encode_events())
        await exchange.send_stream(200, list(_HEADERS), response)
    except asyncio.CancelledError:  # most clients end the stream by disconnecting
        raise ClientDisconnected() from None


def _encode(event: ModelEvent) -> bytes:
    fields = {
        "model": event.model,
        "version": event.version or None,
        "registration": event.registration,
        "time": event.time,
        **event.details,
    }
    data = orjson.dumps({key: value for key, value in fields.items() if value is not None})
    return b"id: %d\nevent: %s\ndata: %s\n\n" % (event.id, event.stage.encode(), data)


def _parse_event_id(text: str | None) -> int | None:
    if text is None:
        return None
    if (id := parse_decimal(text)) is None:
        raise BadRequest(f"since is the id of an event, and is {text[:80]!r}.")
    return id


ENDPOINTS = (
    get(
        "/models/{model_name}/events",
        "events",
        "Stream the events of a model's start.",
        Content({"text/event-stream": Any}, "Server-sent events."),
        query=EventParameters,
        headers=EventHeaders,
        call=stream,
        other_methods="next",  # with another method, the path is that of the version "events"
    ),
)
