"""TorchServe's inference port: predictions, explanations, its other routes to both, and health."""

from __future__ import annotations

from serve_app.doors.openapi.words import (
    ANY_BODY,
    CALL,
    MODEL,
    VERSION,
    Dialect,
    Json,
    Part,
    answer,
    array,
    document,
    flag,
    in_header,
    in_path,
    in_query,
    integer,
    operation,
    schema,
    text,
)

DIALECT = Dialect("Error", silent=(413,))
SCHEMAS = {
    "Error": document(
        ("code", "type", "message"),
        "What went wrong, as TorchServe says it.",
        code=integer("The status of the answer."),
        type=text("The name of the error."),
        message=text("What went wrong."),
        detail=text("More of it, where there is more to say and a caller may see it."),
    ),
    "Status": document(("status",), "What was done.", status=text("In a sentence.")),
    "Health": document(("status",), status=text(enum=["Healthy", "Unhealthy"])),
    "Readiness": document(
        ("ready", "loading", "failed"),
        ready=flag("Whether everything that start-up wanted is ready or has failed."),
        loading=array(text("model/version")),
        failed=array(text("model/version")),
        reason=text("Why not, where no routing table has come yet."),
    ),
    "OpenAPI": document(("openapi", "info", "paths"), openapi=text(), info=document(), paths=document()),
}
STATUS = schema("Status")

_CALLED = DIALECT.refusals(400, 404, 410, 413, 429, 500, 503, 504, 507)
_HANDLERS = {"description": "The handler's own status, with its own words or its own body."}
_ACCEPT = in_header(
    "accept", "text/event-stream: the answer comes as server-sent events.", text(default="*/*", pattern="^[ -~]*$")
)
_KEPT = {
    "202": answer("Put aside, because the header Prefer said respond-async; ask for it there.", schema("Deferral"))
}
_FORM = {
    "content": {
        **ANY_BODY,
        "multipart/form-data": {"schema": {"type": "object", "additionalProperties": {"type": "string"}}},
        "application/x-www-form-urlencoded": {"schema": {"type": "object", "additionalProperties": {"type": "string"}}},
    },
    "required": False,
    "description": "Whatever the model's handler reads: a form's fields, or one body of any type. At most "
    "inference.max_request_size bytes.",
}
_METHODS = ("get", "post", "put")  # every other one, too, but OPTIONS


def _calls(name: str, about: str, *parameters: Json, later: bool = False) -> Json:
    """The operations of a route that calls a model, whatever the method."""
    answers = {
        "200": answer("Whatever the model's handler says, under its content type, or none.", called=True),
        **(_KEPT if later else {}),
        **_CALLED,
        "default": _HANDLERS,
    }
    said = {}
    for method in _METHODS:
        given = None if method == "get" else _FORM
        id = name if method == "post" else f"{name}_by_{method}"
        said[method] = operation(id, about, answers, *parameters, *CALL, _ACCEPT, body=given)
    described = {
        "200": answer("An OpenAPI document of this model.", schema("OpenAPI")),
        **DIALECT.refusals(400, 404, 500, 503),
    }
    said["options"] = operation(f"{name}_described", "What this model says of itself.", described, *parameters)
    return said


_DEFAULT = "Ask a model's default version, or the one that its policy picks."
_EXPLAIN = "Have it explain its answer."
_REST = in_path("url_path", "Goes to the handler as the header url_path; may have slashes in it.")

_PATHS: Json = {
    "/predictions/{model_name}": _calls("predict", _DEFAULT, MODEL, later=True),
    "/predictions/{model_name}/{model_version}": _calls(
        "predict_version", "Ask one version of a model.", MODEL, VERSION, later=True
    ),
    "/predictions/{model_name}/{model_version}/{url_path}": _calls(
        "predict_path",
        "Ask one version of a model, which is told the rest of the path.",
        MODEL,
        VERSION,
        _REST,
        later=True,
    ),
    "/explanations/{model_name}": _calls("explain", _EXPLAIN, MODEL),
    "/explanations/{model_name}/{model_version}": _calls("explain_version", _EXPLAIN, MODEL, VERSION),
    "/explanations/{model_name}/{model_version}/{url_path}": _calls("explain_path", _EXPLAIN, MODEL, VERSION, _REST),
    "/v1/models/{model_name}:predict": _calls("v1_predict", f"{_DEFAULT} KServe's version 1.", MODEL),
    "/v1/models/{model_name}:explain": _calls("v1_explain", f"{_EXPLAIN} KServe's version 1.", MODEL),
    "/v2/models/{model_name}/explain": _calls("v2_explain", _EXPLAIN, MODEL),
    "/models/{model_name}/invoke": _calls("invoke", f"{_DEFAULT} The query is input, too.", MODEL),
    "/{model_name}/predict": _calls("legacy_predict", f"{_DEFAULT} The query is input, too.", MODEL),
    "/{model_name}/{model_version}/predict": _calls(
        "legacy_predict_version", "Ask one version of a model. The query is input, too.", MODEL, VERSION
    ),
    "/invocations": _calls(
        "invocations",
        "Ask a model that the query or a form's field names, or the one that start-up has loaded; the query is input.",
        in_query("model_name", "The model."),
    ),
    "/wfpredict/{workflow_name}": _calls("wfpredict", "Ask a workflow.", in_path("workflow_name", "The workflow.")),
    "/": {
        "get": operation(
            "v1_live", "Whether this server answers. KServe's version 1.", {"200": answer("It does.", schema("Status"))}
        )
    },
    "/ping": {
        "get": operation(
            "ping",
            "Whether every default version has its workers.",
            {
                "200": answer("They are there, or have time left.", schema("Health")),
                "500": answer("Some are not.", schema("Health")),
            },
        )
    },
    "/health/live": {
        "get": operation(
            "live", "Whether this server answers.", {"200": answer("Yes.", document(("live",), live=flag()))}
        )
    },
    "/health/ready": {
        "get": operation(
            "ready",
            "Whether everything that should be loaded has been.",
            {"200": answer("Yes.", schema("Readiness")), "503": answer("Not yet.", schema("Readiness"))},
        )
    },
}

INFERENCE = Part("TorchServe: inference", "Predictions and explanations by TorchServe's routes.", _PATHS, SCHEMAS)
# What every port says of itself.
_DESCRIBED = {"200": answer("An OpenAPI document.", schema("OpenAPI"))}
DESCRIPTION = Part(
    "Description",
    "What a port says of itself.",
    {
        "/": {"options": operation("described", "TorchServe's own document.", _DESCRIBED)},
        "/api-description": {
            "get": operation("described_at_length", "TorchServe's own document.", _DESCRIBED, deprecated=True)
        },
        "/openapi.json": {"get": operation("openapi", "This document.", _DESCRIBED)},
    },
    SCHEMAS,
)
METRICS = Part(
    "Metrics",
    "For Prometheus.",
    {
        "/metrics": {
            "get": operation(
                "metrics",
                "The metrics of the whole cluster.",
                {
                    "200": answer("The page.", text(), "text/plain; version=0.0.4; charset=utf-8"),
                    **DIALECT.refusals(400, 500),
                },
                in_query("name[]", "Only metrics of these names.", array(text())),
            )
        }
    },
    SCHEMAS,
)
