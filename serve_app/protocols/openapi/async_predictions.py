"""Async predictions, whose response is stored and fetched later."""

from __future__ import annotations

from serve_app.protocols.openapi.builders import (
    DocumentPart,
    Json,
    integer,
    nullable,
    number,
    object_schema,
    operation,
    path_parameter,
    response,
    schema_ref,
    string,
)
from serve_app.protocols.openapi.torchserve import ERRORS, SCHEMAS

_TIMESTAMP = nullable(number("Seconds since the epoch."))
_SCHEMAS = {
    **SCHEMAS,
    "AsyncPrediction": object_schema(
        ("id", "state", "model", "version", "created", "self", "result"),
        id=string(),
        state=string(enum=["queued", "running", "done", "failed", "cancelled"]),
        model=string(),
        version=nullable(string("The requested version.")),
        request_id=string(),
        created=_TIMESTAMP,
        started=_TIMESTAMP,
        ended=_TIMESTAMP,
        expires=_TIMESTAMP,
        status=nullable(integer("The status of the response.")),
        error=string("The reason of a failure without a response."),
        self=string("The path of this document."),
        result=nullable(string("The path of the response, once there is one.")),
        webhook=object_schema(("url", "state"), url=string(), state=string()),
    ),
}
_ID = path_parameter("id", "The id of the prediction.", string(pattern="^[0-9a-f]{32}$"))
_PATHS: Json = {
    "/async/{id}": {
        "get": operation(
            "get_async_prediction",
            "Get the state of an async prediction.",
            {
                "200": response("The current state.", schema_ref("AsyncPrediction")),
                **ERRORS.responses_for(400, 404, 500, 503),
            },
            _ID,
        ),
        "delete": operation(
            "cancel_async_prediction",
            "Cancel an async prediction, or delete one that has ended.",
            {
                "200": response("It is being cancelled.", schema_ref("AsyncPrediction")),
                "204": response("It is deleted."),
                **ERRORS.responses_for(400, 404, 500, 503),
            },
            _ID,
        ),
    },
    "/async/{id}/result": {
        "get": operation(
            "get_async_prediction_result",
            "Get the response with its status and headers.",
            {
                "200": response("The response with its content type."),
                "202": response("There is no response yet.", schema_ref("AsyncPrediction")),
                **ERRORS.responses_for(400, 404, 410, 500, 503),
                "default": {"description": "The status of the response."},
            },
            _ID,
        )
    },
}
ASYNC_PREDICTIONS = DocumentPart(
    "Asynchronous predictions", "Requested with the header Prefer: respond-async.", _PATHS, _SCHEMAS
)
