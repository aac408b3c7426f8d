"""Every class of the tree through OpenAI's table."""

from __future__ import annotations

import pickle

import pytest

from serve_app import errors
from serve_app.doors.openai.errors import TABLE, InvalidField, document, look_up


def tree(cls: type) -> set[type]:
    return {cls}.union(*(tree(sub) for sub in cls.__subclasses__()))


@pytest.mark.parametrize("cls", sorted(tree(errors.RelayError), key=lambda c: c.__name__), ids=lambda c: c.__name__)
def test_every_class_finds_a_line(cls: type) -> None:
    found = next(c for c in cls.__mro__ if c in TABLE)
    assert 400 <= TABLE[found][0] < 600


@pytest.mark.parametrize(
    ("error", "status", "kind", "code", "param"),
    [
        (errors.MissingToken(), 401, "invalid_request_error", "invalid_api_key", None),
        (errors.WrongRole("infer"), 403, "invalid_request_error", "insufficient_permissions", None),
        (errors.WrongModel("m"), 403, "invalid_request_error", "insufficient_permissions", "model"),
        (errors.ModelNotFound("m"), 404, "invalid_request_error", "model_not_found", "model"),
        (errors.VersionNotFound("m", "3"), 404, "invalid_request_error", "model_not_found", "model"),
        (errors.ResourceNotFound(), 404, "invalid_request_error", "no_route", None),
        (errors.MethodNotAllowed(), 405, "invalid_request_error", "method_not_allowed", None),
        (errors.InvalidBody("no"), 400, "invalid_request_error", "invalid_body", None),
        (InvalidField("no", "input"), 400, "invalid_request_error", "bad_request", "input"),
        (errors.TooLarge(10), 413, "invalid_request_error", "too_large", None),
        (errors.QuotaExceeded("m", "1.0", 4), 429, "requests", "rate_limit_exceeded", None),
        (errors.QueueFull("m", None), 503, "server_error", "queue_full", None),
        (errors.Loading("m", None), 503, "server_error", "loading", None),
        (errors.DeadlineExceeded("m", 1.0), 504, "server_error", "deadline", None),
        (errors.WorkerDied(), 500, "server_error", "worker_died", None),
        (errors.HandlerFailed("Traceback\nValueError: secret"), 500, "server_error", "handler_failed", None),
        (errors.HandlerSaid("no such token", 400), 400, "invalid_request_error", "handler_said", None),
        (errors.HandlerSaid("made anew", 503), 503, "server_error", "handler_said", None),
        (errors.HandlerSaid("odd", 7), 500, "server_error", "handler_said", None),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_status_type_and_code(
    error: errors.RelayError, status: int, kind: str, code: str, param: str | None
) -> None:
    assert look_up(error)[0] == status
    assert document(error) == {"error": {"message": str(error), "type": kind, "param": param, "code": code}}
    again = pickle.loads(pickle.dumps(error))
    assert document(again) == document(error)


def test_a_handlers_failure_is_shown_as_the_operator_wants_it() -> None:
    failed = errors.HandlerFailed("Traceback\nValueError: secret")
    assert "secret" not in str(document(failed))
    assert document(failed, shown="message")["error"]["detail"] == "ValueError: secret"
    assert document(failed, shown="traceback")["error"]["detail"] == "Traceback\nValueError: secret"
    assert "boom" not in document(RuntimeError("boom"), "id-1")["error"]["message"]
