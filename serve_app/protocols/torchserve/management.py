"""TorchServe's REST management API for models, over the control plane."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from starlette.routing import Route

from serve_app.control.api import ControlPlane
from serve_app.errors import (
    AccessDenied,
    ArchiveNotFound,
    MissingParameter,
    NoReplica,
    ResourceNotFound,
    StartFailed,
)
from serve_app.net.cross_site import CrossSitePolicy
from serve_app.protocols.http import auth, json_errors
from serve_app.protocols.http.exchange import HttpExchange
from serve_app.protocols.http.json_errors import TokenNotIssued
from serve_app.protocols.management import (
    access,
    adapters,
    audit,
    drift,
    experiments,
    keys,
    logs,
    rollouts,
    shadow,
    traffic,
)
from serve_app.protocols.management.routing import MethodHandlers, RouteTable, any_method, route
from serve_app.protocols.torchserve import events, openapi, workflows
from serve_app.protocols.torchserve.descriptions import (
    MAX_PAGE_SIZE,
    NoReplicaToDescribe,
    describe_registration,
    describe_scaling,
    describe_version,
    list_models,
)
from serve_app.protocols.torchserve.parameters import (
    AUTOSCALING_PARAMETERS,
    parse_bool,
    parse_count,
    parse_integer,
    parse_query,
    parse_registration,
    read_parameters,
)
from serve_app.settings import Settings

_FIRST_SEGMENTS = frozenset(
    ("access", "audit", "events", "experiments", "keys", "logs", "models", "token", "workflows")
)
_MANAGERS_ONLY = (["audit"], ["keys"], ["logs"])  # GET needs a key that may manage, too


class ManagementRoutes:
    """The routes of the management port; under a model, a feature's name wins over a version's."""

    def __init__(
        self, control: ControlPlane, settings: Settings, cross_site: CrossSitePolicy | None = None
    ) -> None:
        self._control = control
        self._cross_site = cross_site  # of a port that it shares with the inference API
        self._max_body_size = limit = settings.inference.max_request_size
        of_model = {
            "GET": self._describe,
            "PUT": self._scale,
            "DELETE": self._unregister,
            "OPTIONS": self._describe_routes,
        }
        self._table = RouteTable(
            [
                route("/", OPTIONS=_describe_api),
                any_method("/api-description", _describe_api),
                any_method("/token", self._renew_key),  # every method of it makes a new key
                route("/models", GET=self._list, POST=self._register),
                route("/models/{model}", **of_model),
                # With other methods it is the version of that name.
                Route(
                    "/models/{model}/events", MethodHandlers({"GET": self._stream_events}), methods=["GET"]
                ),
                *access.build_routes(control),
                *adapters.build_routes(control, limit),
                *audit.build_routes(control),
                *logs.build_routes(control, settings),
                *drift.build_routes(control),
                *experiments.build_routes(control, limit),
                *rollouts.build_routes(control, limit),
                *shadow.build_routes(control),
                *traffic.build_routes(control, limit),
                route("/models/{model}/{version}", **of_model),
                route(
                    "/models/{model}/{version}/set-default",
                    PUT=self._set_default,
                    OPTIONS=self._describe_routes,
                ),
                route("/v1/models/{name}", GET=self._get_readiness),
                *workflows.build_routes(control, limit),
                *keys.build_routes(control, limit),
            ]
        )
        self.paths = self._table.paths

    send_error = staticmethod(json_errors.send_error)

    def matches(self, exchange: HttpExchange) -> bool:
        segments = exchange.segments
        if not segments or segments[0] in _FIRST_SEGMENTS:
            return True
        return segments[:2] == ["v1", "models"] and len(segments) == 3  # OpenAI's protocol lists the models

    async def handle(self, exchange: HttpExchange) -> None:
        if self._cross_site is not None:
            exchange.remove_cors_headers()
            self._cross_site.check(exchange.method, exchange.path, exchange.headers)
        self._authorize(exchange)
        exchange.on_body = lambda: auth.check_again(self._control.access, exchange)
        await self._table.handle(exchange)

    def _authorize(self, exchange: HttpExchange) -> None:
        """Check the request's key, where one is required. Raises AccessDenied."""
        access, segments = self._control.access, exchange.segments
        if segments == ["token"]:
            try:
                auth.authorize(access, exchange, "token")
            except AccessDenied as error:
                raise TokenNotIssued(error.reason) from None
            return
        if exchange.method == "OPTIONS" or segments in ([], ["api-description"]):
            return
        if segments == ["access"]:
            auth.authorize(access, exchange, "infer", "observe", "manage", "token")
        elif exchange.method in ("GET", "HEAD") and segments[:1] not in _MANAGERS_ONLY:
            auth.authorize(access, exchange, "observe")
        elif segments[:1] == ["experiments"] and segments[2:] == ["events"]:
            auth.authorize(access, exchange, "manage", "infer")  # applications record rewards
        else:
            auth.authorize(access, exchange, "manage")
        match segments:
            case ["models" | "workflows", model, *_]:
                auth.require_model(exchange, model)
            case ["v1", "models", name, *_]:
                auth.require_model(exchange, name.partition(":")[0])

    async def _renew_key(self, exchange: HttpExchange) -> None:
        if self._control.access is None:
            raise ResourceNotFound()
        match parse_query(exchange).get("type"):
            case "inference":
                await self._control.api.renew_key("inference")
            case "management":
                await self._control.api.renew_key("management")
            case _:
                raise TokenNotIssued("wrong_type")
        await exchange.send_response(200, [json_errors.JSON], b"\n")

    async def _stream_events(self, exchange: HttpExchange, model: str) -> None:
        await events.stream(exchange, self._control, model)

    async def _unregister(self, exchange: HttpExchange, model: str, version: str | None = None) -> Any:
        await self._control.unregister(model, version)
        return {"status": f'Model "{model}" unregistered'}

    async def _describe_routes(self, exchange: HttpExchange, model: str, version: str | None = None) -> Any:
        await self._control.describe(model, version)
        return openapi.describe_model_management(model)

    async def _list(self, exchange: HttpExchange) -> Any:
        query = parse_query(exchange)
        limit = parse_integer(query.get("limit"), MAX_PAGE_SIZE)
        start = parse_integer(query.get("next_page_token"), 0)
        allowed_models = auth.get_allowed_models(exchange)
        return await list_models(self._control, limit, start, allowed_models)

    async def _register(self, exchange: HttpExchange) -> None:
        parameters = await read_parameters(exchange, self._max_body_size)
        registration = replace(
            parse_registration(parameters), allowed_models=auth.get_allowed_models(exchange)
        )
        try:
            progress = await self._control.register(registration)
        except MissingParameter:
            if "url" in parameters:
                raise ArchiveNotFound("empty url") from None
            raise
        await _send_status(exchange, *describe_registration(progress))

    async def _scale(self, exchange: HttpExchange, model: str, version: str | None = None) -> None:
        parameters = await read_parameters(exchange, self._max_body_size)
        version = version or parameters.get("model_version") or None
        scaling = {
            AUTOSCALING_PARAMETERS[key]: value
            for key, value in parameters.items()
            if key in AUTOSCALING_PARAMETERS
        }
        min_workers: int | None = parse_count(parameters.get("min_worker"), 1)
        max_workers: int | None = parse_count(parameters.get("max_worker"), min_workers)
        if scaling and "min_worker" not in parameters and "max_worker" not in parameters:
            min_workers = max_workers = None  # the bounds stay as they are
        wait = parse_bool(parameters.get("synchronous"))
        try:
            progress = await self._control.scale(
                model, version, min_workers, max_workers, wait, scaling or None
            )
        except StartFailed as error:
            if version is None:  # TorchServe names the version only where the request does
                raise type(error)(model, "null", error.detail) from None
            raise
        if min_workers is None and progress.bounds is not None:
            min_workers = progress.bounds[0]
        await _send_status(exchange, *describe_scaling(progress, min_workers, version is not None))

    async def _set_default(self, exchange: HttpExchange, model: str, version: str) -> Any:
        await self._control.api.set_default(model, version)
        return {"status": f'Default version successfully updated for model "{model}" to "{version}"'}

    async def _describe(self, exchange: HttpExchange, model: str, version: str | None = None) -> Any:
        if version == "all":
            descriptions = await self._control.describe(model, every=True)
        elif parse_bool(parse_query(exchange).get("customized")):
            try:
                descriptions = await self._control.describe(model, version, customized=True)
            except NoReplica:
                raise NoReplicaToDescribe(model) from None
        else:
            descriptions = await self._control.describe(model, version)
        return [describe_version(description) for description in descriptions]

    async def _get_readiness(self, exchange: HttpExchange, name: str) -> Any:
        model = name.partition(":")[0]
        [description] = await self._control.describe(model)
        is_ready = description.status.phase in ("ready", "idle")
        return {"name": model, "ready": is_ready}


async def _send_status(exchange: HttpExchange, status: int, sentence: str) -> None:
    await json_errors.send_json(exchange, {"status": sentence}, status)


async def _describe_api(exchange: HttpExchange) -> Any:
    return openapi.MANAGEMENT
