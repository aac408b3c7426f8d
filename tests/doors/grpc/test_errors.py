"""Every error in every gRPC dialect."""

from __future__ import annotations

from typing import Any

import pytest
from grpc import StatusCode

from serve_app import errors
from serve_app.doors.grpc.errors import by_http_status, look_up
from serve_app.doors.oip import errors as oip
from serve_app.doors.oip.grpc import TABLE as OIP_TABLE
from serve_app.doors.torchserve import errors as torchserve
from serve_app.doors.torchserve.grpc import INFERENCE_TABLE, MANAGEMENT_TABLE

TABLES = {"torchserve inference": INFERENCE_TABLE, "torchserve management": MANAGEMENT_TABLE, "oip": OIP_TABLE}


def every(cls: type[Any] = errors.RelayError) -> list[type[Any]]:
    here = [cls] if cls.__module__ == errors.__name__ else []
    return sorted({*here, *(e for sub in cls.__subclasses__() for e in every(sub))}, key=lambda e: e.__name__)


def one(cls: type[errors.RelayError]) -> errors.RelayError:
    return cls("said", 404) if cls is errors.HandlerSaid else cls("a", "b", "c", "d", 404, "e")


@pytest.mark.parametrize("dialect", TABLES)
@pytest.mark.parametrize("cls", every(), ids=lambda cls: cls.__name__)
def test_every_error_has_a_status(cls: type[errors.RelayError], dialect: str) -> None:
    error = one(cls)
    code = look_up(error, TABLES[dialect])
    assert code not in (StatusCode.OK, StatusCode.CANCELLED)
    over_http = oip.look_up(error) if dialect == "oip" else torchserve.look_up(error)[0]
    if over_http >= 500 and over_http not in (501, 503, 504):
        assert code == StatusCode.INTERNAL


@pytest.mark.parametrize("dialect", TABLES)
def test_a_fault_of_the_server_is_internal(dialect: str) -> None:
    assert look_up(KeyError("x"), TABLES[dialect]) == StatusCode.INTERNAL


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
def test_a_handlers_own_status(code: int, status: str) -> None:
    assert by_http_status(code).name == status
    assert look_up(errors.HandlerSaid("no", code), INFERENCE_TABLE).name == status


@pytest.mark.parametrize(
    ("error", "inference", "management"),
    [
        (errors.ModelNotFound("m"), "INTERNAL", "NOT_FOUND"),
        (errors.NoWorker("m", None, ""), "INTERNAL", "UNAVAILABLE"),
        (errors.MissingParameter("x"), "INTERNAL", "INVALID_ARGUMENT"),
        (errors.VersionExists("m", "1"), "ABORTED", "UNKNOWN"),
        (errors.WrongRole("infer"), "PERMISSION_DENIED", "PERMISSION_DENIED"),
        (errors.DeadlineExceeded("m", 1.0), "DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED"),
        (errors.HandlerFailed(""), "UNAVAILABLE", "UNAVAILABLE"),
        (errors.OutOfResources(""), "INTERNAL", "INTERNAL"),
    ],
)
def test_the_two_apis_of_torchserve_differ(error: Exception, inference: str, management: str) -> None:
    assert look_up(error, INFERENCE_TABLE).name == inference
    assert look_up(error, MANAGEMENT_TABLE).name == management
