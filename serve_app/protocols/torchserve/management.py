"""TorchServe's REST management API for models, over the control plane."""

from __future__ import annotations

from dataclasses import replace

from serve_app.control.api import ControlPlane
from serve_app.errors import (
    AccessDenied,
    ArchiveNotFound,
    MethodNotAllowed,
    MissingParameter,
    NoReplica,
    ResourceNotFound,
    StartFailed,
)
from serve_app.protocols.http import auth
from serve_app.protocols.http.exchange import HttpExchange
from serve_app.protocols.management import experiments, rollouts, shadow, traffic
from serve_app.protocols.torchserve import errors, events, openapi
from serve_app.protocols.torchserve.descriptions import (
    MAX_PAGE_SIZE,
    NoReplicaToDescribe,
    describe_registration,
    describe_scaling,
    describe_version,
    list_models,
)
from serve_app.protocols.torchserve.errors import TokenNotIssued
from serve_app.protocols.torchserve.parameters import (
    AUTOSCALING_PARAMETERS,
    parse_bool,
    parse_integer,
    parse_query,
    parse_registration,
    read_parameters,
)
from serve_app.settings import Settings


class ManagementRoutes:
    """The routes of the management port."""

    def __init__(self, control: ControlPlane, settings: Settings) -> None:
        self._control = control
        self._max_body_size = settings.inference.max_request_size

    send_error = staticmethod(errors.send_error)

    def matches(self, exchange: HttpExchange) -> bool:
        segments = exchange.segments
        if segments[:1] in ([], ["models"], ["experiments"], ["token"]):
            return True
        return segments[:2] == ["v1", "models"] and len(segments) == 3  # OpenAI's protocol lists the models

    async def handle(self, exchange: HttpExchange) -> None:
        self._authorize(exchange)
        match exchange.segments:
            case []:
                _require_method(exchange, "OPTIONS")
                await errors.send_json(exchange, openapi.MANAGEMENT)
            case ["api-description"]:
                await errors.send_json(exchange, openapi.MANAGEMENT)
            case ["token"]:
                await self._renew_key(exchange)
            case ["models"]:
                await self._handle_models(exchange)
            case ["models", model, *rest]:
                await self._handle_below_model(exchange, model, rest)
            case ["experiments", *rest]:
                await experiments.handle(exchange, self._control, rest, self._max_body_size)
            case ["v1", "models", name]:
                _require_method(exchange, "GET")
                await self._send_readiness(exchange, name.partition(":")[0])
            case _:
                raise ResourceNotFound()

    async def _handle_below_model(self, exchange: HttpExchange, model: str, rest: list[str]) -> None:
        """Handle ``/models/{model}`` and the paths below it; a feature's name wins over a version's."""
        control, max_body_size = self._control, self._max_body_size
        match rest:
            case []:
                await self._handle_model(exchange, model, None)
            case ["events"] if exchange.method == "GET":
                await events.stream(exchange, control, model)
            case ["experiments"]:
                await experiments.handle_model(exchange, control, model, max_body_size)
            case ["rollout", *verb]:
                await rollouts.handle(exchange, control, model, verb, max_body_size)
            case ["shadow"]:
                await shadow.handle(exchange, control, model)
            case ["traffic"]:
                await traffic.handle(exchange, control, model, max_body_size)
            case [version]:
                await self._handle_model(exchange, model, version)
            case [version, "set-default"] if exchange.method == "OPTIONS":
                await self._handle_model(exchange, model, version)
            case [version, "set-default"]:
                _require_method(exchange, "PUT")
                await self._set_default(exchange, model, version)
            case _:
                raise ResourceNotFound()

    def _authorize(self, exchange: HttpExchange) -> None:
        """Check the request's key, where one is required. Raises AccessDenied."""
        access, segments = self._control.access, exchange.segments
        if segments == ["token"]:  # every method of it makes a new key
            try:
                auth.authorize(access, exchange, "token")
            except AccessDenied as error:
                raise TokenNotIssued(error.reason) from None
            return
        if exchange.method == "OPTIONS" or segments in ([], ["api-description"]):
            return
        if exchange.method in ("GET", "HEAD"):
            auth.authorize(access, exchange, "observe")
        elif segments[:1] == ["experiments"] and segments[2:] == ["events"]:
            auth.authorize(access, exchange, "manage", "infer")  # applications record rewards
        else:
            auth.authorize(access, exchange, "manage")
        match segments:
            case ["models", model, *_]:
                auth.require_model(exchange, model)
            case ["v1", "models", name, *_]:
                auth.require_model(exchange, name.partition(":")[0])

    async def _renew_key(self, exchange: HttpExchange) -> None:
        if self._control.access is None:
            raise ResourceNotFound()
        match parse_query(exchange).get("type"):
            case "inference":
                await self._control.renew_key("inference")
            case "management":
                await self._control.renew_key("management")
            case _:
                raise TokenNotIssued("wrong_type")
        await exchange.send_response(200, [errors.JSON], b"\n")

    async def _handle_models(self, exchange: HttpExchange) -> None:
        if exchange.method == "GET":
            await self._list(exchange)
        elif exchange.method == "POST":
            await self._register(exchange)
        else:
            raise MethodNotAllowed()

    async def _handle_model(self, exchange: HttpExchange, model: str, version: str | None) -> None:
        if exchange.method == "GET":
            await self._describe(exchange, model, version)
        elif exchange.method == "PUT":
            await self._scale(exchange, model, version)
        elif exchange.method == "DELETE":
            await self._control.unregister(model, version)
            await _send_status(exchange, 200, f'Model "{model}" unregistered')
        elif exchange.method == "OPTIONS":
            await self._control.describe(model, version)
            await errors.send_json(exchange, openapi.describe_model_management(model))
        else:
            raise MethodNotAllowed()

    async def _list(self, exchange: HttpExchange) -> None:
        query = parse_query(exchange)
        limit = parse_integer(query.get("limit"), MAX_PAGE_SIZE)
        start = parse_integer(query.get("next_page_token"), 0)
        allowed_models = auth.get_allowed_models(exchange)
        await errors.send_json(exchange, await list_models(self._control, limit, start, allowed_models))

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

    async def _scale(self, exchange: HttpExchange, model: str, version: str | None) -> None:
        parameters = await read_parameters(exchange, self._max_body_size)
        version = version or parameters.get("model_version") or None
        scaling = {
            AUTOSCALING_PARAMETERS[key]: value
            for key, value in parameters.items()
            if key in AUTOSCALING_PARAMETERS
        }
        min_workers: int | None = parse_integer(parameters.get("min_worker"), 1)
        max_workers: int | None = parse_integer(parameters.get("max_worker"), min_workers)
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

    async def _set_default(self, exchange: HttpExchange, model: str, version: str) -> None:
        await self._control.set_default(model, version)
        sentence = f'Default version successfully updated for model "{model}" to "{version}"'
        await _send_status(exchange, 200, sentence)

    async def _describe(self, exchange: HttpExchange, model: str, version: str | None) -> None:
        if version == "all":
            descriptions = await self._control.describe(model, every=True)
        elif parse_bool(parse_query(exchange).get("customized")):
            try:
                descriptions = await self._control.describe(model, version, customized=True)
            except NoReplica:
                raise NoReplicaToDescribe(model) from None
        else:
            descriptions = await self._control.describe(model, version)
        await errors.send_json(exchange, [describe_version(description) for description in descriptions])

    async def _send_readiness(self, exchange: HttpExchange, model: str) -> None:
        [description] = await self._control.describe(model)
        is_ready = description.status.phase in ("ready", "idle")
        await errors.send_json(exchange, {"name": model, "ready": is_ready})


async def _send_status(exchange: HttpExchange, status: int, sentence: str) -> None:
    await errors.send_json(exchange, {"status": sentence}, status)


def _require_method(exchange: HttpExchange, method: str) -> None:
    if exchange.method != method:
        raise MethodNotAllowed()
