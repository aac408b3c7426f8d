"""The Open Inference Protocol, version 2, with its extensions."""

from __future__ import annotations

from serve_app.doors.openapi.words import (
    CALL,
    MODEL,
    VERSION,
    Dialect,
    Json,
    Part,
    answer,
    anything,
    array,
    body,
    document,
    flag,
    in_header,
    integer,
    mapping,
    operation,
    schema,
    text,
)
from serve_app.signature import DATATYPES

DIALECT = Dialect("OIPError")
_PARAMETERS = mapping({"type": ["string", "number", "boolean"]}, "Of this request, input or output.")
_SHAPE = array(integer(minimum=0), maxItems=32)
_DATATYPE = text(enum=list(DATATYPES))
_PORT = document(
    ("name", "datatype", "shape"),
    name=text(),
    datatype=_DATATYPE,
    shape=array(integer("-1: any length.", minimum=-1)),
)
_DATA = anything("Its elements, flat or nested as its shape is; or else they stand behind the JSON as bytes.")
_COUNT = document(("count", "ns"), count=integer(minimum=0), ns=integer(minimum=0))
_SCHEMAS = {
    "OIPError": document(("error",), error=text("What went wrong.")),
    "InferRequest": document(
        ("inputs",),
        id=text(),
        parameters=_PARAMETERS,
        inputs=array(
            document(
                ("name", "datatype", "shape"),
                name=text(minLength=1),
                datatype=_DATATYPE,
                shape=_SHAPE,
                parameters=_PARAMETERS,
                data=_DATA,
            ),
            maxItems=1000,
        ),
        outputs=array(
            document(("name",), name=text(minLength=1), parameters=_PARAMETERS), "Which; else all.", maxItems=1000
        ),
    ),
    "InferResponse": document(
        ("model_name", "model_version", "outputs"),
        model_name=text(),
        model_version=text(),
        id=text(),
        outputs=array(
            document(
                ("name", "datatype", "shape"),
                name=text(),
                datatype=_DATATYPE,
                shape=_SHAPE,
                parameters=_PARAMETERS,
                data=_DATA,
            )
        ),
    ),
    "ModelMetadata": document(
        ("name", "versions", "platform", "inputs", "outputs"),
        name=text(),
        versions=array(text()),
        platform=text(),
        inputs=array(_PORT),
        outputs=array(_PORT),
    ),
    "ModelConfig": document(("name", "platform", "max_batch_size", "input", "output"), name=text(), platform=text()),
    "Statistics": document(
        ("model_stats",),
        model_stats=array(
            document(
                ("name", "version", "inference_count", "execution_count", "inference_stats"),
                name=text(),
                version=text(),
                inference_count=integer(minimum=0),
                execution_count=integer(minimum=0),
                inference_stats=mapping(_COUNT),
                last_inference=integer("Milliseconds since the epoch; 0 where nothing ran.", minimum=0),
                batch_stats=array(document(("batch_size", "compute_infer"), batch_size=integer(minimum=1))),
            )
        ),
    ),
    "Generate": document(
        ("text_input",),
        text_input=text("To go on from."),
        id=text(),
        parameters=document((), "max_tokens, temperature, top_p, top_k, seed, stop, details"),
    ),
    "Generated": document(
        ("text_output", "model_name", "model_version"),
        text_output=text(),
        model_name=text(),
        model_version=text(),
        id=text(),
        details=document(finish_reason=text()),
    ),
}
_CALLED = DIALECT.refusals(400, 401, 403, 404, 410, 413, 422, 429, 500, 501, 503, 504, 507)
_HANDLERS = answer("The handler's own status.", schema("OIPError"))
_LENGTH = in_header(
    "inference-header-content-length",
    "The bytes of the JSON, where tensors stand behind it; 0: the body is the model's one input.",
    integer(minimum=0),
)
_READY = document(("ready",), name=text(), ready=flag())
_TOLD = DIALECT.refusals(400, 401, 403, 404, 500, 503)


def _infer(name: str, *named: Json) -> Json:
    binary = {"application/octet-stream": {"schema": {}}}
    result = answer("The outputs.", schema("InferResponse"), called=True)
    given = body(schema("InferRequest"))
    kept = {"202": answer("Put aside, because the header Prefer said respond-async.", schema("Deferral"))}
    return {
        "post": operation(
            name,
            "Infer, from tensors to tensors.",
            {"200": {**result, "content": {**result["content"], **binary}}, **kept, **_CALLED, "default": _HANDLERS},
            *named,
            *CALL,
            _LENGTH,
            body={**given, "content": {**given["content"], **binary}},
        )
    }


def _generate(name: str, about: str, answered: Json, *named: Json) -> Json:
    answers = {"200": answered, **_CALLED, "424": DIALECT.refusals(424)["424"], "default": _HANDLERS}
    return {"post": operation(name, about, answers, *named, *CALL, body=body(schema("Generate")))}


def _tell(name: str, about: str, of: Json, *named: Json, also: Json | None = None) -> Json:
    return {"get": operation(name, about, {"200": answer("So it is.", of), **_TOLD, **(also or {})}, *named)}


def _of_model(where: str, suffix: str, *named: Json) -> Json:
    events = answer("Server-sent events, each a Generated.", {}, "text/event-stream", called=True)
    return {
        where: _tell(f"metadata{suffix}", "A model's versions, inputs and outputs.", schema("ModelMetadata"), *named),
        f"{where}/ready": _tell(
            f"model_ready{suffix}",
            "Whether it answers.",
            _READY,
            *named,
            also={"503": answer("It does not.", _READY)},
        ),
        f"{where}/config": _tell(f"config{suffix}", "What Triton's clients read.", schema("ModelConfig"), *named),
        f"{where}/stats": _tell(
            f"statistics{suffix}", "What was counted of it.", schema("Statistics"), *named, also=DIALECT.refusals(501)
        ),
        f"{where}/infer": _infer(f"infer{suffix}", *named),
        f"{where}/generate": _generate(
            f"generate{suffix}",
            "Go on with a text.",
            answer("The text.", schema("Generated"), called=True),
            *named,
        ),
        f"{where}/generate_stream": _generate(
            f"generate_stream{suffix}",
            "Go on with a text, piece by piece.",
            {**events, "content": {**events["content"], "application/json": {"schema": schema("Generated")}}},
            *named,
        ),
    }


_ENTRY = document(
    ("name", "version", "state", "reason"),
    name=text(),
    version=text(),
    state=text(enum=["READY", "LOADING", "UNAVAILABLE"]),
    reason=text(),
)
_CHANGED = {
    "200": answer("Done; the body is empty."),
    **DIALECT.refusals(400, 401, 403, 404, 405, 409, 413, 500, 501, 503, 507),
}
_LOAD = document(
    parameters=document(closed=True, url=text("Another archive."), workers=integer(minimum=1, maximum=1000))
)

OIP = Part(
    "Open Inference Protocol",
    "Version 2, with binary tensors, model repository, statistics, model configuration and generated text.",
    {
        "/v2": _tell(
            "server",
            "What this server is.",
            document(("name", "version", "extensions"), name=text(), version=text(), extensions=array(text())),
        ),
        "/v2/health/live": _tell("v2_live", "Whether it answers.", document(("live",), live=flag())),
        "/v2/health/ready": _tell(
            "v2_ready", "Whether it is ready.", _READY, also={"503": answer("It is not.", _READY)}
        ),
        "/v2/models/stats": _tell(
            "all_statistics", "What was counted of all models.", schema("Statistics"), also=DIALECT.refusals(501)
        ),
        **_of_model("/v2/models/{model_name}", "", MODEL),
        **_of_model("/v2/models/{model_name}/versions/{model_version}", "_version", MODEL, VERSION),
        "/v2/repository/index": {
            "post": operation(
                "repository_index",
                "Every version of every model, and its state.",
                {
                    "200": answer("Them.", array(_ENTRY)),
                    **DIALECT.refusals(400, 401, 403, 413, 500),
                },
                body=body(document(ready=flag("true: those that can be asked.")), required=False),
            )
        },
        "/v2/repository/models/{model_name}/load": {
            "post": operation(
                "load",
                "Start a model, or register the archive of its name.",
                _CHANGED,
                MODEL,
                body=body(_LOAD, required=False),
            )
        },
        "/v2/repository/models/{model_name}/unload": {
            "post": operation(
                "unload",
                "Take a model's replicas away; it stays registered.",
                _CHANGED,
                MODEL,
                body=body(document(), required=False),
            )
        },
    },
    _SCHEMAS,
)
