"""The short way in: a request at a replica's port goes to our doors, past Ray Serve's own handling.

Ray Serve wraps each HTTP request of a replica in its accounting (route check, request context, ongoing
count, metrics, a log record), at more than twice the cost of our doors. It lets an operator put ASGI
middlewares around that, in every HTTP server it starts, and this is one: in a process that has doors
of ours it answers with them, and nothing of Ray's runs but the server itself (uvicorn).

This is also what makes moving a route between live applications lose no request. HAProxy brings a
request to a replica by the table of some generation; by the time it arrives the replica's route may have
moved, and Ray would answer 404. The doors look at the client's path and at our own table instead.

What Ray still does: it starts and stops the server (a stopping one finishes what it is answering),
checks health (``/-/healthz``), and brings what comes through its own proxy to the same doors.
What it no longer knows: how many requests a replica is answering. The batcher bounds them.

Installed by ``RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH``; without it everything works, at Ray's pace.
"""

from __future__ import annotations

from typing import Any

from starlette.middleware import Middleware

from serve_app.doors import http, websocket
from serve_app.doors.exchange import EVERY_ANSWER
from serve_app.doors.torchserve import errors
from serve_app.errors import WorkerDied

_doors: Any = None


def answer_with(doors: Any, largest: int) -> None:
    """This process answers what reaches its port with ``doors``, an ASGI application.

    ``largest``: the bytes of a WebSocket's message.
    """
    global _doors
    _doors = doors
    websocket.bound(largest)


class ShortWay:
    """Pure ASGI. In Ray's proxy, which has no doors, it keeps the answer's request id single, and Ray's errors ours."""

    def __init__(self, app: Any) -> None:
        self._ray = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        kind = scope["type"]
        if kind == "http" and _doors is None:
            await self._ray(scope, receive, _in_our_words(send))
        elif _doors is None or kind not in ("http", "websocket") or scope["path"].startswith("/-/"):
            await self._ray(scope, receive, send)
        else:
            await _doors(scope, receive, send)


def _in_our_words(send: Any) -> Any:
    """The door's id came first; what Ray's layer adds behind it is left out.

    An error that no door has said is Ray's own: the replica was lost while it answered.
    """
    rays = False

    async def once(message: Any) -> None:
        nonlocal rays
        if message["type"] == "http.response.start":
            ids = [pair for pair in message["headers"] if pair[0].lower() == b"x-request-id"]
            for extra in ids[1:]:
                message["headers"].remove(extra)
            rays = message["status"] >= 500 and all(name.lower() != b"pragma" for name, _ in message["headers"])
            if rays:
                status, headers, body = _LOST
                await send({"type": "http.response.start", "status": status, "headers": [*headers, *ids[:1]]})
                await send({"type": "http.response.body", "body": body})
                return
        if not rays:
            await send(message)

    return once


def _lost() -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    error = WorkerDied()
    body = errors.pretty(errors.document(error))
    headers = [
        errors.JSON,
        (b"content-length", b"%d" % len(body)),
        (b"x-torchrelay-reason", error.reason.encode()),
        *EVERY_ANSWER,
    ]
    return errors.look_up(error)[0], headers, body


_LOST = _lost()


def build() -> list[Middleware]:
    """Ray Serve's callback, before it starts an HTTP server: its middlewares."""
    http.install()
    websocket.install()
    return [Middleware(ShortWay)]
