"""TorchServe's inference API: predictions, explanations, their aliases, and health."""

from __future__ import annotations

from serve_app.protocols.openapi.builders import (
    ANY_BODY,
    MODEL,
    REQUEST_HEADERS,
    VERSION,
    DocumentPart,
    ErrorFormat,
    Json,
    array,
    boolean,
    header_parameter,
    integer,
    object_schema,
    operation,
    path_parameter,
    query_parameter,
    response,
    schema_ref,
    string,
)

ERRORS = ErrorFormat("Error", without_body=(413,))
SCHEMAS = {
    "Error": object_schema(
        ("code", "type", "message"),
        "An error in TorchServe's format.",
        code=integer("The status of the response."),
        type=string("The name of the error."),
        message=string("The error message."),
        detail=string("Details, if there are any and the caller may see them."),
    ),
    "Status": object_schema(("status",), "The result of a change.", status=string("A sentence.")),
    "Health": object_schema(("status",), status=string(enum=["Healthy", "Unhealthy"])),
    "Readiness": object_schema(
        ("ready", "loading", "failed"),
        ready=boolean("Whether all models of the start-up are ready or have failed."),
        loading=array(string("model/version")),
        failed=array(string("model/version")),
        reason=string("The reason, while no routing table has been received."),
    ),
    "OpenAPI": object_schema(
        ("openapi", "info", "paths"), openapi=string(), info=object_schema(), paths=object_schema()
    ),
}
STATUS = schema_ref("Status")

_INFERENCE_ERRORS = ERRORS.responses_for(400, 404, 410, 413, 429, 500, 503, 504, 507)
_HANDLER_RESPONSE = {"description": "The handler's own status and body."}
_ACCEPT = header_parameter(
    "accept",
    "text/event-stream: stream the response as server-sent events.",
    string(default="*/*", pattern="^[ -~]*$"),
)
_ASYNC_RESPONSE = {
    "202": response(
        "Accepted as an async prediction because of the header Prefer: respond-async.",
        schema_ref("AsyncPrediction"),
    )
}
_FORM = {
    "content": {
        **ANY_BODY,
        "multipart/form-data": {"schema": {"type": "object", "additionalProperties": {"type": "string"}}},
        "application/x-www-form-urlencoded": {
            "schema": {"type": "object", "additionalProperties": {"type": "string"}}
        },
    },
    "required": False,
    "description": "The handler's input: form fields, or one body of any type. At most "
    "inference.max_request_size bytes.",
}
_METHODS = ("get", "post", "put")  # all other methods except OPTIONS are accepted, too


def _inference_operations(name: str, summary: str, *parameters: Json, allow_async: bool = False) -> Json:
    """Return the operations of an inference path, which are the same for all methods."""
    responses = {
        "200": response("The handler's response with its content type, if it sets one.", from_model=True),
        **(_ASYNC_RESPONSE if allow_async else {}),
        **_INFERENCE_ERRORS,
        "default": _HANDLER_RESPONSE,
    }
    operations = {}
    for method in _METHODS:
        body = None if method == "get" else _FORM
        operation_id = name if method == "post" else f"{name}_by_{method}"
        operations[method] = operation(
            operation_id, summary, responses, *parameters, *REQUEST_HEADERS, _ACCEPT, body=body
        )
    document_responses = {
        "200": response("An OpenAPI document of this model.", schema_ref("OpenAPI")),
        **ERRORS.responses_for(400, 404, 500, 503),
    }
    operations["options"] = operation(
        f"{name}_described", "Describe the model's API.", document_responses, *parameters
    )
    return operations


_PREDICT_SUMMARY = "Run a model's default version, or the one that its traffic policy selects."
_EXPLAIN_SUMMARY = "Explain a prediction."
_URL_PATH = path_parameter("url_path", "Sent to the handler as the header url_path; may contain slashes.")

_PATHS: Json = {
    "/predictions/{model_name}": _inference_operations("predict", _PREDICT_SUMMARY, MODEL, allow_async=True),
    "/predictions/{model_name}/{model_version}": _inference_operations(
        "predict_version", "Run one version of a model.", MODEL, VERSION, allow_async=True
    ),
    "/predictions/{model_name}/{model_version}/{url_path}": _inference_operations(
        "predict_path",
        "Run one version of a model; its handler receives the rest of the path.",
        MODEL,
        VERSION,
        _URL_PATH,
        allow_async=True,
    ),
    "/explanations/{model_name}": _inference_operations("explain", _EXPLAIN_SUMMARY, MODEL),
    "/explanations/{model_name}/{model_version}": _inference_operations(
        "explain_version", _EXPLAIN_SUMMARY, MODEL, VERSION
    ),
    "/explanations/{model_name}/{model_version}/{url_path}": _inference_operations(
        "explain_path", _EXPLAIN_SUMMARY, MODEL, VERSION, _URL_PATH
    ),
    "/v1/models/{model_name}:predict": _inference_operations(
        "v1_predict", f"{_PREDICT_SUMMARY} KServe's version 1.", MODEL
    ),
    "/v1/models/{model_name}:explain": _inference_operations(
        "v1_explain", f"{_EXPLAIN_SUMMARY} KServe's version 1.", MODEL
    ),
    "/v2/models/{model_name}/explain": _inference_operations("v2_explain", _EXPLAIN_SUMMARY, MODEL),
    "/models/{model_name}/invoke": _inference_operations(
        "invoke", f"{_PREDICT_SUMMARY} The query is input, too.", MODEL
    ),
    "/{model_name}/predict": _inference_operations(
        "legacy_predict", f"{_PREDICT_SUMMARY} The query is input, too.", MODEL
    ),
    "/{model_name}/{model_version}/predict": _inference_operations(
        "legacy_predict_version", "Run one version of a model. The query is input, too.", MODEL, VERSION
    ),
    "/invocations": _inference_operations(
        "invocations",
        "Run the model that the query or a form field names, or the one loaded at start-up. "
        "The query is input, too.",
        query_parameter("model_name", "The model."),
    ),
    "/wfpredict/{workflow_name}": _inference_operations(
        "wfpredict", "Run a workflow.", path_parameter("workflow_name", "The workflow.")
    ),
    "/": {
        "get": operation(
            "v1_live",
            "Get the liveness. KServe's version 1.",
            {"200": response("The server is alive.", schema_ref("Status"))},
        )
    },
    "/ping": {
        "get": operation(
            "ping",
            "Get whether every default version has its workers.",
            {
                "200": response("All have their workers, or have time left to start.", schema_ref("Health")),
                "500": response("Workers are missing.", schema_ref("Health")),
            },
        )
    },
    "/health/live": {
        "get": operation(
            "live", "Get the liveness.", {"200": response("Yes.", object_schema(("live",), live=boolean()))}
        )
    },
    "/health/ready": {
        "get": operation(
            "ready",
            "Get the readiness: whether all models of the start-up are loaded.",
            {
                "200": response("Yes.", schema_ref("Readiness")),
                "503": response("Not yet.", schema_ref("Readiness")),
            },
        )
    },
}

INFERENCE = DocumentPart(
    "TorchServe: inference", "Predictions and explanations by TorchServe's routes.", _PATHS, SCHEMAS
)
# Served by every port.
_DOCUMENT_RESPONSE = {"200": response("An OpenAPI document.", schema_ref("OpenAPI"))}
DESCRIPTION = DocumentPart(
    "Description",
    "The descriptions of the port's API.",
    {
        "/": {"options": operation("described", "TorchServe's own document.", _DOCUMENT_RESPONSE)},
        "/api-description": {
            "get": operation(
                "described_at_length", "TorchServe's own document.", _DOCUMENT_RESPONSE, deprecated=True
            )
        },
        "/openapi.json": {"get": operation("openapi", "This document.", _DOCUMENT_RESPONSE)},
    },
    SCHEMAS,
)
METRICS = DocumentPart(
    "Metrics",
    "For Prometheus.",
    {
        "/metrics": {
            "get": operation(
                "metrics",
                "Get the metrics of the whole cluster.",
                {
                    "200": response("The metrics.", string(), "text/plain; version=0.0.4; charset=utf-8"),
                    **ERRORS.responses_for(400, 500),
                },
                query_parameter("name[]", "Only metrics with these names.", array(string())),
            )
        }
    },
    SCHEMAS,
)
