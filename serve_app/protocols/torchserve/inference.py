"""TorchServe's REST inference API over the data plane, with health routes that report the real state."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import cache
from importlib import metadata
from typing import Annotated, Any, Literal

from typing_extensions import NotRequired, TypedDict

from serve_app.control.api import ControlPlane
from serve_app.dataplane.data_plane import DataPlane
from serve_app.domain import exact_json
from serve_app.domain.request import InferenceRequest, InferenceResponse, InputPart, Kind, ResponseStream
from serve_app.domain.validation import documented
from serve_app.errors import (
    ClientTimeout,
    MethodNotAllowed,
    MissingParameter,
    RelayError,
    ResourceNotFound,
    WorkflowStepError,
)
from serve_app.protocols.http import auth, form_data, json_errors
from serve_app.protocols.http.async_predictions import AsyncInterceptor
from serve_app.protocols.http.exchange import (
    Headers,
    HttpExchange,
    InferenceHeaders,
    build_response_headers,
    clamp_status,
    encode_handler_headers,
    parse_deadline,
    parse_priority,
    version_headers,
)
from serve_app.protocols.http.large_body import LARGE_BODY_BYTES
from serve_app.protocols.http.sse import EVENT_STREAM, SSEStream
from serve_app.protocols.torchserve import openapi, swagger
from serve_app.settings import Settings

Route = Callable[[HttpExchange], Awaitable[None]]

# Seconds for which a late request stays unanswered where TorchServe would never answer it.
LATE_RESPONSE_HOLD_S = 120.0
_INVOCATIONS = "invocations"
_ROUTES_WITHOUT_KEY = ("ping", "health", "api-description")  # and every OPTIONS request


class PredictionHeaders(InferenceHeaders):
    accept: Annotated[
        str, documented("text/event-stream: stream the response as server-sent events.", pattern="^[ -~]*$")
    ]


class InvocationParameters(TypedDict):
    model_name: Annotated[str, documented("The model.")]


class SwaggerParameters(TypedDict):
    model_name: Annotated[str, documented("The model, unless only one was loaded at startup.")]
    version: Annotated[str, documented("2, 3 or 3.1: the version of the specification; 2 by default.")]


class SwaggerDocument(TypedDict):
    """A document of Swagger 2 or OpenAPI 3."""

    info: dict[str, str]
    paths: dict[str, Any]


class Health(TypedDict):
    status: Literal["Healthy", "Unhealthy"]


class Liveness(TypedDict):
    live: bool


class StartupState(TypedDict):
    """The readiness; versions are written as model/version."""

    ready: Annotated[bool, documented("Whether all models of the start-up are ready or have failed.")]
    loading: list[str]
    failed: list[str]
    reason: NotRequired[Annotated[str, documented("Present until a routing table has been received.")]]


class InferenceRoutes:
    """The routes of the inference port, for every method; only OPTIONS is treated differently."""

    def __init__(self, plane: DataPlane, settings: Settings, control: ControlPlane | None = None) -> None:
        self._plane = plane
        self._async = AsyncInterceptor(plane, control, settings)
        self._max_body_size = settings.inference.max_request_size
        self._max_form_fields = settings.inference.max_form_fields
        self._api_document = openapi.BOTH if settings.inference.serve_management else openapi.INFERENCE
        self._drops_late_responses = settings.inference.late_response == "drop"
        self._handler_errors = settings.inference.handler_errors
        self._ping_requires = _count_required_models(settings) if settings.inference.ping == "ready" else None
        self._routes: dict[str, Route] = {
            "predictions": self._predict,
            "explanations": self._explain,
            _INVOCATIONS: self._invocations,
            "wfpredict": self._wfpredict,
            "ping": self._ping,
            "health": self._health,
            "api-description": self._describe_api,
            "version": self._version,
            "swagger.json": self._swagger,
        }
        self._score_path = "/score" if "/score" in settings.inference.aliases else None

    async def send_error(self, exchange: HttpExchange, error: Exception) -> None:
        if self._drops_late_responses and isinstance(error, ClientTimeout):
            await exchange.hold_open(LATE_RESPONSE_HOLD_S)
        await json_errors.send_error(exchange, error, self._handler_errors)

    def matches(self, exchange: HttpExchange) -> bool:
        return self._route(exchange.segments) is not None

    async def handle(self, exchange: HttpExchange) -> None:
        segments = exchange.segments
        if segments and segments[0] not in _ROUTES_WITHOUT_KEY and exchange.method != "OPTIONS":
            auth.authorize(self._plane.access, exchange, "infer")
        route = self._route(segments)
        if route is None:
            raise ResourceNotFound()
        await route(exchange)

    def _route(self, segments: list[str]) -> Route | None:
        """Return the handler of a path, by its first segment or else by its form."""
        if not segments:
            return self._root
        route = self._routes.get(segments[0])
        if route is not None:
            return route
        if segments[-1] == "infer":  # the Open Inference Protocol's, and more frequent than all that follows
            return None
        match segments:
            case ["v1", "models", name] if name.endswith((":predict", ":explain")):
                return self._kserve_v1
            case ["v2", "models", _, "explain"]:
                return self._explain_v2
            case ["models", _, "invoke"] | ["endpoints", _, "invocations"]:
                return self._model_in_path
            case ["models", *_]:
                return None
            case ["v1" | "v2", "models", _]:  # of a model that is named predict
                return None
            case ["tei", _, "predict"] if "tei" not in self._plane.table.models:
                return None  # text-embeddings-inference's
            case [_, "predict"] | [_, _, "predict"]:
                return self._model_in_path
        return None

    async def _root(self, exchange: HttpExchange) -> None:
        if exchange.method in ("GET", "HEAD"):  # the liveness probe of KServe's v1 protocol
            return await json_errors.send_json(exchange, {"status": "alive"})
        if exchange.method != "OPTIONS":
            raise MethodNotAllowed()
        await json_errors.send_json(exchange, self._api_document)

    async def _predict(self, exchange: HttpExchange) -> None:
        await self._infer_by_path(exchange, "predict")

    async def _explain(self, exchange: HttpExchange) -> None:
        await self._infer_by_path(exchange, "explain")

    async def _infer_by_path(self, exchange: HttpExchange, kind: Kind) -> None:
        segments = exchange.segments
        if len(segments) < 2:
            raise ResourceNotFound()
        exchange.headers["url_path"] = "/".join(segments[3:])
        await self._infer(exchange, segments[1], segments[2] if len(segments) > 2 else None, kind)

    async def _wfpredict(self, exchange: HttpExchange) -> None:
        """Run a workflow by its name, on TorchServe's route; every failure of a step has one status there."""
        if len(exchange.segments) < 2:
            raise ResourceNotFound()
        name = exchange.segments[1]
        auth.require_model(exchange, name)  # before the look-up, which would reveal other workflows
        self._plane.find_workflow(name)
        try:
            await self._infer(exchange, name, None)
        except RelayError as error:
            if isinstance(error, WorkflowStepError):
                raise json_errors.WorkflowNodeFailed.from_step_error(error) from None
            raise

    async def _kserve_v1(self, exchange: HttpExchange) -> None:
        model, _, verb = exchange.segments[2].partition(":")
        await self._infer(exchange, model, None, "explain" if verb == "explain" else "predict")

    async def _explain_v2(self, exchange: HttpExchange) -> None:
        """Explain on a route beside the Open Inference Protocol, which has none for it."""
        await self._infer(exchange, exchange.segments[2], None, "explain")

    async def _model_in_path(self, exchange: HttpExchange) -> None:
        """Handle ``/{model}/predict``, ``/{model}/{version}/predict`` and SageMaker's routes.

        These are ``/models/{model}/invoke`` and ``/endpoints/{model}/invocations``. The parameters of the
        query are inputs.
        """
        first, second, *rest = exchange.segments
        if rest in ([], ["predict"]):
            model, version = first, second if rest else None
        else:
            model, version = second, None
        await self._infer(exchange, model, version, query=_query_inputs(exchange))

    async def _invocations(self, exchange: HttpExchange) -> None:
        """Handle ``/invocations``, whose model is named by the query or by a field of the form.

        Without a name it is the only model that was loaded at startup.
        """
        if len(exchange.segments) > 1:
            raise ResourceNotFound()
        query, inputs = _query_inputs(exchange), None
        model: str | None = _model_name(query)
        if not model:
            body = await exchange.read_body(self._max_body_size)
            content_type = exchange.headers.get("content-type")
            inputs = query + await form_data.read_body(content_type, body, self._max_form_fields)
            model = _model_name(inputs) or self._plane.startup_model
            if not model:
                raise MissingParameter("model_name")
        await self._infer(exchange, model, None, query=query, inputs=inputs)

    async def _infer(
        self,
        exchange: HttpExchange,
        model: str,
        version: str | None,
        kind: Kind = "predict",
        query: tuple[InputPart, ...] = (),
        inputs: tuple[InputPart, ...] | None = None,
    ) -> None:
        """Send the model's response to ``inputs``, or else to ``query`` and the request's body."""
        exchange.model, exchange.version = model, version or ""
        if exchange.method == "OPTIONS":
            route = self._plane.find_version(model, version)
            return await json_errors.send_json(exchange, openapi.describe_model(model, route.schemas))
        auth.require_model(exchange, model)
        headers = exchange.headers
        if inputs is None:
            if "prefer" in headers and await self._async.intercept(exchange, model, version):
                return
            body = await exchange.read_body(self._max_body_size)
            content_type = headers.get("content-type")
            if content_type is None or len(body) <= LARGE_BODY_BYTES:  # most requests: no await
                inputs = query + form_data.parse_body(content_type, body, self._max_form_fields)
            else:
                inputs = query + await form_data.read_body(content_type, body, self._max_form_fields)
        request = _build_request(exchange, model, version, inputs, kind)
        with exchange.cancel_on_disconnect():
            await self._send(exchange, await self._plane.infer(request, exchange.grant))

    # Predictions in steps that do not wait; see ``server/callback_app.py``.

    def authorize(self, exchange: HttpExchange) -> bool:
        segments = exchange.segments
        if segments == [_INVOCATIONS]:
            model = self._find_only_model(exchange)
        else:
            model = segments[1] if len(segments) > 1 and segments[0] != _INVOCATIONS else None
        if not model:
            return False
        auth.authorize(self._plane.access, exchange, "infer")
        exchange.model, exchange.version = model, segments[2] if len(segments) > 2 else ""
        auth.require_model(exchange, model)
        return True

    def _find_only_model(self, exchange: HttpExchange) -> str | None:
        """Return the model of ``/invocations`` where neither a query nor a form may name another one."""
        content_type = exchange.headers.get("content-type", "").strip().lower()
        if exchange.scope["query_string"] or content_type.startswith(form_data.FORM_TYPES):
            return None
        return self._plane.startup_model

    def parse(self, exchange: HttpExchange, body: bytes) -> InferenceRequest:
        segments, headers = exchange.segments, exchange.headers
        if segments[0] != _INVOCATIONS:
            headers["url_path"] = "/".join(segments[3:])
        inputs = form_data.parse_body(headers.get("content-type"), body, self._max_form_fields)
        version = segments[2] if len(segments) > 2 else None
        return _build_request(exchange, exchange.model, version, inputs, "predict")

    def render(self, exchange: HttpExchange, response: InferenceResponse) -> tuple[int, Headers, bytes]:
        """Return status, headers and body of a model's response."""
        headers = build_response_headers(response)
        if response.headers:
            exchange.override_defaults(headers)
        return clamp_status(response.status), headers, response.body

    def render_error(self, exchange: HttpExchange, error: Exception) -> tuple[int, Headers, bytes]:
        return json_errors.render_error(exchange, error, self._handler_errors)

    async def send(self, exchange: HttpExchange, response: InferenceResponse | ResponseStream) -> None:
        """Send a response until its client disconnects."""
        with exchange.cancel_on_disconnect():
            await self._send(exchange, response)

    async def _send(self, exchange: HttpExchange, response: InferenceResponse | ResponseStream) -> None:
        if isinstance(response, ResponseStream):
            head = response.head
            exchange.version = head.version
            if EVENT_STREAM in exchange.headers.get("accept", "") and head.content_type != EVENT_STREAM:
                return await self._send_events(exchange, response)
            headers = encode_handler_headers(head.content_type, head.headers)
            exchange.override_defaults(headers)
            headers += (b"ts_stream_next", b"true"), *version_headers(head)
            await exchange.send_stream(clamp_status(head.status), headers, response)
        else:
            exchange.version = response.version
            if exchange.headers.get("accept") == EVENT_STREAM and response.content_type != EVENT_STREAM:
                return await self._send_events(exchange, ResponseStream(response, _one_chunk(response.body)))
            await exchange.send_response(*self.render(exchange, response))

    async def _send_events(self, exchange: HttpExchange, stream: ResponseStream) -> None:
        """Send server-sent events, to a client whose header Accept names them."""
        head, id = stream.head, exchange.request_id
        handler_headers = (header for header in head.headers if header[0].lower() != "content-type")
        headers = encode_handler_headers(None, handler_headers)
        exchange.override_defaults(headers)
        headers += (
            (b"content-type", EVENT_STREAM.encode()),
            (b"x-accel-buffering", b"no"),
            *version_headers(head),
        )

        def encode_error(error: RelayError) -> bytes:
            return exact_json.dumps(json_errors.to_document(error, id, self._handler_errors))

        events = SSEStream(
            stream, exact_json.dumps({"request_id": id, "version": head.version}), encode_error
        )
        await exchange.send_stream(clamp_status(head.status), headers, ResponseStream(head, events))

    async def _ping(self, exchange: HttpExchange) -> None:
        if self._ping_requires is not None:
            status = 200 if self._plane.serves_startup_models(self._ping_requires) else 503
            await exchange.send_response(status, [], b"")
        elif self._plane.healthy:
            await json_errors.send_json(exchange, {"status": "Healthy"})
        else:
            await json_errors.send_json(exchange, {"status": "Unhealthy"}, 500)

    async def _health(self, exchange: HttpExchange) -> None:
        if exchange.segments == ["health", "live"]:
            await json_errors.send_json(exchange, {"live": True})
        elif exchange.segments == ["health", "ready"]:
            await json_errors.send_json(exchange, self._readiness(), 200 if self._plane.ready else 503)
        else:
            raise ResourceNotFound()

    async def _version(self, exchange: HttpExchange) -> None:
        """Send the version of MLflow, as its scoring server does, where it is installed."""
        version = _find_mlflow_version()
        if len(exchange.segments) > 1 or version is None or exchange.method not in ("GET", "HEAD"):
            raise ResourceNotFound()
        await exchange.send_response(200, [(b"content-type", b"text/plain")], version.encode())

    async def _swagger(self, exchange: HttpExchange) -> None:
        """Send the document of one model, as Azure ML's inference server does."""
        if len(exchange.segments) > 1:
            raise ResourceNotFound()
        if exchange.method not in ("GET", "HEAD"):
            raise MethodNotAllowed()
        query = _query_inputs(exchange)
        model = _model_name(query) or self._plane.startup_model
        if not model:
            raise MissingParameter("model_name")
        auth.require_model(exchange, model)
        route = self._plane.find_version(model)
        version = next(
            (part.value.decode("utf-8", "replace") for part in query if part.name == "version"), "2"
        )
        path = self._score_path or f"/predictions/{model}"
        document = swagger.build_document(model, route.version, path, route.schemas, version)
        await json_errors.send_json(exchange, document)

    def _readiness(self) -> StartupState:
        """Return which versions are loading and which have failed, as model/version."""
        table = self._plane.table
        phases: dict[str, list[str]] = {"loading": [], "failed": []}
        for model, route in sorted(table.models.items()):
            for version in route.versions.values():
                if version.phase in phases:
                    phases[version.phase].append(f"{model}/{version.version}")
        document: StartupState = {
            "ready": self._plane.ready,
            "loading": phases["loading"],
            "failed": phases["failed"],
        }
        if table.generation == 0:
            document["reason"] = "no routing table has reached this process yet"
        return document

    async def _describe_api(self, exchange: HttpExchange) -> None:
        if len(exchange.segments) > 1:
            raise ResourceNotFound()
        await json_errors.send_json(exchange, self._api_document)


def _build_request(
    exchange: HttpExchange, model: str, version: str | None, inputs: tuple[InputPart, ...], kind: Kind
) -> InferenceRequest:
    headers = exchange.headers
    headers["explain"] = "True" if kind == "explain" else "False"
    deadline, priority = parse_deadline(headers), parse_priority(headers)
    return InferenceRequest(model, version, inputs, headers, kind, exchange.request_id, deadline, priority)


@cache
def _find_mlflow_version() -> str | None:
    for name in ("mlflow", "mlflow-skinny"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return None


def _count_required_models(settings: Settings) -> int:
    """Return the number of models that the start-up must load; ``all`` of the model store is one or more."""
    names = settings.control.load_models
    return 0 if names in ("", "none") else len(names.split(","))


async def _one_chunk(body: bytes) -> AsyncIterator[bytes]:
    yield body


def _query_inputs(exchange: HttpExchange) -> tuple[InputPart, ...]:
    return form_data.parse_query(exchange.scope.get("query_string", b""))


def _model_name(inputs: tuple[InputPart, ...]) -> str:
    """Return the first value of ``model_name`` that is not empty, else an empty text."""
    names = (
        part.value.decode("utf-8", "replace") for part in inputs if part.name == "model_name" and part.value
    )
    return next(names, "")
