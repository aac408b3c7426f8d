"""``GET /models/{model}/events``: how a model comes up, as server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from urllib.parse import parse_qsl

import orjson

from serve_app.controlplane import ControlPlane
from serve_app.doors.exchange import CallerLeft, Exchange
from serve_app.doors.streaming import COMMENT, EVENT_STREAM, HEARTBEAT
from serve_app.errors import BadRequest
from serve_app.types import LAST_STAGES, Event, Reply, ReplyStream

_HEADERS = [(b"content-type", EVENT_STREAM.encode()), (b"x-accel-buffering", b"no")]


async def stream(exchange: Exchange, control: ControlPlane, model: str) -> None:
    """Answer with the events of a model's last registration, or after ``since``, to the one that ends it.

    Query: ``since`` (or the header Last-Event-ID), ``registration`` (that one's events alone), and
    ``follow=true`` (do not end).
    """
    query = dict(parse_qsl(exchange.scope.get("query_string", b"").decode("latin-1")))
    since = _number(query.get("since") or exchange.headers.get("last-event-id"))
    registration = query.get("registration") or None
    follow = query.get("follow", "").lower() == "true"
    first = await control.events(model, registration, since, 0.0)  # before the answer begins: it may be a 404

    async def pieces() -> AsyncIterator[bytes]:
        after, found = since, first
        while True:
            for event in found:
                yield _written(event)
                if event.stage in LAST_STAGES and not follow:
                    return
                after = event.id
            found = await control.events(model, registration, after, HEARTBEAT)
            if not found and after is None:
                return  # a registration that never began
            if not found:
                yield COMMENT

    exchange.watch()
    try:
        await exchange.stream(200, list(_HEADERS), ReplyStream(Reply(b""), pieces()))
    except asyncio.CancelledError:  # most listeners end like this
        raise CallerLeft() from None


def _written(event: Event) -> bytes:
    said = {
        "model": event.model,
        "version": event.version or None,
        "registration": event.registration,
        "time": event.time,
        **event.said,
    }
    data = orjson.dumps({key: value for key, value in said.items() if value is not None})
    return b"id: %d\nevent: %s\ndata: %s\n\n" % (event.id, event.stage.encode(), data)


def _number(text: str | None) -> int | None:
    if text is None:
        return None
    if not text.isdecimal():
        raise BadRequest(f"since is the id of an event, and is {text!r}.")
    return int(text)
