"""What the REST APIs say of themselves: OpenAPI 3.0.1 documents.

Their operations come in TorchServe's order, with its ids, parameters and schemas, so that a client which
is generated from them has the same calls; behind them stand the routes that TorchServe serves and does
not describe, and ours. README.md lists where TorchServe's own documents are wrong and these are not.
"""

from __future__ import annotations

from typing import Any

import serve_app

Json = dict[str, Any]

_ABOUT = "Serves PyTorch models from TorchServe archives on Ray Serve."
_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


def _document(title: str, paths: Json, about: str = "") -> Json:
    info = {"title": title, **({"description": about} if about else {}), "version": serve_app.__version__}
    return {"openapi": "3.0.1", "info": info, "paths": paths}


def _operation(
    about: str, name: str, parameters: list[Json], answers: Json, body: Json | None = None, deprecated: bool = False
) -> Json:
    operation = {"description": about, "operationId": name, "parameters": parameters}
    if body is not None:
        operation["requestBody"] = body
    operation["responses"] = answers
    if deprecated:
        operation["deprecated"] = True
    return operation


# Schemas


def _text(about: str = "", **more: Any) -> Json:
    return _typed("string", about, **more)


def _number(about: str) -> Json:
    return _typed("integer", about)


def _flag(about: str) -> Json:
    return _typed("boolean", about)


def _typed(kind: str, about: str, **more: Any) -> Json:
    return {"type": kind, **({"description": about} if about else {}), **more}


def _list(about: str, of: Json) -> Json:
    return {"type": "array", "items": of, "description": about}


def _object(required: tuple[str, ...], **properties: Json) -> Json:
    return {"type": "object", **({"required": list(required)} if required else {}), "properties": properties}


_STATUS = _object(("status",), status=_text("What was done."))
_ERROR = _object(
    ("code", "type", "message"),
    code=_number("The status of the answer."),
    type=_text("The name of the error."),
    message=_text("What went wrong."),
)
_OPENAPI = _object(
    ("openapi", "info", "paths"), openapi={"type": "string"}, info={"type": "object"}, paths={"type": "object"}
)
_MODELS = _object(
    ("models",),
    nextPageToken=_text("Where the next page begins; absent on the last one."),
    models=_list(
        "The models of this page.",
        _object(
            ("modelName", "modelUrl"), modelName=_text("The model's name."), modelUrl=_text("Where it came from.")
        ),
    ),
)
_WORKER = _object(
    ("id", "startTime", "status"),
    id=_text("The worker's name."),
    startTime=_text("When it started, in UTC."),
    gpu=_flag("Whether it runs on a GPU."),
    status=_text("Its state.", enum=["READY", "LOADING", "UNLOADING"]),
    memoryUsage=_number("Its resident memory in bytes."),
    pid=_number("Its process."),
    gpuUsage=_text("The GPUs that it sees, or N/A."),
)
_DESCRIPTION = _object(
    ("modelName", "modelVersion", "modelUrl", "minWorkers", "maxWorkers", "workers", "jobQueueStatus"),
    modelName=_text("The model's name."),
    modelVersion=_text("Its version."),
    modelUrl=_text("Where it came from."),
    minWorkers=_number("The fewest workers it should have."),
    maxWorkers=_number("The most workers it should have."),
    task=_text("What a Hugging Face folder is asked."),
    autoscaling=_object((), policy=_text("What their number follows between the two; only where it does.")),
    batchSize=_number("The most requests in a batch."),
    maxBatchDelay=_number("How long an incomplete batch waits, in milliseconds."),
    workers=_list("Its workers.", _WORKER),
    jobQueueStatus=_object(
        ("remainingCapacity", "pendingRequests"),
        remainingCapacity=_number("How many requests its queues have room for."),
        pendingRequests=_number("How many requests wait in them."),
    ),
    lastError=_text("What ended one of its workers last, or kept it from running. It stays when all is well again."),
    lastErrorTime=_text("When that was, in UTC."),
)
_ANYTHING = {"*/*": {"schema": {"type": "string", "format": "binary"}}}


# Parameters, bodies and answers


def _path(name: str, about: str) -> Json:
    return {"in": "path", "name": name, "description": about, "required": True, "schema": {"type": "string"}}


def _query(name: str, about: str, kind: str = "string", default: Any = None, required: bool = False) -> Json:
    schema = {"type": kind} if default is None else {"type": kind, "default": default}
    return {"in": "query", "name": name, "description": about, "required": required, "schema": schema}


def _answer(about: str, schema: Json, media_type: str = "application/json") -> Json:
    return {"description": about, "content": {media_type: {"schema": schema}}}


def _errors(*statuses: int) -> Json:
    return {str(status): _answer(_MEANING[status], _ERROR) for status in statuses}


_MEANING = {
    400: "The request is wrong.",
    403: "The default version cannot go while others stand behind it.",
    404: "No such model, version or archive.",
    405: "The model API is off.",
    408: "The request took too long.",
    409: "That version is there already, or something else that is in force stands against it.",
    410: "It was cancelled and has no answer.",
    500: "A worker or the server failed.",
    503: "No worker can answer now, or the handler failed.",
}
_BODY = {"description": "Whatever the model's handler reads.", "content": _ANYTHING, "required": True}
_DESCRIBED = {"200": _answer("An OpenAPI document.", _OPENAPI), **_errors(500)}
_CHANGED = {
    "200": _answer("Done.", _STATUS),
    "202": _answer("Accepted; it happens in the background.", _STATUS),
    "206": _answer("Some of the workers are still on their way.", _STATUS),
}
_MODEL = _path("model_name", "The model.")
_VERSION = _path("model_version", "The version.")


# Operations

_OPTIONS = {"options": _operation("This document.", "apiDescription", [], _DESCRIBED)}
_API_DESCRIPTION = {
    "get": _operation("This document; OPTIONS / is the newer way.", "api-description", [], _DESCRIBED, deprecated=True)
}
_PING = _operation(
    "Whether every default version has its workers.",
    "ping",
    [],
    {"200": _answer("They are there, or have time left.", _STATUS), **_errors(500)},
)
_METRICS = {
    "get": _operation(
        "The metrics of the whole cluster, as Prometheus reads them.",
        "metrics",
        [_query("name[]", "Only metrics of these names.")],
        {
            "200": _answer(
                "The metrics.",
                _object(
                    ("# HELP", "# TYPE", "metric"),
                    **{"# HELP": _text("What a metric is.")},
                    **{"# TYPE": _text("Its type.")},
                    metric=_text("Its samples."),
                ),
                _PROMETHEUS,
            ),
            **_errors(500),
        },
    )
}


def _inference(about: str, name: str, *parameters: Json, model: Json | None = _MODEL) -> Json:
    answers = {"200": {"description": "Whatever the model's handler says.", "content": _ANYTHING}}
    named = [model, *parameters] if model is not None else [*parameters]
    return {"post": _operation(about, name, named, {**answers, **_errors(404, 500, 503)}, _BODY)}


def _status(about: str, name: str, *statuses: int) -> Json:
    schema = {"type": "object"}
    answers = {str(status): _answer("Yes." if status == 200 else "Not yet.", schema) for status in statuses}
    return {"get": _operation(about, name, [], answers)}


_PREDICTION = _path("prediction_id", "The id that the 202 gave.")
_PREDICTED = _object(
    ("id", "state", "model"),
    id=_text("Its name."),
    state=_text("How far it is.", enum=["queued", "running", "done", "failed", "cancelled"]),
    model=_text("The model that was asked."),
)
_PREDICT = "Ask a model's default version."
_EXPLAIN = "Have a model's default version explain its answer."

_ASK: Json = {
    "/": _OPTIONS,
    "/ping": {"get": _PING},
    # One id three times: what TorchServe's clients were generated from.
    "/v1/models/{model_name}:predict": _inference(_PREDICT, "predictions"),
    "/v2/models/{model_name}/infer": _inference(_PREDICT, "predictions"),
    "/predictions/{model_name}": _inference(_PREDICT, "predictions"),
    "/predictions/{model_name}/{model_version}": _inference(
        "Ask one version of a model.", "version_predictions", _VERSION
    ),
    "/api-description": _API_DESCRIPTION,
}
# What TorchServe does not describe.
_ALSO_ASK: Json = {
    "/explanations/{model_name}": _inference(_EXPLAIN, "explanations"),
    "/explanations/{model_name}/{model_version}": _inference(
        "Have one version of a model explain its answer.", "version_explanations", _VERSION
    ),
    "/v1/models/{model_name}:explain": _inference(_EXPLAIN, "v1_explanations"),
    "/v2/models/{model_name}/explain": _inference(_EXPLAIN, "v2_explanations"),
    "/invocations": _inference(
        "Ask a model's default version; all parameters of the query are inputs.",
        "invocations",
        _query("model_name", "The model; not needed beside a model_name in a form, or one model of start-up's."),
        model=None,
    ),
    "/wfpredict/{workflow_name}": _inference(
        "Ask a workflow.", "wfpredict", _path("workflow_name", "The workflow."), model=None
    ),
    "/models/{model_name}/invoke": _inference(
        "Ask a model's default version; the parameters of the query are inputs.", "invoke"
    ),
    "/{model_name}/predict": _inference(
        "Ask a model's default version; the parameters of the query are inputs.", "predict"
    ),
    "/{model_name}/{model_version}/predict": _inference(
        "Ask one version of a model; the parameters of the query are inputs.", "version_predict", _VERSION
    ),
    "/async/{prediction_id}": {
        "get": _operation(
            "How far a prediction is that was asked for with Prefer: respond-async.",
            "prediction",
            [_PREDICTION],
            {"200": _answer("Its document.", _PREDICTED), **_errors(404, 500)},
        ),
        "delete": _operation(
            "Stop such a prediction; forget it where it has ended.",
            "cancelPrediction",
            [_PREDICTION],
            {
                "200": _answer("It is stopped, or has just ended.", _PREDICTED),
                "204": {"description": "It is forgotten."},
                **_errors(404, 500),
            },
        ),
    },
    "/async/{prediction_id}/result": {
        "get": _operation(
            "What the model answered, with its own status and headers.",
            "predictionResult",
            [_PREDICTION],
            {
                "200": {"description": "Whatever the model's handler says.", "content": _ANYTHING},
                "202": _answer("It has not ended.", _PREDICTED),
                **_errors(404, 410, 500, 503),
            },
        ),
    },
    "/health/live": _status("Whether this server answers.", "live", 200),
    "/health/ready": _status("Whether everything that should be loaded has been.", "ready", 200, 503),
}

_SYNCHRONOUS = "Whether the answer waits for the workers."
_IGNORED = "Ignored, as TorchServe does."
_AUTOSCALING = [  # ours: what holds between two different numbers of workers
    _query("autoscaling_policy", 'What they follow: "requests" (the default) or "latency".'),
    _query("target_ongoing_requests", "Rows that a worker should have to do; two batches by default.", "number"),
    _query("target_p95_ms", "Of the policy latency: the milliseconds within which 95 % are answered.", "number"),
    _query("upscale_delay_s", "Seconds for which more must be wanted before there are more; 3.", "number"),
    _query("downscale_delay_s", "Seconds for which fewer must be wanted before there are fewer; 60.", "number"),
    _query("downscale_to_zero_delay_s", "The same of the last worker, where min_worker is 0; 300.", "number"),
    _query("look_back_period_s", "Seconds over which load and latency are looked at; 10.", "number"),
]

_LIST = _operation(
    "List the models by name.",
    "listModels",
    [
        _query("limit", "The most models on a page: 0 to 100.", "integer", 100),
        _query("next_page_token", "Where the page begins: the nextPageToken of the page before."),
    ],
    {"200": _answer("A page of models.", _MODELS), **_errors(500)},
)
_RUNTIME = _query("runtime", "What runs the handler; else the manifest says.")
_RUNTIME["schema"] = {"type": "string", "enum": ["python", "python3", "LSP"]}
_REGISTER = _operation(
    "Register an archive.",
    "registerModel",
    [
        _query("url", "A file of the model store, or where the archive is fetched from.", required=True),
        _query("model_name", "The model's name; else the manifest says."),
        _query("handler", "The handler; else the manifest says."),
        _query("task", "What a Hugging Face folder is asked; else its model-config.yaml or config.json says."),
        _RUNTIME,
        _query("batch_size", "The most requests in a batch.", "integer", 1),
        _query("max_batch_delay", "How long an incomplete batch waits, in milliseconds.", "integer", 100),
        _query("response_timeout", "How long a batch may take, in seconds.", "integer", 120),
        _query("startup_timeout", "How long a worker may take to start, in seconds.", "integer", 120),
        _query("initial_workers", "How many workers to start.", "integer", 0),
        _query("synchronous", _SYNCHRONOUS, "boolean", True),
        _query("s3_sse_kms", "Whether S3 keeps the archive encrypted with a key of KMS.", "boolean", False),
    ],
    {**_CHANGED, **_errors(400, 404, 409, 500)},
)


def _of_version(versioned: bool) -> Json:
    """The operations on a model's default version, or on one that the path names."""
    which = "one version of a model" if versioned else "a model's default version"
    prefix, named = ("version_", [_MODEL, _VERSION]) if versioned else ("", [_MODEL])
    every = '; with "all" for a version, every one of them' if versioned else ""
    return {
        "get": _operation(
            f"Describe {which}{every}.",
            f"{prefix}describeModel",
            named,
            {"200": _answer("What was asked for.", {"type": "array", "items": _DESCRIPTION}), **_errors(404, 500)},
        ),
        "put": _operation(
            f"Change how many workers {which} has.",
            f"{prefix}setAutoScale",
            [
                *named,
                _query("min_worker", "The fewest workers.", "integer", 1),
                _query("max_worker", "The most workers; as many as min_worker where it is not said.", "integer", 1),
                _query("number_gpu", _IGNORED, "integer", 0),
                _query("synchronous", _SYNCHRONOUS, "boolean", False),
                _query("timeout", _IGNORED, "integer", -1),
                *_AUTOSCALING,
            ],
            {**_CHANGED, **_errors(400, 404, 500)},
        ),
        "delete": _operation(
            f"Unregister {which}.",
            f"{prefix}unregisterModel",
            [
                *named,
                _query("synchronous", _IGNORED, "boolean", False),
                _query("timeout", _IGNORED, "integer", -1),
            ],
            {
                "200": _answer("It answers no more.", _STATUS),
                "202": _answer("Stored; some replicas have not heard of it yet.", _STATUS),
                **_errors(404, 408, 500),
            },
        ),
    }


_ONE_MODEL: Json = {
    "/models/{model_name}": _of_version(False),
    "/models/{model_name}/{model_version}": _of_version(True),
    "/models/{model_name}/{model_version}/set-default": {
        "put": _operation(
            "Make a version the one that answers calls which name none.",
            "setDefault",
            [_MODEL, _VERSION],
            {"200": _answer("It is.", _STATUS), **_errors(404, 500)},
        )
    },
}
_KEY = _object((), header=_text("A header's name."), cookie=_text("A cookie's name."), json=_text("A path: $.user.id"))
_SHARES = {"type": "object", "additionalProperties": {"type": "integer"}, "description": "Basis points by version."}
_POLICY = _object(
    (),
    policy=_text("How calls that name no version are dealt out.", enum=["default", "weighted", "sticky"]),
    versions=_SHARES,
    key=_KEY,
    salt=_text("Of the hash of the key; else the model's name."),
    header=_text("In which testers name a version or a label."),
    labels={"type": "object", "additionalProperties": {"type": "string"}, "description": "Versions by label."},
    shadow=_object(
        ("version",),
        version=_text("The version that gets copies."),
        percent=_typed("number", "Of the calls that name no version."),
        compare=_object(
            (),
            kind=_text("What it means that two answers agree.", enum=["auto", "allclose", "top_k", "label", "text"]),
            at=_text("Where in an answer that is JSON, as a path."),
            rtol=_typed("number", "Of allclose: relative to the live number."),
            atol=_typed("number", "The same, absolute."),
            k=_number("Of top_k: how many labels."),
            least=_typed("number", "The share of common labels, or the likeness of texts, that is enough."),
        ),
        keep=_number("How many of the worst disagreements are kept."),
        redact=_list("What is not kept, as JSON paths.", {"type": "string"}),
        timeout_s=_typed("number", "Seconds after which a copy is given up."),
    ),
)
_IN_FORCE = _object(
    ("by", "default", "versions"),
    by=_text("What deals the calls out.", enum=["policy", "experiment", "rollout"]),
    id=_text("Of the experiment or the rollout."),
    default=_text("The model's default version."),
    versions=_SHARES,
)
_TRAFFIC = _object(("policy", "in_force"), **_POLICY["properties"], in_force=_IN_FORCE)
_THING: Json = {"type": "object"}
_EXPERIMENT_ID = _path("experiment_id", "The experiment's id.")
_STORED = _answer("Stored; some replicas have not heard of it yet.", _STATUS)


def _said(
    about: str,
    name: str,
    answer: str,
    *refusals: int,
    named: Json | None = _MODEL,
    query: tuple[Json, ...] = (),
    body: Json | None = None,
    schema: Json = _THING,
    stored: bool = False,
) -> Json:
    """An operation on traffic: JSON in where there is a ``body``, and JSON out."""
    answers = {"200": _answer(answer, schema), **({"202": _STORED} if stored else {}), **_errors(*refusals, 500)}
    content = {"content": {"application/json": {"schema": body}}, "required": True} if body is not None else None
    return _operation(about, name, [*([named] if named is not None else []), *query], answers, content)


def _steer(verb: str) -> Json:
    return {
        "post": _said(
            f"{verb.capitalize()} a model's rollout.", f"{verb}Rollout", "The rollout.", 404, 409, stored=True
        )
    }


_OF_TRAFFIC: Json = {
    "/models/{model_name}/traffic": {
        "get": _said("A model's traffic policy, and what is in force.", "traffic", "Both.", 404, schema=_TRAFFIC),
        "put": _said(
            "Say which versions get a model's calls.",
            "setTraffic",
            "The policy; it is in force.",
            *(400, 404, 409),
            body=_POLICY,
            schema=_TRAFFIC,
            stored=True,
        ),
        "delete": _said(
            "Give a model's calls to its default version again.",
            "resetTraffic",
            "The policy; it is in force.",
            *(404, 409),
            schema=_TRAFFIC,
            stored=True,
        ),
    },
    "/models/{model_name}/shadow": {
        "get": _said("How a shadow's answers agree with the live ones.", "shadow", "The figures.", 404),
        "delete": _said("Forget what a shadow was compared on.", "forgetShadow", "Done.", 404, schema=_STATUS),
    },
    "/models/{model_name}/rollout": {
        "get": _said("A model's last rollout, with its decisions.", "rollout", "The rollout.", 404),
        "post": _said(
            "Let a version take over a model's calls step by step.",
            "beginRollout",
            "The rollout; it has begun.",
            *(400, 404, 409),
            body=_object(
                ("to",),
                to=_text("The version."),
                steps=_list("Its share in each step, in percent.", {"type": "number"}),
                bake_s=_typed("number", "Seconds that each step must hold."),
                guardrails=_THING,
                key=_KEY,
            ),
            stored=True,
        ),
    },
    **{f"/models/{{model_name}}/rollout/{verb}": _steer(verb) for verb in ("pause", "resume", "abort")},
    "/models/{model_name}/experiments": {
        "get": _said("A model's experiments.", "modelExperiments", "The newest first.", 404),
        "post": _said(
            "Begin an experiment.",
            "beginExperiment",
            "The experiment, with its id.",
            *(400, 404, 409),
            body=_object(
                ("name", "arms", "metrics", "baseline"),
                name=_text("By which people know it."),
                arms={
                    "type": "object",
                    "additionalProperties": _object(
                        ("version", "weight"), version=_text("A version."), weight=_number("Basis points.")
                    ),
                },
                metrics=_list("What is compared.", _THING),
                baseline=_text("The arm that the others are compared with."),
                key=_KEY,
                salt=_text("Of the hash of the key; else the experiment's id."),
            ),
            stored=True,
        ),
    },
}
_OF_EXPERIMENTS: Json = {
    "/experiments": {"get": _said("Every model's experiments.", "experiments", "The newest first.", named=None)},
    "/experiments/{experiment_id}": {
        "get": _said(
            "An experiment, and what is known by now.", "experiment", "Both.", 404, named=_EXPERIMENT_ID
        ),
        "delete": _said(
            "Stop an experiment.",
            "stopExperiment",
            "What is known.",
            *(404, 409),
            named=_EXPERIMENT_ID,
            query=(_query("forget", "Drop one that was stopped, with what was measured.", "boolean", False),),
            stored=True,
        ),
    },
    "/experiments/{experiment_id}/events": {
        "post": _said(
            "Say what became of calls; each counts once, however often it is posted.",
            "reward",
            "How many were counted.",
            *(400, 404),
            named=_EXPERIMENT_ID,
            body=_object(
                ("value",),
                value=_typed("number", "The reward."),
                request_id=_text("The X-Request-Id of an answer."),
                key=_text("Or the key that a caller showed."),
                metric=_text("Which reward; needed where there are several."),
                id=_text("Two events of one id are one."),
            ),
        )
    },
}
_WORKFLOW = _path("workflow_name", "The workflow.")
_STEP = _object(
    (),
    model=_text("The model that is asked: NAME or NAME:VERSION."),
    function=_text("Or the function of the workflow's own file."),
    inputs={"description": "A source (request, request.NAME, a step), or sources by name."},
    each={"description": "Sources that are lists: the step is asked for each item."},
    parallel=_number("How many items are asked for at once."),
    retries=_number("After the first attempt."),
    timeout_s=_typed("number", "Seconds for one attempt."),
)
_STEPS = {"type": "object", "additionalProperties": _STEP, "description": "By name."}
_A_WORKFLOW = _object(
    (),
    url=_text("Where the .war is, as the parameter."),
    workflow_name=_text("As the parameter."),
    name=_text("How calls name the workflow."),
    version=_text("Its version; 1.0 unless said."),
    steps=_STEPS,
    output={"description": "The step that answers, or several; else those for which no other waits."},
    timeout_s=_typed("number", "Seconds for a call."),
)
_WORKFLOW_DESCRIPTION = _object(
    ("workflowName", "workflowUrl", "steps"),
    workflowName=_text("Its name."),
    workflowUrl=_text("Of its archive; empty where a document said all."),
    minWorkers=_number("As TorchServe says it."),
    maxWorkers=_number("As TorchServe says it."),
    batchSize=_number("As TorchServe says it."),
    maxBatchDelay=_number("As TorchServe says it."),
    workflowDag=_text("Which steps follow each."),
    workflowVersion=_text("Its version."),
    defaultVersion=_flag("Whether calls get it that name none."),
    steps=_STEPS,
    output=_list("The steps that answer.", {"type": "string"}),
    ongoing=_number("Calls that it is answering."),
    functions=_object((), phase=_text("Of its functions."), workers=_number("That run.")),
    timeout_s=_typed("number", "Seconds for a call."),
)
_OF_WORKFLOWS: Json = {
    "/workflows": {
        "get": _operation(
            "List workflows.",
            "listWorkflows",
            [
                _query("limit", "How many at most.", "integer", 100),
                _query("next_page_token", "Where the page begins."),
            ],
            {
                "200": _answer(
                    "A page of them.",
                    _object(
                        ("workflows",),
                        nextPageToken=_text("Where the next page begins."),
                        workflows=_list(
                            "By name.",
                            _object((), workflowName=_text("Its name."), workflowUrl=_text("Of its archive.")),
                        ),
                    ),
                ),
                **_errors(500),
            },
        ),
        "post": _operation(
            "Register a workflow, from a .war or from a document.",
            "registerWorkflow",
            [
                _query("url", "A name in the workflow store, or a URL."),
                _query("workflow_name", "Its name; else the archive's."),
                _query("response_timeout", "Seconds for an answer of one of its models.", "integer", 120),
                _query("startup_timeout", "Seconds for their start.", "integer", 120),
                _query("s3_sse_kms", "Whether an https URL of S3's is signed.", "boolean", False),
            ],
            {"200": _answer("It answers.", _STATUS), **_errors(400, 404, 409, 500)},
            {
                "content": {kind: {"schema": _A_WORKFLOW} for kind in ("application/json", "application/yaml")},
                "required": False,
            },
        ),
    },
    "/workflows/{workflow_name}": {
        "get": _operation(
            "Describe a workflow.",
            "describeWorkflow",
            [_WORKFLOW],
            {
                "200": _answer("Its versions.", _list("The default one first.", _WORKFLOW_DESCRIPTION)),
                **_errors(404, 500),
            },
        ),
        "delete": _operation(
            "Unregister a workflow, with the models that came with it.",
            "unregisterWorkflow",
            [_WORKFLOW],
            {"200": _answer("Done.", _STATUS), "202": _STORED, **_errors(404, 409, 500)},
        ),
    },
    "/workflows/{workflow_name}/{workflow_version}": {
        "delete": _operation(
            "Unregister one version of a workflow.",
            "unregisterWorkflowVersion",
            [_WORKFLOW, _path("workflow_version", "The version.")],
            {"200": _answer("Done.", _STATUS), "202": _STORED, **_errors(403, 404, 409, 500)},
        )
    },
}
_READY = _object(("name", "ready"), name=_text("The model's name."), ready=_flag("Whether it can answer."))

_MANAGE: Json = {
    "/": _OPTIONS,
    "/models": {"get": _LIST, "post": _REGISTER},
    **_ONE_MODEL,
    "/api-description": _API_DESCRIPTION,
}
# What TorchServe does not describe.
_ALSO_MANAGE: Json = {
    **_OF_TRAFFIC,
    **_OF_EXPERIMENTS,
    **_OF_WORKFLOWS,
    "/v1/models/{model_name}": {
        "get": _operation(
            "Whether a model's default version is ready.",
            "modelReady",
            [_MODEL],
            {"200": _answer("Whether it is.", _READY), **_errors(404, 500)},
        )
    },
    "/models/{model_name}/events": {
        "get": _operation(
            "How the model comes up, as it happens.",
            "modelEvents",
            [
                _MODEL,
                _query("since", "Only events after this one.", "integer"),
                _query("follow", "Whether the stream goes on when the model is ready, or has failed.", "boolean"),
                _query("registration", "Only the registration that named itself so."),
            ],
            {"200": _answer("A stream of events.", {"type": "string"}, "text/event-stream"), **_errors(404, 500)},
        )
    },
    "/token": {
        "get": _operation(
            "Put a new key into the key file.",
            "token",
            [_query("type", "management or inference.", required=True)],
            {"200": _answer("A line end; the key is in the file.", {"type": "string"}), **_errors(400, 404)},
        )
    },
}


# Documents

_PAGE: Json = {"/metrics": _METRICS}
INFERENCE = _document("Torchrelay APIs", {**_ASK, **_PAGE, **_ALSO_ASK}, _ABOUT)
MANAGEMENT = _document("Torchrelay APIs", {**_MANAGE, **_PAGE, **_ALSO_MANAGE}, _ABOUT)
METRICS = _document("Torchrelay APIs", _PAGE, _ABOUT)
# Of a port that has both APIs.
BOTH = _document("Torchrelay APIs", {**_ASK, **_MANAGE, **_PAGE, **_ALSO_ASK, **_ALSO_MANAGE}, _ABOUT)


def of_model(model: str) -> Json:
    """What a model says of itself on the inference port.

    Its first path is written as TorchServe writes it, which nobody serves; the last ones are the model's own.
    """
    template = {"name": "model_name", "in": "path", "required": True, "schema": {"type": "string", "enum": [model]}}

    def ask(name: str, *parameters: Json) -> Json:
        answers = {"200": {"description": "Whatever its handler says."}, **_errors(500)}
        return {"post": _operation(f"Ask model {model}.", name, [*parameters], answers)}

    return _document(
        f"RESTful API for: {model}",
        {
            f"/prediction/{model}": ask(model),
            "/v1/models/{model_name}:predict": ask(model, template),
            "/v2/models/{model_name}/infer": ask(model, template),
            f"/predictions/{model}": _inference(_PREDICT, "predictions", model=None),
            f"/predictions/{model}/{{model_version}}": _inference(
                "Ask one version of this model.", "version_predictions", _VERSION, model=None
            ),
            f"/explanations/{model}": _inference(_EXPLAIN, "explanations", model=None),
            f"/explanations/{model}/{{model_version}}": _inference(
                "Have one version of this model explain its answer.", "version_explanations", _VERSION, model=None
            ),
        },
    )


def management_of(model: str) -> Json:
    """What a model says of itself on the management port."""
    return _document(f"RESTful Management API for: {model}", {**_ONE_MODEL, **_OF_TRAFFIC})
