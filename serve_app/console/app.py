"""The console as an ASGI application: NiceGUI's pages, the login, and the rules of every request."""

from __future__ import annotations

import time
from collections.abc import Callable
from http.cookies import CookieError, SimpleCookie

from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse, RedirectResponse, Response
from nicegui import core, ui
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.console import layout
from serve_app.console.pages import register_pages
from serve_app.console.sessions import COOKIE, SessionStore
from serve_app.errors import RelayError

# Vue compiles templates in the browser, and Quasar sets styles in elements. No other host is contacted.
_POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; media-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'"
)
MAX_MESSAGE_BYTES = 16 << 20
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
}
CheckRequest = Callable[[str, str, dict[str, str]], None]
"""Raises RelayError for a request with this method, path and headers that a page of another site sent."""


class ConsoleApp:
    """The application of one process; ``idle_s`` are the seconds since its last request or connection."""

    def __init__(self, sessions: SessionStore, check: CheckRequest) -> None:
        self._sessions = sessions
        self._check = check
        self._open_websockets = 0
        self._used_at = time.monotonic()
        layout.use_sessions(sessions)
        register_pages()
        app = FastAPI(openapi_url=None)
        app.add_api_route("/session", self._open_session, methods=["GET"])
        app.add_api_route("/logout", self._close_session, methods=["GET"])
        # Polling would need POST, and a connection for each request.
        core.app.config.socket_io_js_transports = ["websocket"]
        core.sio.eio.max_http_buffer_size = MAX_MESSAGE_BYTES  # a file is one message
        ui.run_with(app, title="Torchrelay", dark=None, tailwind=False, language="en-US", favicon=layout.ICON)
        self._app: ASGIApp = app

    @property
    def idle_s(self) -> float:
        return 0.0 if self._open_websockets else time.monotonic() - self._used_at

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        self._used_at = time.monotonic()
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        method = "WEBSOCKET" if scope["type"] == "websocket" else scope["method"]
        try:
            self._check(method, scope["path"], headers)
        except RelayError as error:
            return await _refuse(scope, receive, send, str(error))
        scope["session_cookie"] = _parse_cookie(headers.get("cookie", ""))
        if scope["type"] == "websocket":
            self._open_websockets += 1
            try:
                return await self._app(scope, receive, send)
            finally:
                self._open_websockets -= 1
                self._used_at = time.monotonic()

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        await self._app(scope, receive, send_with_headers)

    async def _open_session(self, request: Request, ticket: str = "") -> Response:
        """Set the cookie of a login, for a request of our own page only."""
        prefix = layout.get_prefix(request)
        cookie = None
        if request.headers.get("sec-fetch-site", "same-origin") == "same-origin":
            cookie = self._sessions.redeem(ticket)
        if cookie is None:
            return RedirectResponse(f"{prefix}/login", 303)
        response = RedirectResponse(f"{prefix}/", 303)
        is_https = request.headers.get("x-forwarded-proto", request.url.scheme) == "https"
        response.set_cookie(
            COOKIE, cookie, httponly=True, samesite="strict", secure=is_https, path=prefix or "/"
        )
        return response

    async def _close_session(self, request: Request) -> Response:
        prefix = layout.get_prefix(request)
        if request.headers.get("sec-fetch-site", "same-origin") == "same-origin":
            self._sessions.log_out(request.scope["session_cookie"])
        response = RedirectResponse(f"{prefix}/login", 303)
        response.delete_cookie(COOKIE, path=prefix or "/")
        return response


def _parse_cookie(header: str) -> str:
    try:
        cookies = SimpleCookie(header)
    except CookieError:
        return ""
    return cookies[COOKIE].value if COOKIE in cookies else ""


async def _refuse(scope: Scope, receive: Receive, send: Send, reason: str) -> None:
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.close", "code": 1008, "reason": reason[:100]})
    else:
        await PlainTextResponse(reason, 403)(scope, receive, send)
