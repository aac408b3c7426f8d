"""Predictions that are asked for now and answered later."""

from __future__ import annotations

from serve_app.doors.openapi.torchserve import DIALECT, SCHEMAS
from serve_app.doors.openapi.words import (
    Json,
    Part,
    answer,
    document,
    in_path,
    integer,
    nullable,
    number,
    operation,
    schema,
    text,
)

_WHEN = nullable(number("Seconds since the epoch."))
_SCHEMAS = {
    **SCHEMAS,
    "Deferral": document(
        ("id", "state", "model", "version", "created", "self", "result"),
        id=text(),
        state=text(enum=["queued", "running", "done", "failed", "cancelled"]),
        model=text(),
        version=nullable(text("That was asked for.")),
        request_id=text(),
        created=_WHEN,
        started=_WHEN,
        ended=_WHEN,
        expires=_WHEN,
        status=nullable(integer("Of the answer.")),
        error=text("Why it has no answer, where it failed without one."),
        self=text("Where to ask for this document."),
        result=nullable(text("Where the answer is, when there is one.")),
        webhook=document(("url", "state"), url=text(), state=text()),
    ),
}
_ID = in_path("id", "As its document says.", text(pattern="^[0-9a-f]{32}$"))
_PATHS: Json = {
    "/async/{id}": {
        "get": operation(
            "deferral",
            "How far it is.",
            {"200": answer("So far.", schema("Deferral")), **DIALECT.refusals(400, 404, 500, 503)},
            _ID,
        ),
        "delete": operation(
            "cancel_deferral",
            "Stop it; forget it where it has ended.",
            {
                "200": answer("It stops.", schema("Deferral")),
                "204": answer("It is forgotten."),
                **DIALECT.refusals(400, 404, 500, 503),
            },
            _ID,
        ),
    },
    "/async/{id}/result": {
        "get": operation(
            "deferred_answer",
            "Its answer, with the status and the headers that it would have had.",
            {
                "200": answer("The answer, under its own content type."),
                "202": answer("It has none yet.", schema("Deferral")),
                **DIALECT.refusals(400, 404, 410, 500, 503),
                "default": {"description": "The answer's own status."},
            },
            _ID,
        )
    },
}
ASYNCHRONOUS = Part("Asynchronous predictions", "Asked for by the header Prefer: respond-async.", _PATHS, _SCHEMAS)
