"""OpenAI's API: models, completions, chat completions, embeddings."""

from __future__ import annotations

from serve_app.doors.openai.embeddings import MOST_INPUTS
from serve_app.doors.openapi.words import (
    CALL,
    Dialect,
    Json,
    Part,
    answer,
    array,
    body,
    document,
    flag,
    in_path,
    integer,
    nullable,
    number,
    operation,
    schema,
    text,
)

DIALECT = Dialect("OpenAIError")
_MODEL = text("name, or name:version", minLength=1)
_SCHEMAS = {
    "OpenAIError": document(
        ("error",),
        error=document(
            ("message", "type", "param", "code"),
            message=text(),
            type=text(),
            param=nullable(text()),
            code=nullable(text("The error in one word.")),
            detail=text("More of a handler's failure, where the operator shows it."),
        ),
    ),
    "OpenAIModel": document(
        ("id", "object", "created", "owned_by"),
        id=text(),
        object=text(enum=["model"]),
        created=integer(),
        owned_by=text(),
    ),
    "Completion": document(
        ("model",),
        "What the model's handler knows beside it: prompt, max_tokens, temperature, stop, seed, stream, …",
        model=_MODEL,
    ),
    "ChatCompletion": document(
        ("model", "messages"),
        "What the model's handler knows beside these: max_tokens, temperature, stop, seed, tools, stream, …",
        model=_MODEL,
        messages=array(document(("role",), role=text())),
        stream=flag("Answer with server-sent events."),
    ),
    "Embeddings": document(
        ("model", "input"),
        closed=True,
        model=_MODEL,
        input={"anyOf": [text(minLength=1), array(text(minLength=1), minItems=1, maxItems=MOST_INPUTS)]},
        encoding_format=text(enum=["float", "base64"]),
        user=text(),
    ),
    "Embedded": document(
        ("object", "data", "model", "usage"),
        object=text(enum=["list"]),
        data=array(
            document(
                ("object", "index", "embedding"),
                object=text(enum=["embedding"]),
                index=integer(minimum=0),
                embedding={"anyOf": [array(number()), text("base64 of little-endian float32.")]},
            )
        ),
        model=text(),
        usage=document(("prompt_tokens", "total_tokens"), prompt_tokens=integer(), total_tokens=integer()),
    ),
}
_REFUSED = DIALECT.refusals(400, 401, 403, 404, 410, 413, 429, 500, 503, 504, 507)
_HANDLERS = {"description": "The handler's own status, with its own words or its own body."}


def _generate(name: str, about: str, asked: str) -> Json:
    result = answer("What the model's handler says.", {}, called=True)
    result["content"]["text/event-stream"] = {"schema": {}}
    answers = {"200": result, **_REFUSED, "default": _HANDLERS}
    return {"post": operation(name, about, answers, *CALL, body=body(schema(asked)))}


OPENAI = Part(
    "OpenAI",
    "OpenAI's API, for models whose handlers speak it.",
    {
        "/v1/models": {
            "get": operation(
                "openai_models",
                "The models, and the versions of those that have several.",
                {
                    "200": answer(
                        "Them.",
                        document(("object", "data"), object=text(enum=["list"]), data=array(schema("OpenAIModel"))),
                    ),
                    **DIALECT.refusals(401, 403, 500),
                },
            )
        },
        "/v1/completions": _generate("completions", "A completion.", "Completion"),
        "/v1/chat/completions": _generate("chat_completions", "A chat completion.", "ChatCompletion"),
        "/v1/embeddings": {
            "post": operation(
                "embeddings",
                "The vector of each text.",
                {"200": answer("Them.", schema("Embedded"), called=True), **_REFUSED, "default": _HANDLERS},
                *CALL,
                body=body(schema("Embeddings")),
            )
        },
    },
    _SCHEMAS,
)
# Where the management API is not on the same port, and has it.
SHOWN = Part(
    "OpenAI",
    OPENAI.about,
    {
        "/v1/models/{id}": {
            "get": operation(
                "openai_model",
                "One model.",
                {"200": answer("It.", schema("OpenAIModel")), **DIALECT.refusals(401, 403, 404, 500, 503)},
                in_path("id", "name, or name:version", text(pattern="^[A-Za-z0-9_][A-Za-z0-9_.-]*$")),
            )
        }
    },
    _SCHEMAS,
)
