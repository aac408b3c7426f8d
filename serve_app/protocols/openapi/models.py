"""TorchServe's management API: models, their events, keys."""

from __future__ import annotations

from serve_app.protocols.openapi.builders import (
    MODEL,
    VERSION,
    DocumentPart,
    Json,
    array,
    boolean,
    header_parameter,
    integer,
    number,
    object_schema,
    operation,
    path_parameter,
    query_parameter,
    response,
    schema_ref,
    string,
)
from serve_app.protocols.openapi.torchserve import ERRORS, SCHEMAS, STATUS

_NEXT_PAGE_TOKEN = string("The token of the next page; absent on the last one.")
_SCHEMAS = {
    **SCHEMAS,
    "Models": object_schema(
        ("models",),
        nextPageToken=_NEXT_PAGE_TOKEN,
        models=array(
            object_schema(
                ("modelName", "modelUrl"),
                modelName=string(),
                modelUrl=string("The URL of the default version."),
            ),
            maxItems=100,
        ),
    ),
    "Worker": object_schema(
        ("id", "startTime", "status", "memoryUsage", "pid", "gpu", "gpuUsage"),
        id=string(),
        startTime=string("In UTC.", format="date-time"),
        status=string(enum=["READY", "LOADING", "UNLOADING"]),
        memoryUsage=integer("The resident memory in bytes."),
        pid=integer("The process id."),
        gpu=boolean("Whether it uses a GPU."),
        gpuUsage=string("The visible GPUs, or N/A."),
    ),
    "Model": object_schema(
        (
            *(
                "modelName",
                "modelVersion",
                "modelUrl",
                "minWorkers",
                "maxWorkers",
                "batchSize",
                "maxBatchDelay",
            ),
            *("loadedAtStartup", "workers", "jobQueueStatus"),
        ),
        modelName=string(),
        modelVersion=string(),
        modelUrl=string("The source of the archive."),
        runtime=string("The interpreter of the handler."),
        minWorkers=integer("The minimum number of workers.", minimum=0),
        maxWorkers=integer("The maximum number of workers.", minimum=0),
        batchSize=integer("The maximum number of requests in a batch.", minimum=1),
        maxBatchDelay=integer("The time in milliseconds that an incomplete batch waits.", minimum=0),
        responseTimeout=number("The timeout of a batch in seconds."),
        startupTimeout=number("The timeout of a worker's start in seconds."),
        loadedAtStartup=boolean(),
        workers=array(schema_ref("Worker")),
        jobQueueStatus=object_schema(
            ("remainingCapacity", "pendingRequests"),
            remainingCapacity=integer("The free places in the queues.", minimum=0),
            pendingRequests=integer("The requests in the queues.", minimum=0),
        ),
        task=string("The task of a Hugging Face folder."),
        autoscaling=object_schema((), "The autoscaling policy, if there is one."),
        customizedMetadata=object_schema((), "The handler's own metadata; with customized=true."),
        lastError=string("The last error that ended a worker or prevented its start."),
        lastErrorTime=string("The time of the last error in UTC.", format="date-time"),
    ),
}

_TRUE_OR_FALSE = string("Every other value is false.")
_SYNCHRONOUS = query_parameter("synchronous", "true: respond after the workers have started.", _TRUE_OR_FALSE)


def _integer_parameters(**descriptions: str) -> list[Json]:
    return [
        query_parameter(name, description, integer(minimum=0, maximum=2**31 - 1))
        for name, description in descriptions.items()
    ]


_AUTOSCALING = [
    query_parameter(
        "autoscaling_policy",
        "The signal that the number of workers follows.",
        string(enum=["requests", "latency"]),
    ),
    *(
        query_parameter(name, description, number(minimum=0))
        for name, description in {
            "target_ongoing_requests": "The target number of rows per worker.",
            "target_p95_ms": "Policy latency: the target of the 95th percentile in milliseconds.",
            "upscale_delay_s": "The seconds of sustained load before workers are added.",
            "downscale_delay_s": "The seconds of sustained lower load before workers are removed.",
            "downscale_to_zero_delay_s": "The same for the last worker.",
            "look_back_period_s": "The seconds over which load and latency are measured.",
        }.items()
    ),
]
_REGISTRATION = {
    "url": "A file of the model store, or the URL of the archive.",
    "model_name": "The model's name; default: that of the manifest.",
    "handler": "The handler; default: that of the manifest.",
    "task": "The task of a Hugging Face folder; default: derived from its files.",
    "runtime": "The interpreter of the handler; default: that of the manifest.",
    "registration": "A name chosen by the caller, to filter the events of this registration.",
}
_INTEGERS = {
    "batch_size": "The maximum number of requests in a batch.",
    "max_batch_delay": "The time in milliseconds that an incomplete batch waits.",
    "initial_workers": "The number of workers to start.",
    "response_timeout": "The timeout of a batch in seconds.",
    "startup_timeout": "The timeout of a worker's start in seconds.",
}
# Parameters of the body override those of the query.
_BODY_PARAMETERS = {
    "content": {
        "application/json": {"schema": object_schema()},
        "application/x-www-form-urlencoded": {"schema": object_schema()},
    },
    "required": False,
    "description": "The same parameters as in the query.",
}
_CHANGED = {
    "200": response("Done.", STATUS),
    "202": response(
        "Accepted; the change continues in the background, or some replicas have not applied it yet.", STATUS
    ),
    "206": response("Some of the workers have not started yet.", STATUS),
}
_DOCUMENT_RESPONSE = {
    "200": response("An OpenAPI document.", schema_ref("OpenAPI")),
    **ERRORS.responses_for(400, 404, 500),
}


def _version_operations(prefix: str, subject: str, *parameters: Json) -> Json:
    errors = ERRORS.responses_for
    return {
        "get": operation(
            f"describe{prefix}",
            f'Describe {subject}; the version "all" stands for every version.',
            {
                "200": response("Versions.", array(schema_ref("Model"), minItems=1)),
                **errors(400, 404, 500, 503),
            },
            *parameters,
            query_parameter("customized", "true: include the handler's own metadata.", _TRUE_OR_FALSE),
        ),
        "put": operation(
            f"scale{prefix}",
            f"Change the number of workers of {subject}.",
            {**_CHANGED, **errors(400, 404, 409, 413, 500, 507)},
            *parameters,
            *_integer_parameters(
                min_worker="The minimum number of workers; default 1.",
                max_worker="The maximum; default min_worker.",
            ),
            _SYNCHRONOUS,
            *_AUTOSCALING,
            body=_BODY_PARAMETERS,
        ),
        "delete": operation(
            f"unregister{prefix}",
            f"Unregister {subject}.",
            {
                "200": response("It is unregistered.", STATUS),
                "202": response("Stored; some replicas have not applied it yet.", STATUS),
                **errors(400, 403, 404, 405, 409, 500),
            },
            *parameters,
        ),
        "options": operation(
            f"describe{prefix}_api", "Describe the model's API.", _DOCUMENT_RESPONSE, *parameters
        ),
    }


_PATHS: Json = {
    "/models": {
        "get": operation(
            "models",
            "List the models by name.",
            {"200": response("A page of models.", schema_ref("Models")), **ERRORS.responses_for(400, 500)},
            query_parameter(
                "limit", "The maximum number of models on a page, 0 to 100; other values stand for 100."
            ),
            query_parameter("next_page_token", "The nextPageToken of the previous page.", string()),
        ),
        "post": operation(
            "register",
            "Register an archive, or a Hugging Face folder.",
            {**_CHANGED, **ERRORS.responses_for(400, 403, 404, 405, 409, 413, 500, 507)},
            *(query_parameter(name, description) for name, description in _REGISTRATION.items()),
            *_integer_parameters(**_INTEGERS),
            _SYNCHRONOUS,
            query_parameter("s3_sse_kms", "true: an https URL of S3's is signed.", _TRUE_OR_FALSE),
            body=_BODY_PARAMETERS,
        ),
    },
    "/models/{model_name}": _version_operations("", "a model's default version", MODEL),
    "/models/{model_name}/{model_version}": _version_operations(
        "_version", "one version of a model", MODEL, VERSION
    ),
    "/models/{model_name}/{model_version}/set-default": {
        "put": operation(
            "set_default",
            "Set the version that serves requests without a version.",
            {
                "200": response("Done.", STATUS),
                "202": response("Stored; some replicas have not applied it yet.", STATUS),
                **ERRORS.responses_for(400, 404, 409, 500),
            },
            MODEL,
            VERSION,
        ),
        "options": operation(
            "set_default_api", "Describe the model's API.", _DOCUMENT_RESPONSE, MODEL, VERSION
        ),
    },
    "/models/{model_name}/events": {
        "get": operation(
            "events",
            "Stream the events of a model's start.",
            {
                "200": response("Server-sent events.", {}, "text/event-stream"),
                **ERRORS.responses_for(400, 404, 500),
            },
            MODEL,
            query_parameter("since", "Only events after this one.", integer(minimum=0)),
            query_parameter(
                "follow", "true: continue the stream after the model is ready or has failed.", _TRUE_OR_FALSE
            ),
            query_parameter("registration", "Only the registration with this name."),
            header_parameter("last-event-id", "As since.", string(pattern="^[0-9]+$")),
        )
    },
    "/v1/models/{model_name}": {
        "get": operation(
            "v1_ready",
            "Get whether a model's default version is ready.",
            {
                "200": response(
                    "The readiness.", object_schema(("name", "ready"), name=string(), ready=boolean())
                ),
                **ERRORS.responses_for(400, 404, 500),
            },
            path_parameter("model_name", "The model.", string(pattern="^[A-Za-z0-9_][A-Za-z0-9_.-]*$")),
        )
    },
    "/token": {
        "get": operation(
            "token",
            "Write a new key to the key file.",
            {
                "200": response("A line end; the key is in the file.", {}),
                **ERRORS.responses_for(400, 404, 500),
            },
            query_parameter("type", "The key to replace.", string(enum=["management", "inference"])),
        )
    },
}
MODELS = DocumentPart(
    "TorchServe: management", "Registration, scaling and description of models.", _PATHS, _SCHEMAS
)
