"""Who gets a model's calls: policies, shadows, rollouts, experiments."""

from __future__ import annotations

from serve_app.doors.openapi.torchserve import DIALECT, SCHEMAS, STATUS
from serve_app.doors.openapi.words import (
    MODEL,
    Json,
    Part,
    answer,
    anything,
    array,
    body,
    document,
    flag,
    in_path,
    in_query,
    integer,
    mapping,
    nullable,
    number,
    operation,
    schema,
    text,
)
from serve_app.experiment import AT_ONCE
from serve_app.policy import WHOLE
from serve_app.rollout import MOST_STEPS

_SHARES = mapping(integer(minimum=0, maximum=WHOLE), "Basis points by version; all together 10,000.")
_WHEN = number("Seconds since the epoch.")
_LATE = text("Where some replicas have not heard of it yet.")
_POLICY = {
    "policy": text("How calls that name no version are dealt out.", enum=["default", "weighted", "sticky"]),
    "versions": _SHARES,
    "key": schema("Key"),
    "salt": text("Of the hash of the key; else the model's name."),
    "header": text("In which testers name a version or a label."),
    "labels": mapping(text(), "Versions by label."),
    "shadow": schema("Shadow"),
}
_REWARD = document(
    ("value",),
    closed=True,
    value=number("The reward."),
    request_id=text("The x-request-id of an answer."),
    key=text("Or what a caller showed."),
    metric=text("Which reward; needed where there are several."),
    id=text("Two events of one id are one."),
)
_ARM = document(("version", "weight"), closed=True, version=text(), weight=integer("Basis points.", minimum=1))
_SCHEMAS = {
    **SCHEMAS,
    "Key": document(
        (), "Where a call says whose it is; one of these.", header=text(), cookie=text(), json=text("A path: $.user.id")
    ),
    "Shadow": document(
        ("version",),
        closed=True,
        version=text("The version that gets copies."),
        percent=number("Of the calls that name no version.", minimum=0.01, maximum=100),
        compare=document(
            closed=True,
            kind=text("When two answers agree.", enum=["auto", "allclose", "top_k", "label", "text"]),
            at=text("Where in an answer that is JSON, as a path."),
            rtol=number("Of allclose, of the live number.", minimum=0),
            atol=number("The same, absolute.", minimum=0),
            k=integer("Of top_k.", minimum=1, maximum=1000),
            least=number("The share, or likeness, that is enough.", exclusiveMinimum=0, maximum=1),
        ),
        keep=integer("How many of the worst disagreements are kept.", minimum=0, maximum=1000),
        redact=array(text(), "JSON paths of what is not kept."),
        timeout_s=number("Seconds after which a copy is given up.", exclusiveMinimum=0),
    ),
    "Policy": document((), "A traffic policy.", closed=True, in_force=anything("Passed over."), **_POLICY),
    "Traffic": document(
        ("policy", "in_force"),
        **_POLICY,
        in_force=document(
            ("by", "default", "versions"),
            by=text(enum=["policy", "experiment", "rollout"]),
            id=text("Of the experiment or the rollout."),
            default=text("The model's default version."),
            versions=_SHARES,
        ),
    ),
    "ShadowFigures": document((), "How the answers of a model's shadow agree with the live ones."),
    "Plan": document(
        ("to",),
        closed=True,
        to=text("The version that takes over."),
        steps=array(
            number(exclusiveMinimum=0, maximum=100),
            "Percent of the calls; they grow, and end at 100.",
            maxItems=MOST_STEPS,
        ),
        bake_s=number("Seconds for which each step holds at least.", minimum=0),
        min_calls=integer("Calls of the new version that each step waits for.", minimum=0),
        guardrails=document(
            (),
            "How much worse its calls may be; null passes one over.",
            closed=True,
            error_rate=nullable(number()),
            p99=nullable(number()),
            non_finite=nullable(number()),
            empty=nullable(number()),
            out_of_memory=nullable(integer()),
        ),
        keep_warm_s=nullable(number("Seconds for which the other keeps its workers; null: for good.", minimum=0)),
        key=schema("Key"),
        salt=text(),
    ),
    "Rollout": document(
        ("model", "id", "baseline", "to", "state", "percent", "plan", "figures", "guardrails", "decisions"),
        model=text(),
        id=text(),
        baseline=text("The version that had the calls."),
        to=text("The one that takes over."),
        state=text(enum=["starting", "running", "paused", "promoted", "rolled_back", "aborted"]),
        percent=number("Of the calls that the new one gets.", minimum=0, maximum=100),
        step=integer(),
        began=_WHEN,
        since=_WHEN,
        ended=nullable(_WHEN),
        next=nullable(text("What the next step waits for.")),
        plan=document(),
        figures=mapping(document(), "Of both versions in this step."),
        guardrails=array(document(), "What each of them shows."),
        keeps_warm=flag(),
        decisions=array(document(("time", "verdict", "percent", "why"), verdict=text(), why=text())),
        status=_LATE,
    ),
    "NewExperiment": document(
        ("name", "arms", "metrics", "baseline"),
        closed=True,
        name=text("By which people know it.", minLength=1, maxLength=200),
        arms=mapping(_ARM, "Two or more; their weights sum to 10,000."),
        metrics=array(
            document(
                ("name",),
                closed=True,
                name=text(minLength=1, maxLength=200),
                kind=text(enum=["latency", "error_rate", "output", "reward"]),
                goal=text(enum=["increase", "decrease"]),
                path=text("Of output: where the number stands."),
                per=text(enum=["exposure", "event"]),
            ),
            "What is compared.",
            minItems=1,
        ),
        baseline=text("The arm that the others are compared with."),
        key=schema("Key"),
        salt=text("Of the key's hash; else the experiment's id."),
    ),
    "Experiment": document(
        ("id", "name", "model", "state", "arms", "baseline"),
        id=text(),
        name=text(),
        model=text(),
        state=text(enum=["running", "stopped"]),
        began=_WHEN,
        ended=nullable(_WHEN),
        key={"anyOf": [schema("Key"), {"type": "null"}]},
        arms=mapping(document()),
        baseline=text(),
        sentence=text("What is known over all, in words."),
        metrics=mapping(document(), "What is known of each metric."),
        sample_ratio=document(),
        status=_LATE,
    ),
    "Reward": _REWARD,
}
_STORED = {"202": answer("Stored; some replicas have not heard of it yet.", STATUS)}
_ID = in_path("experiment_id", "The experiment's id.", text(pattern="^[0-9a-f]+$"))


def _said(of: Json, *refusals: int, stored: bool = False) -> Json:
    return {"200": answer("So it is.", of), **(_STORED if stored else {}), **DIALECT.refusals(400, *refusals, 500)}


def _steer(verb: str, about: str) -> Json:
    said = _said(schema("Rollout"), 404, 409, stored=True)
    return {"post": operation(f"{verb}_rollout", about, said, MODEL)}


_DESCRIBED = {"200": answer("An OpenAPI document.", schema("OpenAPI")), **DIALECT.refusals(400, 404, 500)}

_PATHS: Json = {
    "/models/{model_name}/traffic": {
        "get": operation("traffic", "A model's policy, and what is in force.", _said(schema("Traffic"), 404), MODEL),
        "put": operation(
            "set_traffic",
            "Say which versions get a model's calls.",
            _said(schema("Traffic"), 404, 409, 413, stored=True),
            MODEL,
            body=body(schema("Policy")),
        ),
        "delete": operation(
            "reset_traffic",
            "Give a model's calls to its default version again.",
            _said(schema("Traffic"), 404, 409, stored=True),
            MODEL,
        ),
        "options": operation("traffic_api", "What this model says of itself.", _DESCRIBED, MODEL),
    },
    "/models/{model_name}/shadow": {
        "get": operation("shadow", "How a shadow's answers agree.", _said(schema("ShadowFigures"), 404), MODEL),
        "delete": operation("forget_shadow", "Forget what it was compared on.", _said(STATUS, 404), MODEL),
        "options": operation("shadow_api", "What this model says of itself.", _DESCRIBED, MODEL),
    },
    "/models/{model_name}/rollout": {
        "get": operation("rollout", "A model's last rollout.", _said(schema("Rollout"), 404), MODEL),
        "post": operation(
            "begin_rollout",
            "Let a version take over a model's calls step by step.",
            _said(schema("Rollout"), 404, 409, 413, stored=True),
            MODEL,
            body=body(schema("Plan")),
        ),
    },
    "/models/{model_name}/rollout/pause": _steer("pause", "Hold a rollout at its share."),
    "/models/{model_name}/rollout/resume": _steer("resume", "Let it go on."),
    "/models/{model_name}/rollout/abort": _steer("abort", "End it: the other version has all calls again."),
    "/models/{model_name}/experiments": {
        "get": operation(
            "model_experiments",
            "A model's experiments, the newest first, without their figures.",
            _said(document(("experiments",), experiments=array(schema("Experiment"))), 404),
            MODEL,
        ),
        "post": operation(
            "begin_experiment",
            "Deal a model's calls out to the arms of an experiment.",
            _said(schema("Experiment"), 404, 409, 413, stored=True),
            MODEL,
            body=body(schema("NewExperiment")),
        ),
    },
    "/experiments": {
        "get": operation(
            "experiments",
            "Every model's experiments.",
            _said(document(("experiments",), experiments=array(schema("Experiment")))),
        )
    },
    "/experiments/{experiment_id}": {
        "get": operation("experiment", "What is known by now.", _said(schema("Experiment"), 404), _ID),
        "delete": operation(
            "stop_experiment",
            "Stop an experiment, or drop one that was stopped.",
            _said({"anyOf": [schema("Experiment"), STATUS]}, 404, 409, stored=True),
            _ID,
            in_query("forget", "true: drop it, with what was measured.", text(enum=["true", "false"])),
        ),
    },
}
_EVENTS: Json = {
    "/experiments/{experiment_id}/events": {
        "post": operation(
            "reward",
            "Say what became of calls; each counts once, however often it is posted.",
            _said(document(("counted", "repeated"), counted=integer(minimum=0), repeated=integer(minimum=0)), 404, 413),
            _ID,
            body=body(
                {
                    "anyOf": [
                        schema("Reward"),
                        array(schema("Reward"), minItems=1, maxItems=AT_ONCE),
                        document(
                            ("events",),
                            closed=True,
                            events=array(schema("Reward"), minItems=1, maxItems=AT_ONCE),
                        ),
                    ]
                }
            ),
        )
    }
}
TRAFFIC = Part("Traffic", "Policies, shadows, rollouts and experiments.", {**_PATHS, **_EVENTS}, _SCHEMAS)
REWARDS = Part("Rewards", "What became of calls, told where calls are made.", _EVENTS, _SCHEMAS)
