"""The status, type and code of every error class."""

from __future__ import annotations

import pickle

import pytest

from serve_app import errors
from serve_app.protocols.openai.errors import TABLE, InvalidField, find_status, to_document
from tests.support.error_classes import list_subclasses


@pytest.mark.parametrize("cls", list_subclasses(), ids=lambda c: c.__name__)
def test_every_class_has_an_entry(cls: type) -> None:
    entry = next(c for c in cls.__mro__ if c in TABLE)
    assert 400 <= TABLE[entry][0] < 600


@pytest.mark.parametrize(
    ("error", "status", "kind", "code", "param"),
    [
        (errors.MissingToken(), 401, "invalid_request_error", "invalid_api_key", None),
        (errors.MissingPermission("infer"), 403, "invalid_request_error", "insufficient_permissions", None),
        (errors.ModelNotAllowed("m"), 403, "invalid_request_error", "insufficient_permissions", "model"),
        (errors.ModelNotFound("m"), 404, "invalid_request_error", "model_not_found", "model"),
        (errors.VersionNotFound("m", "3"), 404, "invalid_request_error", "model_not_found", "model"),
        (errors.ResourceNotFound(), 404, "invalid_request_error", "no_route", None),
        (errors.MethodNotAllowed(), 405, "invalid_request_error", "method_not_allowed", None),
        (errors.InvalidBody("no"), 400, "invalid_request_error", "invalid_body", None),
        (InvalidField("no", "input"), 400, "invalid_request_error", "bad_request", "input"),
        (errors.RequestTooLarge(10), 413, "invalid_request_error", "request_too_large", None),
        (errors.QuotaExceeded("m", "1.0", 4), 429, "requests", "rate_limit_exceeded", None),
        (errors.QueueFull("m", None), 503, "server_error", "queue_full", None),
        (errors.ModelLoading("m", None), 503, "server_error", "loading", None),
        (errors.DeadlineExceeded("m", 1.0), 504, "server_error", "deadline", None),
        (errors.ReplicaDied(), 500, "server_error", "replica_died", None),
        (errors.HandlerFailed("Traceback\nValueError: secret"), 500, "server_error", "handler_failed", None),
        (
            errors.HandlerRejected("no such token", 400),
            400,
            "invalid_request_error",
            "handler_rejected",
            None,
        ),
        (errors.HandlerRejected("restarted", 503), 503, "server_error", "handler_rejected", None),
        (errors.HandlerRejected("odd", 7), 500, "server_error", "handler_rejected", None),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_status_type_and_code(
    error: errors.RelayError, status: int, kind: str, code: str, param: str | None
) -> None:
    assert find_status(error)[0] == status
    assert to_document(error) == {
        "error": {"message": str(error), "type": kind, "param": param, "code": code}
    }
    copy = pickle.loads(pickle.dumps(error))
    assert to_document(copy) == to_document(error)


def test_details_of_handler_errors_follow_the_setting() -> None:
    failed = errors.HandlerFailed("Traceback\nValueError: secret")
    assert "secret" not in str(to_document(failed))
    assert to_document(failed, shown="message")["error"]["detail"] == "ValueError: secret"
    assert to_document(failed, shown="traceback")["error"]["detail"] == "Traceback\nValueError: secret"
    assert "boom" not in to_document(RuntimeError("boom"), "id-1")["error"]["message"]
