"""The status of every error in every gRPC protocol."""

from __future__ import annotations

from typing import Any

import pytest
from grpc import StatusCode

from serve_app import errors
from serve_app.protocols.grpc.status import find_status_code, from_http_status
from serve_app.protocols.http import json_errors as torchserve
from serve_app.protocols.openinference import errors as openinference
from serve_app.protocols.openinference.grpc import TABLE as OPENINFERENCE_TABLE
from serve_app.protocols.torchserve.grpc import INFERENCE_TABLE, MANAGEMENT_TABLE

TABLES = {
    "torchserve inference": INFERENCE_TABLE,
    "torchserve management": MANAGEMENT_TABLE,
    "openinference": OPENINFERENCE_TABLE,
}


def error_classes(cls: type[Any] = errors.RelayError) -> list[type[Any]]:
    own = [cls] if cls.__module__ == errors.__name__ else []
    return sorted(
        {*own, *(error for sub in cls.__subclasses__() for error in error_classes(sub))},
        key=lambda error: error.__name__,
    )


def create(cls: type[errors.RelayError]) -> errors.RelayError:
    return cls("message", 404) if cls is errors.HandlerRejected else cls("a", "b", "c", "d", 404, "e")


@pytest.mark.parametrize("protocol", TABLES)
@pytest.mark.parametrize("cls", error_classes(), ids=lambda cls: cls.__name__)
def test_every_error_has_a_status(cls: type[errors.RelayError], protocol: str) -> None:
    error = create(cls)
    code = find_status_code(error, TABLES[protocol])
    assert code not in (StatusCode.OK, StatusCode.CANCELLED)
    over_http = (
        openinference.find_status(error) if protocol == "openinference" else torchserve.look_up(error)[0]
    )
    if over_http >= 500 and over_http not in (501, 503, 504):
        assert code == StatusCode.INTERNAL


@pytest.mark.parametrize("protocol", TABLES)
def test_unexpected_errors_are_internal(protocol: str) -> None:
    assert find_status_code(KeyError("x"), TABLES[protocol]) == StatusCode.INTERNAL


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (400, "INVALID_ARGUMENT"),
        (401, "UNAUTHENTICATED"),
        (418, "FAILED_PRECONDITION"),
        (429, "RESOURCE_EXHAUSTED"),
        (500, "INTERNAL"),
        (503, "UNAVAILABLE"),
        (504, "DEADLINE_EXCEEDED"),
        (599, "INTERNAL"),
    ],
)
def test_handlers_name_their_status(code: int, status: str) -> None:
    assert from_http_status(code).name == status
    assert find_status_code(errors.HandlerRejected("no", code), INFERENCE_TABLE).name == status


@pytest.mark.parametrize(
    ("error", "inference", "management"),
    [
        (errors.ModelNotFound("m"), "INTERNAL", "NOT_FOUND"),
        (errors.NoReplica("m", None, ""), "INTERNAL", "UNAVAILABLE"),
        (errors.MissingParameter("x"), "INTERNAL", "INVALID_ARGUMENT"),
        (errors.VersionExists("m", "1"), "ABORTED", "UNKNOWN"),
        (errors.MissingPermission("infer"), "PERMISSION_DENIED", "PERMISSION_DENIED"),
        (errors.DeadlineExceeded("m", 1.0), "DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED"),
        (errors.HandlerFailed(""), "UNAVAILABLE", "UNAVAILABLE"),
        (errors.HandlerOutOfMemory(""), "INTERNAL", "INTERNAL"),
    ],
)
def test_torchserve_inference_and_management_differ(
    error: Exception, inference: str, management: str
) -> None:
    assert find_status_code(error, INFERENCE_TABLE).name == inference
    assert find_status_code(error, MANAGEMENT_TABLE).name == management
