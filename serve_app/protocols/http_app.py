"""The ASGI applications of the ports, which pass requests to protocols, and count and log responses."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from serve_app.control.api import ControlPlane
from serve_app.dataplane.data_plane import DataPlane
from serve_app.domain.access import AccessTable
from serve_app.domain.urls import redact_query
from serve_app.errors import MethodNotAllowed, RelayError
from serve_app.net.request_origin import CrossSitePolicy, TrustedProxies, inference_proxies
from serve_app.protocols import openapi
from serve_app.protocols.anthropic.routes import AnthropicRoutes
from serve_app.protocols.http import json_errors
from serve_app.protocols.http.async_predictions import AsyncRoutes, RequestReplayer
from serve_app.protocols.http.console_proxy import ConsoleBackend, ConsoleRoutes, ConsoleWebSocket
from serve_app.protocols.http.endpoints import EndpointTable
from serve_app.protocols.http.exchange import (
    DEFAULT_HEADERS,
    METHODS,
    ClientDisconnected,
    HttpExchange,
    ParsedHead,
    Receive,
    Scope,
    Send,
    build_default_headers,
)
from serve_app.protocols.http.port_rules import PortRules
from serve_app.protocols.http.router import Dispatcher, ProtocolRouter
from serve_app.protocols.http.server.callback_app import CallbackApp, CallbackRoute
from serve_app.protocols.management.audit import RefusalRecorder
from serve_app.protocols.management.metrics import MetricsRoutes, Render
from serve_app.protocols.management.routes import REWARDS, ManagementRoutes
from serve_app.protocols.openai.inference import EmbeddingRoute, OpenAIRoutes
from serve_app.protocols.openai.model_calls import ModelCalls
from serve_app.protocols.openapi.route import OpenAPIRoutes
from serve_app.protocols.openinference.rest import OpenInferenceRoutes
from serve_app.protocols.tei.routes import TeiRoutes
from serve_app.protocols.torchserve.inference import InferenceRoutes
from serve_app.protocols.torchserve.websocket import WebSocketRoutes
from serve_app.settings import Settings, is_loopback
from serve_app.telemetry import tracing
from serve_app.telemetry.access_log import AccessLog
from serve_app.telemetry.metrics import Meters

_log = logging.getLogger(__name__)
_CLIENT_CLOSED_REQUEST = 499  # in the access log only: the client disconnected before the response


class ASGIApp:
    """An ASGI application over one router.

    A server cancels it when the client disconnects, and that cancels the request.
    ``count_response`` receives the status of each response, ``websocket_app`` the WebSocket connections.
    """

    def __init__(
        self,
        router: ProtocolRouter,
        count_response: Callable[[int], None] | None,
        access_log: AccessLog | None,
        default_headers: tuple[tuple[bytes, bytes], ...] = DEFAULT_HEADERS,
        websocket_app: Callable[[Scope, Receive, Send], Awaitable[None]] | None = None,
        *,
        endpoints: EndpointTable,
        rules: PortRules,
    ) -> None:
        self._router = router
        self._rules = rules
        self._endpoints = endpoints
        self._websocket_app = websocket_app
        self._count_response = count_response
        self._access_log = access_log
        self._default_headers = default_headers
        self.callback_app: CallbackApp | None = None  # answers some requests before this application

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            websocket_app = self._websocket_app if scope["type"] == "websocket" else None
            app = _decline if websocket_app is None else websocket_app
            return await app(scope, receive, send)
        started_at = time.perf_counter()
        if (target := self._rules.find_alias(scope["method"], scope["path"])) is not None:
            scope = {**scope, "path": target}
        exchange = HttpExchange(scope, receive, send, self._default_headers, self._rules.proxies)
        self._begin_trace(exchange)
        if exchange.span is not None:
            tracing.attach(exchange.span)
        await self.run(exchange, started_at, self._answer(exchange))

    def accept(self, scope: Scope, head: ParsedHead) -> HttpExchange:
        """Return the exchange of a request that is answered by a callback. Raises RelayError."""
        exchange = HttpExchange(
            scope, default_headers=self._default_headers, proxies=self._rules.proxies, head=head
        )
        self._rules.cross_site.check(exchange.method, exchange.path, exchange.headers)
        self._begin_trace(exchange)
        return exchange

    @staticmethod
    def _begin_trace(exchange: HttpExchange) -> None:
        if exchange.segments:
            path, headers = f"/{exchange.segments[0]}", exchange.headers
            exchange.span = tracing.begin_request(exchange.method, path, headers, exchange.request_id)

    async def _answer(self, exchange: HttpExchange) -> None:
        if exchange.method not in METHODS:
            raise MethodNotAllowed()
        self._rules.cross_site.check(exchange.method, exchange.path, exchange.headers)
        if exchange.method == "OPTIONS":
            self._add_allow_header(exchange)
        await self._router.handle(exchange)

    async def run(self, exchange: HttpExchange, started_at: float, answer: Awaitable[None]) -> None:
        """Await the answer of an exchange, send its error, then count and log it."""
        try:
            await answer
        except ClientDisconnected:
            pass
        except Exception as error:
            is_expected = isinstance(error, RelayError)
            if isinstance(error, RelayError):
                exchange.version = error.selected_version or exchange.version
                if self._rules.on_error is not None:
                    self._rules.on_error(exchange, error)
            if exchange.status:
                _log.error(
                    "%s %r (request %s) failed after its response had started%s",
                    exchange.method,
                    exchange.path,
                    exchange.request_id,
                    f": {error}" if is_expected else "",
                    exc_info=None if is_expected else error,
                )
                raise
            if not is_expected:
                exchange.log_fault(error)
            if isinstance(error, MethodNotAllowed):
                self._add_allow_header(exchange, exchange.method)
            await self._router.send_error(exchange, error)
        finally:
            self.finish(exchange, started_at)

    def finish(self, exchange: HttpExchange, started_at: float) -> None:
        """Count and log an exchange."""
        if self._count_response is not None and exchange.status:
            self._count_response(exchange.status)
        if exchange.span is not None:
            _end_span(exchange)
        if self._access_log is not None:
            self._log_access(self._access_log, exchange, time.perf_counter() - started_at)

    def _add_allow_header(self, exchange: HttpExchange, excluded: str = "") -> None:
        if (methods := self._endpoints.list_allowed_methods(exchange.path)) is not None:
            allowed = (method for method in methods if method != excluded)
            exchange.add_header(b"allow", ", ".join(allowed).encode())

    def _log_access(self, access_log: AccessLog, exchange: HttpExchange, seconds: float) -> None:
        scope = exchange.scope
        query = scope.get("query_string")
        access_log.write(
            exchange.client,
            exchange.method,
            f"{exchange.path}?{redact_query(query.decode('latin-1'))}" if query else exchange.path,
            scope["http_version"],
            exchange.status or _CLIENT_CLOSED_REQUEST,
            seconds * 1000,
            exchange.request_id,
            exchange.model,
            exchange.version,
            _client_ids(exchange.headers) if access_log.json else None,
            "" if exchange.grant is None else exchange.grant.name,
        )


def _end_span(exchange: HttpExchange) -> None:
    status = exchange.status or _CLIENT_CLOSED_REQUEST
    attributes: dict[str, str | int] = {
        "http.request.method": exchange.method,
        "http.response.status_code": status,
        "url.path": exchange.path,
    }
    error = str(status) if status >= 500 else None
    tracing.end(exchange.span, error, attributes, model=exchange.model, version=exchange.version)


def _client_ids(headers: dict[str, str]) -> dict[str, str]:
    """Return the ids that a request's headers carry.

    The response has an id of its own; with these, clients find their own ids in the log.
    """
    return {name: headers[name] for name in ("x-request-id", "traceparent") if name in headers}


def inference_app(
    plane: DataPlane,
    settings: Settings,
    meters: Meters,
    access_log: AccessLog | None = None,
    control: ControlPlane | None = None,
    render: Render | None = None,
) -> ASGIApp:
    """Return the application of the inference port, for replicas and gateways alike.

    With a ``control`` plane it accepts rewards of experiments, and serves the whole management API where the
    settings enable it there. With ``render`` it serves the metrics as well.
    """
    shared = settings.inference
    rules = PortRules(
        CrossSitePolicy(
            "inference",
            shared.allowed_hosts,
            lambda: plane.on_loopback or bool(shared.allowed_hosts),
            shared.cors_allowed_origin,
        ),
        inference_proxies(settings.telemetry.trusted_proxies, os.environ),
        aliases=shared.aliases,
    )
    first = InferenceRoutes(plane, settings, control)
    open_inference = OpenInferenceRoutes(plane, settings, control)
    others: list[ProtocolRouter] = [open_inference]
    if control is not None:
        others.append(ManagementRoutes(control, settings, apis=(REWARDS,)))
    if control is not None and settings.inference.serve_management:
        management = ManagementRoutes(control, settings, _shared_port_policy(settings))
        others.append(management)
        rules = replace(rules, on_error=_record_refusals_of(management, control))
    if control is not None:
        others.append(AsyncRoutes(plane, control, json_errors.send_error))
    calls = ModelCalls(plane, settings)
    others += OpenAIRoutes(plane, settings, calls), AnthropicRoutes(plane, settings, calls)
    others.append(TeiRoutes(plane, settings, calls))
    document = openapi.inference(settings.inference.serve_management)
    others.append(OpenAPIRoutes(document))
    if render is not None:
        others.append(MetricsRoutes(render, settings, lambda: plane.access))
    app = ASGIApp(
        Dispatcher(first, *others),
        meters.response,
        access_log,
        build_default_headers(settings.inference),
        WebSocketRoutes(plane, settings, meters.response, access_log, rules),
        endpoints=document.table,
        rules=rules,
    )
    if shared.callbacks and shared.late_response == "send":
        routes: dict[str, CallbackRoute] = {
            "predictions": first,
            "invocations": first,
            "v2": open_inference,
            "v1": EmbeddingRoute(plane, settings, calls),
        }
        app.callback_app = CallbackApp(
            plane, shared.max_request_size, routes, app.accept, app.finish, app.run
        )
    return app


def build_replayer(plane: DataPlane, settings: Settings) -> RequestReplayer:
    """Return what answers the stored requests of async predictions, as ``inference_app`` answers requests."""
    router = Dispatcher(InferenceRoutes(plane, settings), OpenInferenceRoutes(plane, settings))
    return RequestReplayer(router, settings.async_predictions.max_result_size)


def management_app(
    control: ControlPlane,
    settings: Settings,
    access_log: AccessLog | None = None,
    render: Render | None = None,
    meters: Meters | None = None,
    console: ConsoleBackend | None = None,
) -> ASGIApp:
    """Return the application of the management port.

    With ``render`` it serves the metrics as well, and with a ``console`` the pages below ``/ui``.
    """
    document = openapi.management()
    routers: list[ProtocolRouter] = [
        ManagementRoutes(control, settings),
        OpenAPIRoutes(document),
        ConsoleRoutes(console),
    ]
    cross_site = CrossSitePolicy(
        "management",
        settings.management.allowed_hosts,
        lambda: control.access is None,
        bound_host=settings.management.host,
    )
    if render is not None:
        routers.append(MetricsRoutes(render, settings, lambda: control.access))
    return ASGIApp(
        Dispatcher(*routers),
        None if meters is None else meters.rest,
        access_log,
        websocket_app=None if console is None else ConsoleWebSocket(console, cross_site),
        endpoints=document.table,
        rules=PortRules(
            cross_site,
            TrustedProxies(settings.telemetry.trusted_proxies),
            RefusalRecorder(control).record_http,
        ),
    )


def metrics_app(
    render: Render, settings: Settings, access: Callable[[], AccessTable | None], meters: Meters | None = None
) -> ASGIApp:
    """Return the application of the metrics port."""
    document = openapi.metrics()
    return ASGIApp(
        Dispatcher(MetricsRoutes(render, settings, access), OpenAPIRoutes(document)),
        None if meters is None else meters.rest,
        None,
        endpoints=document.table,
        rules=PortRules(
            CrossSitePolicy(
                "management",
                settings.management.allowed_hosts,
                # Elsewhere than on the loopback, Prometheus finds its targets by any name.
                lambda: is_loopback(settings.management.metrics_host),
            )
        ),
    )


def _record_refusals_of(
    management: ManagementRoutes, control: ControlPlane
) -> Callable[[HttpExchange, RelayError], None]:
    """Return the recorder of refusals for a port with other APIs too."""
    recorder = RefusalRecorder(control)

    def record(exchange: HttpExchange, error: RelayError) -> None:
        if exchange.segments and management.matches(exchange):
            recorder.record_http(exchange, error)

    return record


def _shared_port_policy(settings: Settings) -> CrossSitePolicy:
    """Return the policy of the management API on the inference port, whose hosts that port checks."""
    return CrossSitePolicy("inference", settings.inference.allowed_hosts, lambda: False)


async def _decline(scope: Scope, receive: Receive, send: Send) -> None:
    """Acknowledge the server's start and stop; close a WebSocket. Raises ValueError for other scopes."""
    message: Any
    if scope["type"] == "lifespan":
        while True:
            message = await receive()
            await send({"type": f"{message['type']}.complete"})
            if message["type"] == "lifespan.shutdown":
                return
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.close", "code": 1008, "reason": "This path has no WebSocket."})
        return
    raise ValueError(f"ASGI scope {scope['type']!r} is not served here; http, websocket and lifespan are")
