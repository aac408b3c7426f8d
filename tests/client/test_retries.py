"""The rules by which both clients retry requests."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
from typing import Any

import httpx
import pytest

from serve_app import errors
from serve_app.client import ServerError
from serve_app.client import errors as client_errors
from tests.support.inference_functions import ClientFactory, failing, quick_retries, without_retry_after
from tests.support.load import Pulse

pytestmark = pytest.mark.integration


def test_refused_request_is_retried_after_retry_after(make_client: ClientFactory, inference: Any) -> None:
    server = inference(failing(errors.QuotaExceeded("m", "1.0", 1)))
    started_at = time.monotonic()
    assert make_client(server, retries=quick_retries()).predict("m", b"") == b"done"
    assert len(server.backend.requests) == 2
    assert time.monotonic() - started_at >= 1.0, "Retry-After: 1"


def test_number_of_attempts_is_limited(make_client: ClientFactory, inference: Any) -> None:
    server = inference(failing(*[without_retry_after(errors.ModelLoading("m", None))] * 3))
    with pytest.raises(client_errors.ModelLoadingError):
        make_client(server, retries=quick_retries(max_attempts=2)).predict("m", b"")
    assert len(server.backend.requests) == 2


@pytest.mark.parametrize(
    "failure",
    [
        errors.HandlerFailed("boom"),
        errors.ReplicaDied("killed"),
        errors.DeadlineExceeded("m", 1.0),
        errors.StepUnavailable("w", "first", "full", "queue_full", 0, ""),
    ],
    ids=lambda failure: type(failure).__name__,
)
def test_requests_that_may_have_run_are_not_retried(
    make_client: ClientFactory, inference: Any, failure: Exception
) -> None:
    server = inference(failing(failure))
    with pytest.raises(ServerError):
        make_client(server, retries=quick_retries()).predict("m", b"")
    assert len(server.backend.requests) == 1


def test_too_long_waits_raise_at_once(make_client: ClientFactory, inference: Any) -> None:
    server = inference(failing(errors.NoReplica("m", None)))
    with pytest.raises(client_errors.NoReplicaError) as error:
        make_client(server).predict("m", b"")
    assert (error.value.retry_after, len(server.backend.requests)) == (10, 1)
    server = inference(failing(errors.NoReplica("m", None)))  # its wait exceeds the rest of the timeout
    with pytest.raises(client_errors.NoReplicaError):
        make_client(server, retries=quick_retries(max_delay=60.0)).predict("m", b"", timeout=9.9)
    assert len(server.backend.requests) == 1


def test_remaining_time_is_sent_to_the_server(make_client: ClientFactory, inference: Any) -> None:
    server = inference(failing(errors.QueueFull("m", "1.0")))
    client = make_client(server, timeout=60, retries=quick_retries())
    client.predict("m", b"", timeout=30)
    client.predict("m", b"")
    list(client.stream("m", b""))
    now = time.time()
    _, second, without_timeout, streamed = (request.deadline for request in server.backend.requests)
    sent = [float(request.headers["x-request-timeout-seconds"]) for request in server.backend.requests[:2]]
    assert sent[1] < sent[0] - 0.99 <= 29.01, "the wait of a second is part of it"
    assert 0 < second - now < 30
    assert 30 < without_timeout - now <= 60
    assert streamed is None


def test_refused_connections_are_retried(make_client: ClientFactory, inference: Any) -> None:
    with socket.socket() as held:  # bound, so nobody takes it, and failing
        held.bind(("127.0.0.1", 0))
        client = make_client(retries=quick_retries(max_attempts=3))
        target = getattr(client, "_client", client)
        target._addresses["inference"] = f"http://127.0.0.1:{held.getsockname()[1]}"
        with Pulse() as pulse:
            started_at = time.monotonic()
            with pytest.raises(httpx.ConnectError) as refused:
                client.predict("m", b"")
            if sys.version_info >= (3, 11):
                [note] = refused.value.__notes__
                assert note.startswith(
                    f"No server responds at {target._addresses['inference']}/predictions/m."
                )
            assert time.monotonic() - started_at - pulse.stalled_seconds(started_at) < 1
        assert not client.live()


def test_tls_that_fails_is_not_reported_as_a_missing_server(make_client: ClientFactory) -> None:
    with socket.create_server(("127.0.0.1", 0)) as port:

        def answer_without_tls() -> None:
            connection, _ = port.accept()
            with connection, contextlib.suppress(ConnectionError):  # the client resets it
                connection.recv(1)
                connection.sendall(b"HTTP/1.0 400 Bad Request\r\n\r\n")
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(1 << 16):
                    pass

        threading.Thread(target=answer_without_tls, daemon=True).start()
        client = make_client(retries=quick_retries(max_attempts=1))
        target = getattr(client, "_client", client)
        target._addresses["inference"] = f"https://127.0.0.1:{port.getsockname()[1]}"
        with pytest.raises(httpx.ConnectError) as failed:
            client.predict("m", b"")
        assert not getattr(failed.value, "__notes__", [])


def test_interrupted_request_is_not_retried(make_client: ClientFactory) -> None:
    received = []
    with socket.create_server(("127.0.0.1", 0)) as port:

        def close_connections() -> None:
            with contextlib.suppress(OSError):  # the port is shut
                while True:
                    connection, _ = port.accept()
                    with connection:
                        received.append(connection.recv(10_000))

        thread = threading.Thread(target=close_connections)
        thread.start()
        client = make_client(retries=quick_retries(max_attempts=3))
        getattr(client, "_client", client)._addresses["inference"] = (
            f"http://127.0.0.1:{port.getsockname()[1]}"
        )
        with pytest.raises((httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError)):
            client.predict("m", b"")
        port.shutdown(socket.SHUT_RDWR)
        thread.join()
    assert len(received) == 1, "it may have run"
