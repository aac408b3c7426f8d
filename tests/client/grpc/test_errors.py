"""Error statuses of gRPC as exceptions of the client."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from client_helpers import ClientFactory, failing

from serve_app import errors
from serve_app.client import NO_RETRIES, Client, ServerError
from serve_app.client import errors as client_errors
from serve_app.domain.request import InferenceRequest, InferenceResponse


@pytest.mark.parametrize(
    "failure",
    [
        errors.QueueFull("m", "1.0"),
        errors.QuotaExceeded("m", "1.0", 1),
        errors.ModelLoading("m", None),
        errors.NoReplica("m", None),
        errors.HandlerFailed("boom"),
        errors.ReplicaDied("killed"),
        errors.DeadlineExceeded("m", 1.0),
        errors.InvalidInput("the input is wrong"),
        errors.SequenceLost("m", "s", "idle"),
        errors.StepUnavailable("w", "first", "full", "queue_full", 0, ""),
        errors.HandlerRejected("teapot", 418),
        RuntimeError("secret"),
    ],
    ids=lambda failure: type(failure).__name__,
)
def test_errors_equal_those_over_http(
    make_client: ClientFactory, over_grpc: Any, inference: Any, over_http: Any, failure: Exception
) -> None:
    async def fail(request: InferenceRequest) -> InferenceResponse:
        raise failure

    raised = []
    with Client(over_http(inference(fail).app), retries=NO_RETRIES) as http_client:
        client = make_client(over_grpc(fail), retries=NO_RETRIES)
        for call in (
            lambda: http_client.predict("m", b""),
            lambda: client.predict("m", b""),
            lambda: client.infer("m", {"x": [1]}),
        ):
            with pytest.raises(ServerError) as caught:
                call()
            raised.append(caught.value)
    first, second, tensor = raised
    assert type(first) is type(second) is type(tensor)
    assert first.reason == second.reason == tensor.reason
    assert first.retry_after == second.retry_after == tensor.retry_after
    assert first.version == second.version == tensor.version
    assert all(len(error.request_id) == 36 for error in raised)
    assert isinstance(second.__cause__, grpc.RpcError)
    assert second.status == tensor.status
    if isinstance(failure, errors.RelayError):
        assert (first.message, first.detail) == (second.message, second.detail)
        assert (
            isinstance(failure, (errors.HandlerFailed, errors.InvalidInput)) or first.status == second.status
        )


def test_unknown_model_or_version(make_client: ClientFactory, over_grpc: Any) -> None:
    client = make_client(over_grpc())
    for call in (
        lambda: client.predict("nobody", b""),
        lambda: client.infer("nobody", {"x": [1.0]}),
        lambda: list(client.stream("nobody", b"")),
        lambda: client.metadata("nobody"),
        lambda: client.predict("m", b"", version="9.9"),
    ):
        with pytest.raises(client_errors.NotFoundError, match=r"nobody|9\.9") as error:
            call()
        assert error.value.status == 404


def test_size_limits_of_the_server(make_client: ClientFactory, over_grpc: Any) -> None:
    client = make_client(over_grpc(inference={"max_request_size": 1000}))
    with pytest.raises(
        client_errors.RequestTooLargeError, match=r"inference\.max_request_size, 1000 bytes"
    ) as error:
        client.predict("m", b"x" * 2000)
    assert (error.value.status, error.value.reason) == (413, "request_too_large")
    large = make_client(over_grpc(failing(then=b"x" * 2000), runtime={"max_response_size": 1000}))
    with pytest.raises(client_errors.HandlerFailedError, match=r"runtime\.max_response_size") as error:
        large.predict("m", b"")
    assert (error.value.reason, len(error.value.request_id)) == ("response_too_large", 36)


def test_unknown_method(make_client: ClientFactory, managed_by_grpc: Any) -> None:
    """The management port does not serve the inference API."""
    with pytest.raises(ServerError, match="There is no method") as error:
        make_client(managed_by_grpc()).predict("m", b"")
    assert error.value.status == 501


def test_size_limit_of_the_client(make_client: ClientFactory, over_grpc: Any) -> None:
    large = over_grpc(failing(then=b"x" * 5_000_000))
    assert len(make_client(large).predict("m", b"")) == 5_000_000, "gRPC's own default is 4 MiB"
    with pytest.raises(ServerError, match="larger than max"):
        make_client(large, options={"grpc.max_receive_message_length": 1000}).predict("m", b"")
