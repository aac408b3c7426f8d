"""TorchServe's inference API, health, and async predictions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from serve_app.domain.async_prediction import (
    AsyncListParameters,
    AsyncPredictionDocument,
    AsyncPredictionPage,
)
from serve_app.protocols.http.endpoints import (
    API,
    NO_CONTENT,
    Content,
    Endpoint,
    StatusCode,
    delete,
    get,
    json,
    post,
)
from serve_app.protocols.http.json_errors import ERRORS, NO_ERRORS, Status
from serve_app.protocols.torchserve.inference import (
    Health,
    InvocationParameters,
    Liveness,
    PredictionHeaders,
    StartupState,
    SwaggerDocument,
    SwaggerParameters,
)
from serve_app.protocols.torchserve.openapi import describe_path

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


def _inference(
    path: str, id: str, summary: str, query: type | None = None, allow_async: bool = False
) -> tuple[Endpoint, ...]:
    """Return the endpoints of an inference path.

    All methods except OPTIONS do the same; those other than GET, POST and PUT are not described.
    """
    responses = {**_RESPONSES, 202: ASYNC_RESPONSE} if allow_async else _RESPONSES
    errors = (404, 410, 413, 429, 503, 504, 507)
    endpoint = post(path, id, summary, responses, errors, _INPUT, query, PredictionHeaders)
    return (
        replace(endpoint, method="GET", id=f"{id}_by_get", body=None),
        endpoint,
        replace(endpoint, method="PUT", id=f"{id}_by_put"),
        describe_path(path, f"{id}_described", errors=(404, 503), query=query),
    )


_PREDICT = "Run a model's default version, or the one that its traffic policy selects."
_PREDICT_VERSION = "Run one version of a model."
_EXPLAIN = "Explain a prediction."
_QUERY_IS_INPUT = "The query is input, too."
_VERSION = "{model_name}/{model_version}"
_PATH = f"{_VERSION}/{{url_path}}"

INFERENCE = API(
    "TorchServe: inference",
    "Predictions and explanations by TorchServe's routes.",
    ERRORS,
    (
        *_inference("/predictions/{model_name}", "predict", _PREDICT, allow_async=True),
        *_inference(f"/predictions/{_VERSION}", "predict_version", _PREDICT_VERSION, allow_async=True),
        *_inference(
            f"/predictions/{_PATH}",
            "predict_path",
            f"{_PREDICT_VERSION} Its handler receives the rest of the path.",
            allow_async=True,
        ),
        *_inference("/explanations/{model_name}", "explain", _EXPLAIN),
        *_inference(f"/explanations/{_VERSION}", "explain_version", _EXPLAIN),
        *_inference(f"/explanations/{_PATH}", "explain_path", _EXPLAIN),
        *_inference("/v1/models/{model_name}:predict", "v1_predict", f"{_PREDICT} KServe's version 1."),
        *_inference("/v1/models/{model_name}:explain", "v1_explain", f"{_EXPLAIN} KServe's version 1."),
        *_inference("/v2/models/{model_name}/explain", "v2_explain", _EXPLAIN),
        *_inference("/models/{model_name}/invoke", "invoke", f"{_PREDICT} {_QUERY_IS_INPUT}"),
        *_inference(
            "/endpoints/{model_name}/invocations",
            "invoke_endpoint",
            f"{_PREDICT} The client of SageMaker's runtime calls it. {_QUERY_IS_INPUT}",
        ),
        *_inference("/{model_name}/predict", "legacy_predict", f"{_PREDICT} {_QUERY_IS_INPUT}"),
        *_inference(
            f"/{_VERSION}/predict", "legacy_predict_version", f"{_PREDICT_VERSION} {_QUERY_IS_INPUT}"
        ),
        *_inference(
            "/invocations",
            "invocations",
            f"Run the model that a parameter names, or the one loaded at start-up. {_QUERY_IS_INPUT}",
            InvocationParameters,
        ),
        *_inference("/wfpredict/{workflow_name}", "wfpredict", "Run a workflow."),
        get(
            "/swagger.json",
            "swagger",
            "Describe a model's predictions, as Azure ML's inference server does.",
            SwaggerDocument,
            (400, 404),
            query=SwaggerParameters,
        ),
        get(
            "/version",
            "mlflow_version",
            "Get the version of MLflow, as its scoring server does.",
            {200: Content({"text/plain": str}), 404: NO_CONTENT},
        ),
    ),
)
HEALTH = replace(
    INFERENCE,
    errors=NO_ERRORS,
    endpoints=(
        get("/", "v1_live", "Get the liveness. KServe's version 1.", Status),
        get(
            "/ping",
            "ping",
            "Get whether the default versions have their workers.",
            {200: Health, 500: json(Health, "Workers are missing.")},
        ),
        get("/health/live", "live", "Get the liveness.", Liveness),
        get(
            "/health/ready",
            "ready",
            "Get whether all models of the start-up are loaded.",
            {200: StartupState, 503: json(StartupState, "Not yet.")},
        ),
    ),
)
ASYNC_PREDICTIONS = API(
    "Asynchronous predictions",
    "Requested with the header Prefer: respond-async.",
    ERRORS,
    (
        get(
            "/async",
            "list_async_predictions",
            "List the async predictions that the key may see, the newest first.",
            AsyncPredictionPage,
            _UNAVAILABLE,
            query=AsyncListParameters,
        ),
        get(
            "/async/{id}",
            "get_async_prediction",
            "Get the state of an async prediction.",
            AsyncPredictionDocument,
            _UNAVAILABLE,
        ),
        delete(
            "/async/{id}",
            "cancel_async_prediction",
            "Cancel or delete an async prediction.",
            {200: AsyncPredictionDocument, 204: NO_CONTENT},
            _UNAVAILABLE,
        ),
        get(
            "/async/{id}/result",
            "get_async_prediction_result",
            "Get the response with its status and headers.",
            {
                200: Content({}, "The response with its content type."),
                202: json(AsyncPredictionDocument, "There is no response yet."),
                "default": Content({}, "The status of the response."),
            },
            (410, 503),
        ),
    ),
)
