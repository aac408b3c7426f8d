"""OpenAI's API: models, completions, chat completions, embeddings."""

from __future__ import annotations

from serve_app.protocols.openai.embeddings import MAX_INPUTS
from serve_app.protocols.openapi.builders import (
    REQUEST_HEADERS,
    DocumentPart,
    ErrorFormat,
    Json,
    array,
    boolean,
    integer,
    nullable,
    number,
    object_schema,
    operation,
    path_parameter,
    request_body,
    response,
    schema_ref,
    string,
)

ERRORS = ErrorFormat("OpenAIError")
_MODEL = string("name, or name:version", minLength=1)
_SCHEMAS = {
    "OpenAIError": object_schema(
        ("error",),
        error=object_schema(
            ("message", "type", "param", "code"),
            message=string(),
            type=string(),
            param=nullable(string()),
            code=nullable(string("The machine-readable reason.")),
            detail=string("Details of a handler's failure, if the operator enables them."),
        ),
    ),
    "OpenAIModel": object_schema(
        ("id", "object", "created", "owned_by"),
        id=string(),
        object=string(enum=["model"]),
        created=integer(),
        owned_by=string(),
    ),
    "Completion": object_schema(
        ("model",),
        "Further fields depend on the handler: prompt, max_tokens, temperature, stop, seed, stream, …",
        model=_MODEL,
    ),
    "ChatCompletion": object_schema(
        ("model", "messages"),
        "Further fields depend on the handler: max_tokens, temperature, stop, seed, tools, stream, …",
        model=_MODEL,
        messages=array(object_schema(("role",), role=string())),
        stream=boolean("Answer with server-sent events."),
    ),
    "Embeddings": object_schema(
        ("model", "input"),
        closed=True,
        model=_MODEL,
        input={"anyOf": [string(minLength=1), array(string(minLength=1), minItems=1, maxItems=MAX_INPUTS)]},
        encoding_format=string(enum=["float", "base64"]),
        user=string(),
    ),
    "Embedded": object_schema(
        ("object", "data", "model", "usage"),
        object=string(enum=["list"]),
        data=array(
            object_schema(
                ("object", "index", "embedding"),
                object=string(enum=["embedding"]),
                index=integer(minimum=0),
                embedding={"anyOf": [array(number()), string("base64 of little-endian float32.")]},
            )
        ),
        model=string(),
        usage=object_schema(
            ("prompt_tokens", "total_tokens"), prompt_tokens=integer(), total_tokens=integer()
        ),
    ),
}
_INFERENCE_ERRORS = ERRORS.responses_for(400, 401, 403, 404, 410, 413, 429, 500, 503, 504, 507)
_HANDLER_RESPONSE = {"description": "The handler's own status and body."}


def _generate(name: str, summary: str, request_schema: str) -> Json:
    result = response("The handler's response.", {}, from_model=True)
    result["content"]["text/event-stream"] = {"schema": {}}
    responses = {"200": result, **_INFERENCE_ERRORS, "default": _HANDLER_RESPONSE}
    return {
        "post": operation(
            name, summary, responses, *REQUEST_HEADERS, body=request_body(schema_ref(request_schema))
        )
    }


OPENAI = DocumentPart(
    "OpenAI",
    "OpenAI's API, for models whose handlers implement it.",
    {
        "/v1/models": {
            "get": operation(
                "openai_models",
                "List the models, and the versions of those with several.",
                {
                    "200": response(
                        "The list.",
                        object_schema(
                            ("object", "data"),
                            object=string(enum=["list"]),
                            data=array(schema_ref("OpenAIModel")),
                        ),
                    ),
                    **ERRORS.responses_for(401, 403, 500),
                },
            )
        },
        "/v1/completions": _generate("completions", "Create a completion.", "Completion"),
        "/v1/chat/completions": _generate("chat_completions", "Create a chat completion.", "ChatCompletion"),
        "/v1/embeddings": {
            "post": operation(
                "embeddings",
                "Create the embedding of each text.",
                {
                    "200": response("The list.", schema_ref("Embedded"), from_model=True),
                    **_INFERENCE_ERRORS,
                    "default": _HANDLER_RESPONSE,
                },
                *REQUEST_HEADERS,
                body=request_body(schema_ref("Embeddings")),
            )
        },
    },
    _SCHEMAS,
)
# The management API has this path, too, so it is added only to ports without that API.
OPENAI_MODEL = DocumentPart(
    "OpenAI",
    OPENAI.description,
    {
        "/v1/models/{id}": {
            "get": operation(
                "openai_model",
                "Get a model.",
                {
                    "200": response("The model.", schema_ref("OpenAIModel")),
                    **ERRORS.responses_for(401, 403, 404, 500, 503),
                },
                path_parameter(
                    "id", "name, or name:version", string(pattern="^[A-Za-z0-9_][A-Za-z0-9_.-]*$")
                ),
            )
        }
    },
    _SCHEMAS,
)
