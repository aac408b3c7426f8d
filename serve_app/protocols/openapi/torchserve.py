"""TorchServe's inference API, async predictions, metrics, and the descriptions of the API."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from typing_extensions import NotRequired, TypedDict

from serve_app.domain.async_prediction import (
    AsyncListParameters,
    AsyncPredictionDocument,
    AsyncPredictionPage,
)
from serve_app.protocols.http.json_errors import Status, TorchServeError
from serve_app.protocols.management.metrics import MetricsParameters
from serve_app.protocols.openapi.endpoints import (
    API,
    NO_CONTENT,
    Content,
    Endpoint,
    ErrorFormat,
    StatusCode,
    delete,
    get,
    json,
    options,
    post,
)
from serve_app.protocols.torchserve.inference import (
    Health,
    InvocationParameters,
    Liveness,
    PredictionHeaders,
    StartupState,
)

ERRORS = ErrorFormat(TorchServeError, without_body=(413,))
_NO_ERRORS = ErrorFormat(TorchServeError, common=())


class OpenAPIDocument(TypedDict):
    """An OpenAPI document."""

    openapi: str
    info: dict[str, Any]
    paths: dict[str, Any]
    components: NotRequired[dict[str, Any]]


def describe_api(id: str, errors: tuple[int, ...] = (), query: type | None = None) -> Endpoint:
    return options(id, "Describe the model's API.", OpenAPIDocument, errors, query=query)


ASYNC_RESPONSE = json(
    AsyncPredictionDocument, "Accepted as an async prediction because of the header Prefer: respond-async."
)
_UNAVAILABLE = (503,)
_RESPONSES: dict[StatusCode, Any] = {
    200: Content({}, "The handler's response.", from_model=True),
    "default": NO_CONTENT,
}
_INPUT = Content(
    {"*/*": Any, "multipart/form-data": dict[str, str], "application/x-www-form-urlencoded": dict[str, str]},
    "The handler's input: form fields, or one body of any type. At most inference.max_request_size bytes.",
    required=False,
)


def _inference(id: str, summary: str, query: type | None = None, allow_async: bool = False) -> list[Endpoint]:
    """Return the endpoints of an inference path.

    All methods except OPTIONS do the same; those other than GET, POST and PUT are not described.
    """
    responses = {**_RESPONSES, 202: ASYNC_RESPONSE} if allow_async else _RESPONSES
    errors = (404, 410, 413, 429, 503, 504, 507)
    endpoint = post(id, summary, responses, errors, _INPUT, query, PredictionHeaders)
    return [
        replace(endpoint, method="GET", id=f"{id}_by_get", body=None),
        endpoint,
        replace(endpoint, method="PUT", id=f"{id}_by_put"),
        describe_api(f"{id}_described", (404, 503), query),
    ]


_PREDICT = "Run a model's default version, or the one that its traffic policy selects."
_PREDICT_VERSION = "Run one version of a model."
_EXPLAIN = "Explain a prediction."
_QUERY_IS_INPUT = "The query is input, too."
_VERSION = "{model_name}/{model_version}"

INFERENCE = API(
    "TorchServe: inference",
    "Predictions and explanations by TorchServe's routes.",
    ERRORS,
    {
        "/predictions/{model_name}": _inference("predict", _PREDICT, allow_async=True),
        f"/predictions/{_VERSION}": _inference("predict_version", _PREDICT_VERSION, allow_async=True),
        f"/predictions/{_VERSION}/{{url_path}}": _inference(
            "predict_path", f"{_PREDICT_VERSION} Its handler receives the rest of the path.", allow_async=True
        ),
        "/explanations/{model_name}": _inference("explain", _EXPLAIN),
        f"/explanations/{_VERSION}": _inference("explain_version", _EXPLAIN),
        f"/explanations/{_VERSION}/{{url_path}}": _inference("explain_path", _EXPLAIN),
        "/v1/models/{model_name}:predict": _inference("v1_predict", f"{_PREDICT} KServe's version 1."),
        "/v1/models/{model_name}:explain": _inference("v1_explain", f"{_EXPLAIN} KServe's version 1."),
        "/v2/models/{model_name}/explain": _inference("v2_explain", _EXPLAIN),
        "/models/{model_name}/invoke": _inference("invoke", f"{_PREDICT} {_QUERY_IS_INPUT}"),
        "/endpoints/{model_name}/invocations": _inference(
            "invoke_endpoint", f"{_PREDICT} The client of SageMaker's runtime calls it. {_QUERY_IS_INPUT}"
        ),
        "/{model_name}/predict": _inference("legacy_predict", f"{_PREDICT} {_QUERY_IS_INPUT}"),
        f"/{_VERSION}/predict": _inference("legacy_predict_version", f"{_PREDICT_VERSION} {_QUERY_IS_INPUT}"),
        "/invocations": _inference(
            "invocations",
            f"Run the model that a parameter names, or the one loaded at start-up. {_QUERY_IS_INPUT}",
            InvocationParameters,
        ),
        "/wfpredict/{workflow_name}": _inference("wfpredict", "Run a workflow."),
    },
)
HEALTH = replace(
    INFERENCE,
    errors=_NO_ERRORS,
    paths={
        "/": [get("v1_live", "Get the liveness. KServe's version 1.", Status)],
        "/ping": [
            get(
                "ping",
                "Get whether the default versions have their workers.",
                {200: Health, 500: json(Health, "Workers are missing.")},
            )
        ],
        "/health/live": [get("live", "Get the liveness.", Liveness)],
        "/health/ready": [
            get(
                "ready",
                "Get whether all models of the start-up are loaded.",
                {200: StartupState, 503: json(StartupState, "Not yet.")},
            )
        ],
    },
)
ASYNC_PREDICTIONS = API(
    "Asynchronous predictions",
    "Requested with the header Prefer: respond-async.",
    ERRORS,
    {
        "/async": [
            get(
                "list_async_predictions",
                "List the async predictions that the key may see, the newest first.",
                AsyncPredictionPage,
                _UNAVAILABLE,
                query=AsyncListParameters,
            )
        ],
        "/async/{id}": [
            get(
                "get_async_prediction",
                "Get the state of an async prediction.",
                AsyncPredictionDocument,
                _UNAVAILABLE,
            ),
            delete(
                "cancel_async_prediction",
                "Cancel or delete an async prediction.",
                {200: AsyncPredictionDocument, 204: NO_CONTENT},
                _UNAVAILABLE,
            ),
        ],
        "/async/{id}/result": [
            get(
                "get_async_prediction_result",
                "Get the response with its status and headers.",
                {
                    200: Content({}, "The response with its content type."),
                    202: json(AsyncPredictionDocument, "There is no response yet."),
                    "default": Content({}, "The status of the response."),
                },
                (410, 503),
            )
        ],
    },
)
_METRICS_PAGE = Content({"text/plain; version=0.0.4; charset=utf-8": str})
METRICS = API(
    "Metrics",
    "For Prometheus.",
    ERRORS,
    {
        "/metrics": [
            get("metrics", "Get the metrics of the whole cluster.", _METRICS_PAGE, query=MetricsParameters)
        ]
    },
)
_PAGE = Content({"text/html; charset=utf-8": str})
_TORCHSERVE_DOCUMENT = "Get TorchServe's own document."
# Served by every port.
DESCRIPTION = API(
    "Description",
    "The descriptions of the port's API.",
    _NO_ERRORS,
    {
        "/": [options("described", _TORCHSERVE_DOCUMENT, OpenAPIDocument)],
        "/api-description": [
            get("described_at_length", _TORCHSERVE_DOCUMENT, OpenAPIDocument, deprecated=True)
        ],
        "/openapi.json": [get("openapi", "Get this document.", OpenAPIDocument)],
        "/docs": [get("api_page", "Get a page that shows this document and sends requests.", _PAGE)],
    },
)
