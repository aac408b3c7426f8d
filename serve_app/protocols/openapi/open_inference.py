"""The Open Inference Protocol, version 2, with its extensions."""

from __future__ import annotations

from serve_app.domain.signature import DATATYPES
from serve_app.protocols.openapi.builders import (
    MODEL,
    REQUEST_HEADERS,
    VERSION,
    DocumentPart,
    ErrorFormat,
    Json,
    any_value,
    array,
    boolean,
    header_parameter,
    integer,
    mapping,
    object_schema,
    operation,
    request_body,
    response,
    schema_ref,
    string,
)

ERRORS = ErrorFormat("OIPError")
_PARAMETERS = mapping(
    {"type": ["string", "number", "boolean"]}, "Parameters of the request, input or output."
)
_SHAPE = array(integer(minimum=0), maxItems=32)
_DATATYPE = string(enum=list(DATATYPES))
_PORT = object_schema(
    ("name", "datatype", "shape"),
    name=string(),
    datatype=_DATATYPE,
    shape=array(integer("-1: any length.", minimum=-1)),
)
_TENSOR_DATA = any_value(
    "The elements, flat or nested as in the shape; absent if they follow the JSON as bytes."
)
_DURATION = object_schema(("count", "ns"), count=integer(minimum=0), ns=integer(minimum=0))
_SCHEMAS = {
    "OIPError": object_schema(("error",), error=string("The error message.")),
    "InferRequest": object_schema(
        ("inputs",),
        id=string(),
        parameters=_PARAMETERS,
        inputs=array(
            object_schema(
                ("name", "datatype", "shape"),
                name=string(minLength=1),
                datatype=_DATATYPE,
                shape=_SHAPE,
                parameters=_PARAMETERS,
                data=_TENSOR_DATA,
            ),
            maxItems=1000,
        ),
        outputs=array(
            object_schema(("name",), name=string(minLength=1), parameters=_PARAMETERS),
            "The requested outputs; default: all.",
            maxItems=1000,
        ),
    ),
    "InferResponse": object_schema(
        ("model_name", "model_version", "outputs"),
        model_name=string(),
        model_version=string(),
        id=string(),
        outputs=array(
            object_schema(
                ("name", "datatype", "shape"),
                name=string(),
                datatype=_DATATYPE,
                shape=_SHAPE,
                parameters=_PARAMETERS,
                data=_TENSOR_DATA,
            )
        ),
    ),
    "ModelMetadata": object_schema(
        ("name", "versions", "platform", "inputs", "outputs"),
        name=string(),
        versions=array(string()),
        platform=string(),
        inputs=array(_PORT),
        outputs=array(_PORT),
    ),
    "ModelConfig": object_schema(
        ("name", "platform", "max_batch_size", "input", "output"), name=string(), platform=string()
    ),
    "Statistics": object_schema(
        ("model_stats",),
        model_stats=array(
            object_schema(
                ("name", "version", "inference_count", "execution_count", "inference_stats"),
                name=string(),
                version=string(),
                inference_count=integer(minimum=0),
                execution_count=integer(minimum=0),
                inference_stats=mapping(_DURATION),
                last_inference=integer("Milliseconds since the epoch; 0 without an inference.", minimum=0),
                batch_stats=array(
                    object_schema(("batch_size", "compute_infer"), batch_size=integer(minimum=1))
                ),
            )
        ),
    ),
    "Generate": object_schema(
        ("text_input",),
        text_input=string("The prompt."),
        id=string(),
        parameters=object_schema((), "max_tokens, temperature, top_p, top_k, seed, stop, details"),
    ),
    "Generated": object_schema(
        ("text_output", "model_name", "model_version"),
        text_output=string(),
        model_name=string(),
        model_version=string(),
        id=string(),
        details=object_schema(finish_reason=string()),
    ),
}
_INFERENCE_ERRORS = ERRORS.responses_for(400, 401, 403, 404, 410, 413, 422, 429, 500, 501, 503, 504, 507)
_HANDLER_RESPONSE = response("The handler's own status.", schema_ref("OIPError"))
_JSON_LENGTH = header_parameter(
    "inference-header-content-length",
    "The size of the JSON in bytes if tensors follow it; 0: the body is the model's only input.",
    integer(minimum=0),
)
_READY = object_schema(("ready",), name=string(), ready=boolean())
_METADATA_ERRORS = ERRORS.responses_for(400, 401, 403, 404, 500, 503)


def _infer(name: str, *parameters: Json) -> Json:
    binary: Json = {"application/octet-stream": {"schema": {}}}
    result = response("The outputs.", schema_ref("InferResponse"), from_model=True)
    body = request_body(schema_ref("InferRequest"))
    async_response = {
        "202": response(
            "Accepted as an async prediction because of the header Prefer: respond-async.",
            schema_ref("AsyncPrediction"),
        )
    }
    return {
        "post": operation(
            name,
            "Run an inference on tensors.",
            {
                "200": {**result, "content": {**result["content"], **binary}},
                **async_response,
                **_INFERENCE_ERRORS,
                "default": _HANDLER_RESPONSE,
            },
            *parameters,
            *REQUEST_HEADERS,
            _JSON_LENGTH,
            body={**body, "content": {**body["content"], **binary}},
        )
    }


def _generate(name: str, summary: str, success: Json, *parameters: Json) -> Json:
    responses = {
        "200": success,
        **_INFERENCE_ERRORS,
        "424": ERRORS.responses_for(424)["424"],
        "default": _HANDLER_RESPONSE,
    }
    return {
        "post": operation(
            name, summary, responses, *parameters, *REQUEST_HEADERS, body=request_body(schema_ref("Generate"))
        )
    }


def _get_path(
    name: str, summary: str, schema: Json, *parameters: Json, more_responses: Json | None = None
) -> Json:
    return {
        "get": operation(
            name,
            summary,
            {"200": response("The document.", schema), **_METADATA_ERRORS, **(more_responses or {})},
            *parameters,
        )
    }


def _model_paths(path: str, suffix: str, *parameters: Json) -> Json:
    events = response("Server-sent events, each a Generated.", {}, "text/event-stream", from_model=True)
    return {
        path: _get_path(
            f"metadata{suffix}",
            "Get a model's versions, inputs and outputs.",
            schema_ref("ModelMetadata"),
            *parameters,
        ),
        f"{path}/ready": _get_path(
            f"model_ready{suffix}",
            "Get the readiness.",
            _READY,
            *parameters,
            more_responses={"503": response("Not ready.", _READY)},
        ),
        f"{path}/config": _get_path(
            f"config{suffix}",
            "Get the configuration that Triton's clients read.",
            schema_ref("ModelConfig"),
            *parameters,
        ),
        f"{path}/stats": _get_path(
            f"statistics{suffix}",
            "Get the statistics of a model.",
            schema_ref("Statistics"),
            *parameters,
            more_responses=ERRORS.responses_for(501),
        ),
        f"{path}/infer": _infer(f"infer{suffix}", *parameters),
        f"{path}/generate": _generate(
            f"generate{suffix}",
            "Complete a text.",
            response("The text.", schema_ref("Generated"), from_model=True),
            *parameters,
        ),
        f"{path}/generate_stream": _generate(
            f"generate_stream{suffix}",
            "Complete a text as a stream.",
            {
                **events,
                "content": {**events["content"], "application/json": {"schema": schema_ref("Generated")}},
            },
            *parameters,
        ),
    }


_REPOSITORY_ENTRY = object_schema(
    ("name", "version", "state", "reason"),
    name=string(),
    version=string(),
    state=string(enum=["READY", "LOADING", "UNAVAILABLE"]),
    reason=string(),
)
_CHANGED = {
    "200": response("Done; the body is empty."),
    **ERRORS.responses_for(400, 401, 403, 404, 405, 409, 413, 500, 501, 503, 507),
}
_LOAD = object_schema(
    parameters=object_schema(
        closed=True, url=string("Another archive."), workers=integer(minimum=1, maximum=1000)
    )
)

OPEN_INFERENCE = DocumentPart(
    "Open Inference Protocol",
    "Version 2, with binary tensors, model repository, statistics, model configuration and generated text.",
    {
        "/v2": _get_path(
            "server",
            "Describe the server.",
            object_schema(
                ("name", "version", "extensions"), name=string(), version=string(), extensions=array(string())
            ),
        ),
        "/v2/health/live": _get_path(
            "v2_live", "Get the readiness.", object_schema(("live",), live=boolean())
        ),
        "/v2/health/ready": _get_path(
            "v2_ready",
            "Get the readiness of the server.",
            _READY,
            more_responses={"503": response("Not ready.", _READY)},
        ),
        "/v2/models/stats": _get_path(
            "all_statistics",
            "Get the statistics of all models.",
            schema_ref("Statistics"),
            more_responses=ERRORS.responses_for(501),
        ),
        **_model_paths("/v2/models/{model_name}", "", MODEL),
        **_model_paths("/v2/models/{model_name}/versions/{model_version}", "_version", MODEL, VERSION),
        "/v2/repository/index": {
            "post": operation(
                "repository_index",
                "List every version of every model with its state.",
                {
                    "200": response("The list.", array(_REPOSITORY_ENTRY)),
                    **ERRORS.responses_for(400, 401, 403, 413, 500),
                },
                body=request_body(object_schema(ready=boolean("true: only ready versions.")), required=False),
            )
        },
        "/v2/repository/models/{model_name}/load": {
            "post": operation(
                "load",
                "Start a model, or register the archive of its name.",
                _CHANGED,
                MODEL,
                body=request_body(_LOAD, required=False),
            )
        },
        "/v2/repository/models/{model_name}/unload": {
            "post": operation(
                "unload",
                "Remove a model's replicas; it stays registered.",
                _CHANGED,
                MODEL,
                body=request_body(object_schema(), required=False),
            )
        },
    },
    _SCHEMAS,
)
