"""Large requests and responses of async predictions in object storage, against a real S3 server."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import boto3
import fsspec.core  # noqa: F401 (with its registry)
import pytest
import requests
from moto.server import ThreadedMotoServer

from serve_app import main
from serve_app.control.async_predictions import blob_store
from serve_app.control.async_predictions import service as async_service
from serve_app.domain.request import InferenceRequest, InferenceResponse
from serve_app.errors import ConfigurationError, ResultStoreUnavailable
from tests.support.async_server import ASYNC, Server, echo
from tests.support.listeners import close_listener
from tests.support.ports import free_port

pytestmark = pytest.mark.integration


MIB = 1 << 20
LARGE = os.urandom(MIB) * 3
ANYBODY = {"key": "any", "secret": "any"}
KEYS = {"aws_access_key_id": "any", "aws_secret_access_key": "any"}


class S3:
    """An S3 server with the bucket ``kept``, whose objects survive ``stop`` and ``start``."""

    def __init__(self) -> None:
        self._port = free_port()  # nobody else gets it while the server is stopped
        self.address = f"http://127.0.0.1:{self._port}"
        self.start()
        self.client = self._client("s3")
        self.client.create_bucket(Bucket="kept")

    def start(self) -> None:
        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=self._port, verbose=False)
        self._server.start()

    def stop(self) -> None:
        self._server.stop()

    @property
    def names(self) -> set[str]:
        return {found["Key"] for found in self.client.list_objects_v2(Bucket="kept").get("Contents", ())}

    def enforce_permissions(self, enabled: bool) -> None:
        requests.post(
            f"{self.address}/moto-api/reset-auth", data=b"0" if enabled else b"Infinity", timeout=60
        )

    def guest(self) -> dict[str, str]:
        """Return the key of a user without permissions."""
        iam = self._client("iam")
        iam.create_user(UserName="guest")
        key = iam.create_access_key(UserName="guest")["AccessKey"]
        return {"key": key["AccessKeyId"], "secret": key["SecretAccessKey"]}

    def _client(self, service: str) -> Any:
        return boto3.client(service, "us-east-1", endpoint_url=self.address, **KEYS)


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    server = S3()
    try:
        yield server
    finally:
        requests.post(f"{server.address}/moto-api/reset", timeout=60)
        server.stop()


@pytest.fixture
def short_retry_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the intervals of retries and sweeps."""
    monkeypatch.setattr(async_service, "_STORE_RETRY_S", 0.05)
    monkeypatch.setattr(async_service, "_GC_INTERVAL", 0.05)
    monkeypatch.setattr(ResultStoreUnavailable, "retry_after", 1)


def build_settings(
    address: str, place: str = "s3://kept/some/folder", who: dict[str, str] = ANYBODY, **more: Any
) -> Any:
    options = {"s3": {"endpoint_url": address, **who}}
    return {
        "async_predictions": {"results": place, "inline_max_bytes": 1000, **more},
        "store": {"storage_options": options},
    }


def prediction_id(location: str) -> str:
    return location.rpartition("/")[2]


class Gate:
    """A model that answers once its gate is open."""

    def __init__(self) -> None:
        self.open = asyncio.Event()

    async def __call__(self, request: InferenceRequest) -> InferenceResponse:
        await self.open.wait()
        return await echo(request)


async def large_response(request: InferenceRequest) -> InferenceResponse:
    return InferenceResponse(LARGE * int(request.inputs[0].value), "application/octet-stream", version="1.0")


def test_large_bodies_are_stored_survive_a_restart_and_are_deleted(
    start: Callable[..., Server], s3: S3
) -> None:
    gate = Gate()
    server = start(gate, **build_settings(s3.address))
    location = server.submit(body=LARGE)
    server.wait_until_in_thread(lambda: s3.names == {f"some/folder/{prediction_id(location)}.request"})
    server.stop()
    after = start(**build_settings(s3.address))
    assert after.result(location).body == LARGE
    after.wait_until_in_thread(lambda: s3.names == {f"some/folder/{prediction_id(location)}.answer"})
    small = after.submit()
    assert after.result(small).body == b"x"
    after.stop()
    last = start(**build_settings(s3.address))
    assert last.result(location).body == LARGE
    assert last.requests == []
    assert last("DELETE", location).status == 204
    last.wait_until_in_thread(lambda: s3.names == set())


def test_response_of_many_mebibytes_is_stored(start: Callable[..., Server], s3: S3) -> None:
    server = start(large_response, **build_settings(s3.address))
    response = server.result(server.submit(body=b"20"))
    assert (response.status, response.body == LARGE * 20) == (200, True)


def test_objects_of_cancelled_and_expired_predictions_are_deleted(
    start: Callable[..., Server], s3: S3, short_retry_intervals: None
) -> None:
    server = start(Gate(), **build_settings(s3.address))
    location = server.submit(body=LARGE)
    server.wait_for_state(location, "running")
    assert server("DELETE", location).json["state"] == "cancelled"
    server.wait_until_in_thread(lambda: s3.names == set())
    short = start(**build_settings(s3.address, retention_s=0.05))
    gone = short.submit(body=LARGE)
    short.wait_until_in_thread(lambda: bool(short.requests) and s3.names == set())
    assert short("GET", gone).status == 404


def test_unavailable_storage_is_named_and_affects_large_requests_only(
    start: Callable[..., Server], s3: S3
) -> None:
    server = start(**build_settings(s3.address))
    s3.stop()
    try:
        refused = server("POST", "/predictions/m", LARGE, ASYNC)
        assert (refused.status, refused["x-torchrelay-reason"]) == (503, "result_store_unavailable")
        assert int(refused["retry-after"]) > 0
        message = refused.json["message"]
        assert message.startswith("async_predictions.results (s3://kept/some/folder) cannot be used now: ")
        assert message.endswith("see that the head node reaches it")
        assert server.result(server.submit()).body == b"x"
        assert server("POST", "/predictions/m", LARGE).body == LARGE
    finally:
        s3.start()
    assert server.result(server.submit(body=LARGE)).body == LARGE


def test_response_waits_for_unavailable_storage(
    start: Callable[..., Server], s3: S3, short_retry_intervals: None
) -> None:
    gate = Gate()
    server = start(gate, **build_settings(s3.address))
    location = server.submit(body=LARGE)
    server.wait_until_in_thread(lambda: bool(server.requests))
    s3.stop()
    try:
        gate.open.set()
        other = server.submit()
        assert server.result(other).body == b"x"
        assert server("GET", location).json["state"] == "running"
    finally:
        s3.start()
    assert server.result(location).body == LARGE
    server.wait_until_in_thread(lambda: s3.names == {f"some/folder/{prediction_id(location)}.answer"})


def test_response_that_cannot_be_stored_fails_with_the_reason(
    start: Callable[..., Server], s3: S3, short_retry_intervals: None
) -> None:
    server = start(large_response, **build_settings(s3.address, max_queue_time_s=0))
    s3.stop()
    try:
        location = server.submit(body=b"1")
        document = server.wait_for_state(location, "failed")
        assert document["status"] is None
        assert "could not be stored: async_predictions.results (s3://kept/some/folder)" in document["error"]
        response = server("GET", f"{location}/result")
        assert (response.status, response["x-torchrelay-reason"]) == (410, "prediction_lost")
        assert document["error"] in response.json["message"] and "again" in response.json["message"]
    finally:
        s3.start()
    assert server("DELETE", location).status == 204


def test_server_starts_while_storage_is_unavailable(
    start: Callable[..., Server], s3: S3, short_retry_intervals: None
) -> None:
    before = start(Gate(), **build_settings(s3.address))
    location, small = before.submit(body=LARGE), before.submit()
    before.stop()
    s3.stop()
    try:
        after = start(**build_settings(s3.address))
        assert after.result(small).body == b"x"
        assert after("GET", location).json["state"] == "running"
    finally:
        s3.start()
    assert after.result(location).body == LARGE


def test_request_that_stays_unreadable_fails(
    start: Callable[..., Server], s3: S3, short_retry_intervals: None
) -> None:
    before = start(Gate(), **build_settings(s3.address))
    location = before.submit(body=LARGE)
    before.stop()
    s3.stop()
    try:
        after = start(**build_settings(s3.address, max_queue_time_s=0))
        assert "async_predictions.results" in after.wait_for_state(location, "failed")["error"]
    finally:
        s3.start()


def test_failed_deletion_is_retried(
    start: Callable[..., Server], s3: S3, short_retry_intervals: None
) -> None:
    server = start(**build_settings(s3.address))
    location = server.submit(body=LARGE)
    server.wait_for_state(location, "done")
    s3.stop()
    try:
        assert server("DELETE", location).status == 204
    finally:
        s3.start()
    assert server("GET", location).status == 404
    server.wait_until_in_thread(lambda: s3.names == set())


def test_externally_deleted_objects_are_reported_as_lost(start: Callable[..., Server], s3: S3) -> None:
    server = start(Gate(), **build_settings(s3.address))
    queued = server.submit(body=LARGE)
    server.stop()
    s3.client.delete_object(Bucket="kept", Key=f"some/folder/{prediction_id(queued)}.request")
    after = start(**build_settings(s3.address))
    assert "removed from async_predictions.results" in after.wait_for_state(queued, "failed")["error"]
    done = after.submit(body=LARGE)
    after.wait_for_state(done, "done")
    s3.client.delete_object(Bucket="kept", Key=f"some/folder/{prediction_id(done)}.answer")
    for location in (queued, done):
        response = after("GET", f"{location}/result")
        assert (response.status, response["x-torchrelay-reason"]) == (410, "prediction_lost")


def test_refused_access_names_user_and_permissions(start: Callable[..., Server], s3: S3) -> None:
    guest = s3.guest()
    s3.enforce_permissions(True)
    try:
        server = start(**build_settings(s3.address, who=guest))
        message = server("POST", "/predictions/m", LARGE, ASYNC).json["message"]
        assert "access was refused" in message and "AWS_ACCESS_KEY_ID" in message
        assert message.endswith("must list, read, write and delete there")
    finally:
        s3.enforce_permissions(False)


def test_missing_bucket_is_not_created(start: Callable[..., Server], s3: S3) -> None:
    server = start(**build_settings(s3.address, "s3://slip/folder"))
    message = server("POST", "/predictions/m", LARGE, ASYNC).json["message"]
    assert "there is no such bucket" in message
    assert [bucket["Name"] for bucket in s3.client.list_buckets()["Buckets"]] == ["kept"]


def test_unavailable_storage_is_logged_at_startup(
    start: Callable[..., Server], s3: S3, caplog: pytest.LogCaptureFixture
) -> None:
    server = start(**build_settings(s3.address, "s3://slip/folder"))
    server.wait_until_in_thread(
        lambda: "async_predictions.results (s3://slip/folder) cannot be used now" in caplog.text
    )


def test_hanging_storage_does_not_block_other_requests(
    start: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        blob_store, "_IDLE_TIMEOUT", 600.0
    )  # the limit of an idle connection, far above a slow machine's delays
    connected, finish = asyncio.Event(), asyncio.Event()
    writers: list[asyncio.StreamWriter] = []

    async def never_respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        connected.set()
        await finish.wait()
        writer.close()

    async def check_other_requests(server: Server, listener: asyncio.Server) -> None:
        submissions = [
            asyncio.ensure_future(server.send("POST", "/predictions/m", LARGE, ASYNC)) for _ in range(40)
        ]
        await connected.wait()
        # The server answers requests and small predictions while forty large ones wait for the
        # storage.
        assert (await server.send("POST", "/predictions/m", LARGE)).status == 200
        location = (await server.send("POST", "/predictions/m", b"x", ASYNC))["location"]
        while (response := await server.send("GET", f"{location}/result")).status == 202:
            await asyncio.sleep(0.005)
        assert response.body == b"x"
        assert not any(one.done() for one in submissions)
        finish.set()
        assert {(await one)["x-torchrelay-reason"] for one in submissions} == {"result_store_unavailable"}
        await close_listener(listener)
        for writer in writers:  # also of the connections that were accepted last
            with suppress(ConnectionError):
                await writer.wait_closed()

    async def listen() -> asyncio.Server:
        return await asyncio.start_server(never_respond, "127.0.0.1", 0)

    probe = start()
    listener = probe.loop.run_until_complete(listen())
    port = listener.sockets[0].getsockname()[1]
    server = start(**build_settings(f"http://127.0.0.1:{port}"))
    server.loop.run_until_complete(asyncio.wait_for(check_other_requests(server, listener), 120))


# Invalid locations


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ("memory://kept", "memory:// ends with the process"),
        ("https://example.com/kept", "https:// cannot be written"),
        ("nope://kept", "nope:// is not known; write a path, s3://bucket/folder"),
        ("s3://", "names no bucket; write s3://bucket/folder"),
        ("s3:///kept", "names no bucket"),
        ("file://kept", "file:///and/its/path"),
    ],
)
def test_invalid_location_stops_the_start(tmp_path: Path, place: str, expected: str) -> None:
    with pytest.raises(ConfigurationError, match=r"^async_predictions\.results: ") as error:
        main.build({"home": str(tmp_path), "async_predictions": {"results": place}})
    assert expected in str(error.value)


@pytest.mark.parametrize(
    ("place", "package", "cure"),
    [
        ("s3://kept/a", "s3fs", "pip install torchrelay[s3]"),
        ("sftp://me:word@host/a", "paramiko", "paramiko"),
    ],
)
def test_missing_package_stops_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, package: str, cure: str
) -> None:
    imported = sys.modules["fsspec.registry"]._registry  # implementations that are imported already
    monkeypatch.delitem(imported, place.partition(":")[0], raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigurationError, match="needs a package that is not installed here") as error:
        main.build({"home": str(tmp_path), "async_predictions": {"results": place}})
    assert cure in str(error.value) and "word" not in str(error.value)


def test_relative_path_is_below_home(start: Callable[..., Server], tmp_path: Path) -> None:
    server = start(async_predictions={"results": "kept/here", "inline_max_bytes": 10})
    location = server.submit(body=b"x" * 11)
    server.wait_for_state(location, "done")
    assert [file.name for file in (tmp_path / "kept/here").iterdir()] == [f"{prediction_id(location)}.answer"]


def test_unwritable_folder_is_named(start: Callable[..., Server], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in its place")
    server = start(async_predictions={"results": "file", "inline_max_bytes": 10})
    message = server("POST", "/predictions/m", b"x" * 11, ASYNC).json["message"]
    assert message.startswith(f"async_predictions.results ({tmp_path / 'file'}) cannot be used now: ")
