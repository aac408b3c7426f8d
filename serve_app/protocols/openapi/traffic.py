"""Traffic: policies, shadows, rollouts and experiments."""

from __future__ import annotations

from serve_app.domain.experiment import MAX_EVENTS_PER_REQUEST
from serve_app.domain.rollout import MAX_STEPS
from serve_app.domain.traffic_policy import BUCKET_COUNT
from serve_app.protocols.openapi.builders import (
    MODEL,
    DocumentPart,
    Json,
    any_value,
    array,
    boolean,
    integer,
    mapping,
    nullable,
    number,
    object_schema,
    operation,
    path_parameter,
    query_parameter,
    request_body,
    response,
    schema_ref,
    string,
)
from serve_app.protocols.openapi.torchserve import ERRORS, SCHEMAS, STATUS

_SHARES = mapping(integer(minimum=0, maximum=BUCKET_COUNT), "Basis points by version; their sum is 10,000.")
_TIMESTAMP = number("Seconds since the epoch.")
_PENDING_STATUS = string("Present while some replicas have not applied the change.")
_POLICY: Json = {
    "policy": string("How requests without a version are split.", enum=["default", "weighted", "sticky"]),
    "versions": _SHARES,
    "key": schema_ref("Key"),
    "salt": string("The salt of the key's hash; default: the model's name."),
    "header": string("The request header in which testers name a version or a label."),
    "labels": mapping(string(), "Versions by label."),
    "shadow": schema_ref("Shadow"),
}
_REWARD = object_schema(
    ("value",),
    closed=True,
    value=number("The reward."),
    request_id=string("The x-request-id of a response."),
    key=string("The sticky key of a caller, instead of request_id."),
    metric=string("The reward metric; required if there are several."),
    id=string("An idempotency key: events with the same id count once."),
)
_ARM = object_schema(
    ("version", "weight"), closed=True, version=string(), weight=integer("Basis points.", minimum=1)
)
_SCHEMAS = {
    **SCHEMAS,
    "Key": object_schema(
        (),
        "The sticky key of a request: one of these fields.",
        header=string(),
        cookie=string(),
        json=string("A JSON path: $.user.id"),
    ),
    "Shadow": object_schema(
        ("version",),
        closed=True,
        version=string("The version that receives copies."),
        percent=number("The percentage of requests without a version.", minimum=0.01, maximum=100),
        compare=object_schema(
            closed=True,
            kind=string(
                "The comparison of two responses.", enum=["auto", "allclose", "top_k", "label", "text"]
            ),
            at=string("The JSON path of the compared value."),
            rtol=number("The relative tolerance of allclose.", minimum=0),
            atol=number("The absolute tolerance of allclose.", minimum=0),
            k=integer("The k of top_k.", minimum=1, maximum=1000),
            least=number("The minimum share or similarity for a match.", exclusiveMinimum=0, maximum=1),
        ),
        keep=integer("The number of worst mismatches that are stored.", minimum=0, maximum=1000),
        redact=array(string(), "JSON paths of values that are not stored."),
        timeout_s=number("The timeout of a copy in seconds.", exclusiveMinimum=0),
    ),
    "Policy": object_schema((), "A traffic policy.", closed=True, active=any_value("Ignored."), **_POLICY),
    "Traffic": object_schema(
        ("policy", "active"),
        **_POLICY,
        active=object_schema(
            ("by", "default", "versions"),
            by=string(enum=["policy", "experiment", "rollout"]),
            id=string("The id of the experiment or the rollout."),
            default=string("The model's default version."),
            versions=_SHARES,
        ),
    ),
    "ShadowStats": object_schema((), "How the responses of a model's shadow match the live ones."),
    "Plan": object_schema(
        ("to",),
        closed=True,
        to=string("The new version."),
        steps=array(
            number(exclusiveMinimum=0, maximum=100),
            "Percent of the requests: increasing, the last is 100.",
            maxItems=MAX_STEPS,
        ),
        bake_s=number("The minimum duration of a step in seconds.", minimum=0),
        min_calls=integer("The minimum number of requests to the new version in each step.", minimum=0),
        guardrails=object_schema(
            (),
            "The tolerated degradation; null disables a guardrail.",
            closed=True,
            error_rate=nullable(number()),
            p99=nullable(number()),
            non_finite=nullable(number()),
            empty=nullable(number()),
            out_of_memory=nullable(integer()),
        ),
        keep_warm_s=nullable(
            number("The seconds for which the old version keeps its workers; null: forever.", minimum=0)
        ),
        key=schema_ref("Key"),
        salt=string(),
    ),
    "Rollout": object_schema(
        ("model", "id", "baseline", "to", "state", "percent", "plan", "figures", "guardrails", "decisions"),
        model=string(),
        id=string(),
        baseline=string("The old version."),
        to=string("The new version."),
        state=string(enum=["starting", "running", "paused", "promoted", "rolled_back", "aborted"]),
        percent=number("The percentage of requests to the new version.", minimum=0, maximum=100),
        step=integer(),
        started_at=_TIMESTAMP,
        since=_TIMESTAMP,
        ended=nullable(_TIMESTAMP),
        next=nullable(string("The condition of the next step.")),
        plan=object_schema(),
        figures=mapping(object_schema(), "The statistics of both versions in this step."),
        guardrails=array(object_schema(), "The state of each guardrail."),
        keeps_warm=boolean(),
        decisions=array(
            object_schema(("time", "verdict", "percent", "reason"), verdict=string(), reason=string())
        ),
        status=_PENDING_STATUS,
    ),
    "NewExperiment": object_schema(
        ("name", "arms", "metrics", "baseline"),
        closed=True,
        name=string("The display name.", minLength=1, maxLength=200),
        arms=mapping(_ARM, "Two or more; their weights sum to 10,000."),
        metrics=array(
            object_schema(
                ("name",),
                closed=True,
                name=string(minLength=1, maxLength=200),
                kind=string(enum=["latency", "error_rate", "output", "reward"]),
                goal=string(enum=["increase", "decrease"]),
                path=string("Kind output: the JSON path of the number."),
                per=string(enum=["exposure", "event"]),
            ),
            "The compared metrics.",
            minItems=1,
        ),
        baseline=string("The arm that the others are compared with."),
        key=schema_ref("Key"),
        salt=string("The salt of the key's hash; default: the experiment's id."),
    ),
    "Experiment": object_schema(
        ("id", "name", "model", "state", "arms", "baseline"),
        id=string(),
        name=string(),
        model=string(),
        state=string(enum=["running", "stopped"]),
        started_at=_TIMESTAMP,
        ended=nullable(_TIMESTAMP),
        key={"anyOf": [schema_ref("Key"), {"type": "null"}]},
        arms=mapping(object_schema()),
        baseline=string(),
        sentence=string("A summary of the result."),
        metrics=mapping(object_schema(), "The result of each metric."),
        sample_ratio=object_schema(),
        status=_PENDING_STATUS,
    ),
    "Reward": _REWARD,
}
_ACCEPTED = {"202": response("Stored; some replicas have not applied it yet.", STATUS)}
_ID = path_parameter("experiment_id", "The experiment's id.", string(pattern="^[0-9a-f]+$"))


def _responses(schema: Json, *error_statuses: int, stored: bool = False) -> Json:
    return {
        "200": response("The document.", schema),
        **(_ACCEPTED if stored else {}),
        **ERRORS.responses_for(400, *error_statuses, 500),
    }


def _rollout_operation(verb: str, summary: str) -> Json:
    responses = _responses(schema_ref("Rollout"), 404, 409, stored=True)
    return {"post": operation(f"{verb}_rollout", summary, responses, MODEL)}


_DOCUMENT_RESPONSE = {
    "200": response("An OpenAPI document.", schema_ref("OpenAPI")),
    **ERRORS.responses_for(400, 404, 500),
}

_PATHS: Json = {
    "/models/{model_name}/traffic": {
        "get": operation(
            "traffic",
            "Get a model's policy and the active split.",
            _responses(schema_ref("Traffic"), 404),
            MODEL,
        ),
        "put": operation(
            "set_traffic",
            "Set the traffic policy of a model.",
            _responses(schema_ref("Traffic"), 404, 409, 413, stored=True),
            MODEL,
            body=request_body(schema_ref("Policy")),
        ),
        "delete": operation(
            "reset_traffic",
            "Reset to the default version.",
            _responses(schema_ref("Traffic"), 404, 409, stored=True),
            MODEL,
        ),
        "options": operation("traffic_api", "Describe the model's API.", _DOCUMENT_RESPONSE, MODEL),
    },
    "/models/{model_name}/shadow": {
        "get": operation(
            "shadow", "Get the statistics of a shadow.", _responses(schema_ref("ShadowStats"), 404), MODEL
        ),
        "delete": operation(
            "reset_shadow", "Delete the statistics of a shadow.", _responses(STATUS, 404), MODEL
        ),
        "options": operation("shadow_api", "Describe the model's API.", _DOCUMENT_RESPONSE, MODEL),
    },
    "/models/{model_name}/rollout": {
        "get": operation(
            "rollout", "Get a model's last rollout.", _responses(schema_ref("Rollout"), 404), MODEL
        ),
        "post": operation(
            "start_rollout",
            "Start a rollout, which moves requests to a new version in steps.",
            _responses(schema_ref("Rollout"), 404, 409, 413, stored=True),
            MODEL,
            body=request_body(schema_ref("Plan")),
        ),
    },
    "/models/{model_name}/rollout/pause": _rollout_operation(
        "pause", "Pause a rollout at its current share."
    ),
    "/models/{model_name}/rollout/resume": _rollout_operation("resume", "Resume a rollout."),
    "/models/{model_name}/rollout/abort": _rollout_operation(
        "abort", "Abort a rollout: the old version receives all requests again."
    ),
    "/models/{model_name}/experiments": {
        "get": operation(
            "model_experiments",
            "List a model's experiments, newest first, without results.",
            _responses(object_schema(("experiments",), experiments=array(schema_ref("Experiment"))), 404),
            MODEL,
        ),
        "post": operation(
            "start_experiment",
            "Start an experiment, which splits requests among its arms.",
            _responses(schema_ref("Experiment"), 404, 409, 413, stored=True),
            MODEL,
            body=request_body(schema_ref("NewExperiment")),
        ),
    },
    "/experiments": {
        "get": operation(
            "experiments",
            "List the experiments of all models.",
            _responses(object_schema(("experiments",), experiments=array(schema_ref("Experiment")))),
        )
    },
    "/experiments/{experiment_id}": {
        "get": operation(
            "experiment",
            "Get the current results of an experiment.",
            _responses(schema_ref("Experiment"), 404),
            _ID,
        ),
        "delete": operation(
            "stop_experiment",
            "Stop an experiment, or delete a stopped one.",
            _responses({"anyOf": [schema_ref("Experiment"), STATUS]}, 404, 409, stored=True),
            _ID,
            query_parameter(
                "purge", "true: delete it with its measurements.", string(enum=["true", "false"])
            ),
        ),
    },
}
_EVENTS: Json = {
    "/experiments/{experiment_id}/events": {
        "post": operation(
            "reward",
            "Record rewards; each counts once, however often it is posted.",
            _responses(
                object_schema(
                    ("counted", "repeated"), counted=integer(minimum=0), repeated=integer(minimum=0)
                ),
                404,
                413,
            ),
            _ID,
            body=request_body(
                {
                    "anyOf": [
                        schema_ref("Reward"),
                        array(schema_ref("Reward"), minItems=1, maxItems=MAX_EVENTS_PER_REQUEST),
                        object_schema(
                            ("events",),
                            closed=True,
                            events=array(schema_ref("Reward"), minItems=1, maxItems=MAX_EVENTS_PER_REQUEST),
                        ),
                    ]
                }
            ),
        )
    }
}
TRAFFIC = DocumentPart(
    "Traffic", "Policies, shadows, rollouts and experiments.", {**_PATHS, **_EVENTS}, _SCHEMAS
)
REWARDS = DocumentPart("Rewards", "Rewards of requests, recorded on the inference port.", _EVENTS, _SCHEMAS)
