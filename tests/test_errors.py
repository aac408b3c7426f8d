"""Errors: named arguments, messages, and pickling across processes."""

from __future__ import annotations

import multiprocessing
import pickle

import pytest

from serve_app import errors
from tests.support.error_classes import list_subclasses

_VALUES = {
    "code": 422,
    "limit": 7,
    "value": 5,
    "size": 9,
    "count": 3,
    "seconds": 0.5,
    "predicted": 1.25,
    "remaining": 0.5,
}


CLASSES = [cls for cls in list_subclasses() if cls.__module__ == errors.__name__]


def make(cls: type[errors.RelayError]) -> errors.RelayError:
    """Return an error with a value for each of its fields."""
    return cls(*(_VALUES.get(name, f"some {name}") for name in cls.fields or ("message",)))


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_class_is_pickled_with_its_attributes(cls: type[errors.RelayError]) -> None:
    sent = make(cls)
    sent.selected_version, sent.arm, sent.retry_after = "2.0", "experiment/arm", 17
    received = pickle.loads(pickle.dumps(sent))
    assert type(received) is cls
    assert (received.args, str(received), received.reason) == (sent.args, str(sent), sent.reason)
    assert vars(received) == vars(sent)


def test_errors_cross_a_process_boundary() -> None:
    sent = [make(cls) for cls in CLASSES]
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        received = pool.map(_echo, sent)
    assert [(type(error), str(error)) for error in received] == [(type(error), str(error)) for error in sent]


def _echo(error: errors.RelayError) -> errors.RelayError:
    return error


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_fields_are_attributes(cls: type[errors.RelayError]) -> None:
    error = make(cls)
    assert tuple(getattr(error, name) for name in cls.fields) == (error.args if cls.fields else ())


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_missing_arguments_are_empty(cls: type[errors.RelayError]) -> None:
    fields = [name for name in cls.fields if name != "code"]
    assert [getattr(cls(), name) for name in fields] == [""] * len(fields)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (errors.RelayError(), "RelayError"),
        (errors.BadRequest("no"), "no"),
        (errors.ModelNotFound("m"), "Model not found: m"),
        (errors.VersionNotFound("m", "2"), "Model version: 2 does not exist for model: m"),
        (errors.DefaultVersionNotFound("m", "2"), "Model version 2 does not exist for model m"),
        (errors.WorkflowExists("w", ""), "Workflow w is already registered."),
        (errors.WorkflowExists("w", "1.0"), "Workflow w version 1.0 is already registered."),
        (errors.WorkflowArchiveNotFound("no .war"), "no .war"),
        (errors.HandlerRejected("{braces} stay", 422), "{braces} stay"),
        (
            errors.CannotMeetDeadline("m", 0.0, 1.2345, 0.5),
            "Model m cannot answer within the deadline of this request: "
            "about 1.23 s are needed and 0.5 s are left.",
        ),
        (
            errors.StepRejected("w", "s", "no", "handler_rejected", 422, ""),
            "Step s of workflow w failed: no",
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_messages_are_formatted_from_the_fields(error: errors.RelayError, message: str) -> None:
    assert str(error) == message


def test_a_step_has_the_reason_and_the_code_of_its_error() -> None:
    error = errors.StepRejected("w", "s", "no", "some_reason", 422, "traceback")
    assert (error.step, error.reason, error.code, error.detail) == ("s", "some_reason", 422, "traceback")


def test_the_reason_of_other_exceptions_is_internal() -> None:
    assert errors.get_reason(errors.ModelNotFound("m")) == "model_not_found"
    assert errors.get_reason(ValueError("no")) == "internal"
