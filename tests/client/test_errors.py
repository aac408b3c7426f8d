"""Error responses as exceptions of the client."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest

from serve_app import errors
from serve_app.client import NO_RETRIES
from serve_app.client import errors as client_errors
from serve_app.client.errors import _BY_REASON
from serve_app.deployments.ray_internals import haproxy
from serve_app.protocols.openinference.errors import UnsupportedFeature
from tests.support.inference_functions import ClientFactory, failing


def test_error_has_every_field_of_the_response(make_client: ClientFactory, inference: Any) -> None:
    client = make_client(inference(failing(errors.QueueFull("m", "1.0"))), retries=NO_RETRIES)
    with pytest.raises(client_errors.QueueFullError) as caught:
        client.predict("m", b"")
    error = caught.value
    assert (error.status, error.reason, error.retry_after) == (503, "queue_full", 1)
    assert len(error.request_id) == 36
    assert "no worker to serve" in error.message


def test_too_large_body(make_client: ClientFactory, inference: Any) -> None:
    with pytest.raises(client_errors.RequestTooLargeError, match="max_request_size=10"):
        make_client(inference(max_request_size=10)).predict("m", b"x" * 11)


def test_every_reason_has_its_class() -> None:
    """Each reason's class of the client has the ancestor that corresponds to the server's class."""

    def subclasses(error_class: type) -> Iterator[type]:
        yield error_class
        for child in error_class.__subclasses__():
            yield from subclasses(child)

    def has_fixed_reason(error_class: type) -> bool:
        return isinstance(inspect.getattr_static(error_class, "reason"), str)

    expected_ancestors = {
        "AccessDenied": client_errors.AuthenticationError,
        "BadRequest": client_errors.BadRequestError,
        "DeadlineExceeded": client_errors.DeadlineExceededError,
        "Forbidden": client_errors.PermissionDeniedError,
        "HandlerFailed": client_errors.HandlerFailedError,
        "NotFound": client_errors.NotFoundError,
        "Unavailable": client_errors.UnavailableError,
        "WorkerDied": client_errors.ReplicaDiedError,
    }
    checked_reasons = set()
    assert haproxy and UnsupportedFeature, "their modules define reasons, too"
    for error_class in subclasses(errors.RelayError):
        if (
            error_class is errors.RelayError
            or not has_fixed_reason(error_class)
            or not error_class.__module__.startswith("serve_app")
        ):
            continue
        checked_reasons.add(error_class.reason)
        assert error_class.reason in _BY_REASON, error_class
        for ancestor in error_class.__mro__:
            expected = expected_ancestors.get(ancestor.__name__)
            if expected is not None and error_class.reason != "out_of_memory":  # of a start, or of a call
                assert issubclass(_BY_REASON[error_class.reason], expected), error_class
                break
    assert checked_reasons == set(_BY_REASON), "the client has no reason that the server lacks"
