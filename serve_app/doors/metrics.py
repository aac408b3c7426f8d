"""The door that Prometheus comes in by."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

_TEXT = [(b"content-type", b"text/plain; version=0.0.4; charset=utf-8")]


def metrics_app(render: Callable[[], Awaitable[bytes]]) -> Any:
    """An ASGI app whose ``/metrics`` is what ``render`` gives."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        if scope["path"].rstrip("/") == "/metrics":
            status, body = 200, await render()
        else:
            status, body = 404, b"Nothing here but /metrics.\n"
        await send({"type": "http.response.start", "status": status, "headers": _TEXT})
        await send({"type": "http.response.body", "body": body})

    return app
