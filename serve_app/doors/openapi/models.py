"""TorchServe's management port: models, their events, keys."""

from __future__ import annotations

from serve_app.doors.openapi.torchserve import DIALECT, SCHEMAS, STATUS
from serve_app.doors.openapi.words import (
    MODEL,
    VERSION,
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
    number,
    operation,
    schema,
    text,
)

_NEXT = text("Where the next page begins; absent on the last one.")
_SCHEMAS = {
    **SCHEMAS,
    "Models": document(
        ("models",),
        nextPageToken=_NEXT,
        models=array(
            document(("modelName", "modelUrl"), modelName=text(), modelUrl=text("Of its default version.")),
            maxItems=100,
        ),
    ),
    "Worker": document(
        ("id", "startTime", "status", "memoryUsage", "pid", "gpu", "gpuUsage"),
        id=text(),
        startTime=text("In UTC.", format="date-time"),
        status=text(enum=["READY", "LOADING", "UNLOADING"]),
        memoryUsage=integer("Its resident memory in bytes."),
        pid=integer("Its process."),
        gpu=flag("Whether it runs on one."),
        gpuUsage=text("The GPUs that it sees, or N/A."),
    ),
    "Model": document(
        (
            *("modelName", "modelVersion", "modelUrl", "minWorkers", "maxWorkers", "batchSize", "maxBatchDelay"),
            *("loadedAtStartup", "workers", "jobQueueStatus"),
        ),
        modelName=text(),
        modelVersion=text(),
        modelUrl=text("Where it came from."),
        runtime=text("What runs its handler."),
        minWorkers=integer("The fewest workers that it should have.", minimum=0),
        maxWorkers=integer("The most.", minimum=0),
        batchSize=integer("The most requests in a batch.", minimum=1),
        maxBatchDelay=integer("How long an incomplete batch waits, in milliseconds.", minimum=0),
        responseTimeout=number("Seconds that a batch may take."),
        startupTimeout=number("Seconds that a worker may take to start."),
        loadedAtStartup=flag(),
        workers=array(schema("Worker")),
        jobQueueStatus=document(
            ("remainingCapacity", "pendingRequests"),
            remainingCapacity=integer("Requests that its queues have room for.", minimum=0),
            pendingRequests=integer("Requests that wait in them.", minimum=0),
        ),
        task=text("What a Hugging Face folder is asked."),
        autoscaling=document((), "What its number of workers follows, where it follows something."),
        customizedMetadata=document((), "What its handler says of itself; with customized=true."),
        lastError=text("What ended one of its workers last, or kept it from running."),
        lastErrorTime=text("When that was, in UTC.", format="date-time"),
    ),
}

_TRUTH = text("Whatever is not true is false.")
_WAITS = in_query("synchronous", "true: the answer waits for the workers.", _TRUTH)


def _counts(**about: str) -> list[Json]:
    return [in_query(name, said, integer(minimum=0, maximum=2**31 - 1)) for name, said in about.items()]


_AUTOSCALING = [
    in_query("autoscaling_policy", "What their number follows.", text(enum=["requests", "latency"])),
    *(
        in_query(name, said, number(minimum=0))
        for name, said in {
            "target_ongoing_requests": "Rows that a worker should have to do.",
            "target_p95_ms": "Of the policy latency: the milliseconds within which 95 % are answered.",
            "upscale_delay_s": "Seconds for which more must be wanted before there are more.",
            "downscale_delay_s": "Seconds for which fewer must be wanted before there are fewer.",
            "downscale_to_zero_delay_s": "The same of the last worker.",
            "look_back_period_s": "Seconds over which load and latency are looked at.",
        }.items()
    ),
]
_REGISTRATION = {
    "url": "A file of the model store, or where the archive is fetched from.",
    "model_name": "The model's name; else the manifest says.",
    "handler": "The handler; else the manifest says.",
    "task": "What a Hugging Face folder is asked; else its files say.",
    "runtime": "What runs the handler; else the manifest says.",
    "registration": "A name of the caller's, by which events of this registration alone can be asked for.",
}
_NUMBERS = {
    "batch_size": "The most requests in a batch.",
    "max_batch_delay": "How long an incomplete batch waits, in milliseconds.",
    "initial_workers": "How many workers to start.",
    "response_timeout": "How long a batch may take, in seconds.",
    "startup_timeout": "How long a worker may take to start, in seconds.",
}
# Parameters may come in a body, too, and win over the query's.
_IN_A_BODY = {
    "content": {
        "application/json": {"schema": document()},
        "application/x-www-form-urlencoded": {"schema": document()},
    },
    "required": False,
    "description": "The same parameters as in the query.",
}
_CHANGED = {
    "200": answer("Done.", STATUS),
    "202": answer("Accepted; it happens in the background, or some replicas have not heard of it yet.", STATUS),
    "206": answer("Some of the workers are still on their way.", STATUS),
}
_DESCRIBED = {"200": answer("An OpenAPI document.", schema("OpenAPI")), **DIALECT.refusals(400, 404, 500)}


def _of_version(prefix: str, which: str, *named: Json) -> Json:
    said = DIALECT.refusals
    return {
        "get": operation(
            f"describe{prefix}",
            f'Describe {which}; with "all" for a version, every one.',
            {"200": answer("Versions.", array(schema("Model"), minItems=1)), **said(400, 404, 500, 503)},
            *named,
            in_query("customized", "true: with what its handler says of itself.", _TRUTH),
        ),
        "put": operation(
            f"scale{prefix}",
            f"Change how many workers {which} has.",
            {**_CHANGED, **said(400, 404, 409, 413, 500, 507)},
            *named,
            *_counts(min_worker="The fewest workers; 1 unless said.", max_worker="The most; else min_worker."),
            _WAITS,
            *_AUTOSCALING,
            body=_IN_A_BODY,
        ),
        "delete": operation(
            f"unregister{prefix}",
            f"Unregister {which}.",
            {
                "200": answer("It answers no more.", STATUS),
                "202": answer("Stored; some replicas have not heard of it yet.", STATUS),
                **said(400, 403, 404, 405, 409, 500),
            },
            *named,
        ),
        "options": operation(f"describe{prefix}_api", "What this model says of itself.", _DESCRIBED, *named),
    }


_PATHS: Json = {
    "/models": {
        "get": operation(
            "models",
            "List the models by name.",
            {"200": answer("A page of models.", schema("Models")), **DIALECT.refusals(400, 500)},
            in_query("limit", "The most models on a page: 0 to 100; what is not, or is no number, is 100."),
            in_query("next_page_token", "Where the page begins: the nextPageToken of the page before.", text()),
        ),
        "post": operation(
            "register",
            "Register an archive, or a Hugging Face folder.",
            {**_CHANGED, **DIALECT.refusals(400, 403, 404, 405, 409, 413, 500, 507)},
            *(in_query(name, about) for name, about in _REGISTRATION.items()),
            *_counts(**_NUMBERS),
            _WAITS,
            in_query("s3_sse_kms", "true: an https URL of S3's is signed.", _TRUTH),
            body=_IN_A_BODY,
        ),
    },
    "/models/{model_name}": _of_version("", "a model's default version", MODEL),
    "/models/{model_name}/{model_version}": _of_version("_version", "one version of a model", MODEL, VERSION),
    "/models/{model_name}/{model_version}/set-default": {
        "put": operation(
            "set_default",
            "Make a version the one that answers calls which name none.",
            {
                "200": answer("It is.", STATUS),
                "202": answer("Stored; some replicas have not heard of it yet.", STATUS),
                **DIALECT.refusals(400, 404, 409, 500),
            },
            MODEL,
            VERSION,
        ),
        "options": operation("set_default_api", "What this model says of itself.", _DESCRIBED, MODEL, VERSION),
    },
    "/models/{model_name}/events": {
        "get": operation(
            "events",
            "How the model comes up, as it happens.",
            {
                "200": answer("Server-sent events.", {}, "text/event-stream"),
                **DIALECT.refusals(400, 404, 500),
            },
            MODEL,
            in_query("since", "Only events after this one.", integer(minimum=0)),
            in_query("follow", "true: the stream goes on when the model is ready, or has failed.", _TRUTH),
            in_query("registration", "Only the registration that named itself so."),
            in_header("last-event-id", "As since.", text(pattern="^[0-9]+$")),
        )
    },
    "/v1/models/{model_name}": {
        "get": operation(
            "v1_ready",
            "Whether a model's default version is ready.",
            {
                "200": answer("Whether it is.", document(("name", "ready"), name=text(), ready=flag())),
                **DIALECT.refusals(400, 404, 500),
            },
            in_path("model_name", "The model.", text(pattern="^[A-Za-z0-9_][A-Za-z0-9_.-]*$")),
        )
    },
    "/token": {
        "get": operation(
            "token",
            "Put a new key into the key file.",
            {
                "200": answer("A line end; the key is in the file.", {}),
                **DIALECT.refusals(400, 404, 500),
            },
            in_query("type", "Which.", text(enum=["management", "inference"])),
        )
    },
}
MODELS = Part("TorchServe: management", "Models, registered, scaled, described.", _PATHS, _SCHEMAS)
