"""Large requests and answers of asynchronous predictions in object storage: a real S3 server, up, down and closed."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import fsspec.core  # noqa: F401 (with its registry)
import pytest
import requests
from deferred import ASYNC, Server, echo, lives
from moto.server import ThreadedMotoServer

from serve_app import main
from serve_app.control import results
from serve_app.deployments import deferrals
from serve_app.errors import ConfigurationError, ResultsUnreachable
from serve_app.types import Call, Reply

MIB = 1 << 20
LARGE = os.urandom(MIB) * 3
ANYBODY = {"key": "any", "secret": "any"}
KEYS = {"aws_access_key_id": "any", "aws_secret_access_key": "any"}


class S3:
    """An S3 server with the bucket ``kept``. What it holds outlives ``stop`` and ``start``."""

    def __init__(self) -> None:
        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self._server.start()
        host, self._port = self._server.get_host_and_port()
        self.address = f"http://{host}:{self._port}"
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

    def look_at_who_asks(self, yes: bool) -> None:
        requests.post(f"{self.address}/moto-api/reset-auth", data=b"0" if yes else b"Infinity", timeout=5)

    def guest(self) -> dict[str, str]:
        """The key of somebody who may do nothing."""
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
        requests.post(f"{server.address}/moto-api/reset", timeout=5)
        server.stop()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    with lives(tmp_path) as begin:
        yield begin


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is tried again is tried soon."""
    monkeypatch.setattr(deferrals, "_STORE_AGAIN", 0.05)
    monkeypatch.setattr(deferrals, "_SWEEP", 0.05)
    monkeypatch.setattr(ResultsUnreachable, "retry_after", 1)


def said(address: str, place: str = "s3://kept/some/folder", who: dict[str, str] = ANYBODY, **more: Any) -> Any:
    options = {"s3": {"endpoint_url": address, **who}}
    return {"asynchronous": {"results": place, "inline": 1000, **more}, "store": {"storage_options": options}}


def id_of(where: str) -> str:
    return where.rpartition("/")[2]


class Gate:
    """A model that answers when it may."""

    def __init__(self) -> None:
        self.open = asyncio.Event()

    async def __call__(self, call: Call) -> Reply:
        await self.open.wait()
        return await echo(call)


async def few_in_much_out(call: Call) -> Reply:
    return Reply(LARGE * int(call.inputs[0].value), "application/octet-stream", version="1.0")


def test_what_is_large_is_kept_there_outlives_a_restart_and_goes(start: Callable[..., Server], s3: S3) -> None:
    gate = Gate()
    server = start(gate, **said(s3.address))
    where = server.later(body=LARGE)
    server.until_is(lambda: s3.names == {f"some/folder/{id_of(where)}.request"})
    server.end()
    after = start(**said(s3.address))
    assert after.result(where).body == LARGE
    after.until_is(lambda: s3.names == {f"some/folder/{id_of(where)}.answer"})
    small = after.later()
    assert after.result(small).body == b"x"
    after.end()
    last = start(**said(s3.address))
    assert last.result(where).body == LARGE
    assert last.calls == []
    assert last("DELETE", where).status == 204
    last.until_is(lambda: s3.names == set())


def test_an_answer_of_many_mebibytes(start: Callable[..., Server], s3: S3) -> None:
    server = start(few_in_much_out, **said(s3.address))
    answer = server.result(server.later(body=b"20"))
    assert (answer.status, answer.body == LARGE * 20) == (200, True)


def test_what_is_cancelled_or_has_expired_is_removed_there(start: Callable[..., Server], s3: S3, hurried: None) -> None:
    server = start(Gate(), **said(s3.address))
    where = server.later(body=LARGE)
    server.until(where, "running")
    assert server("DELETE", where).json["state"] == "cancelled"
    server.until_is(lambda: s3.names == set())
    short = start(**said(s3.address, keep=0.05))
    gone = short.later(body=LARGE)
    short.until_is(lambda: bool(short.calls) and s3.names == set())
    assert short("GET", gone).status == 404


def test_storage_that_is_down_is_named_and_harms_nothing_else(start: Callable[..., Server], s3: S3) -> None:
    server = start(**said(s3.address))
    s3.stop()
    try:
        refused = server("POST", "/predictions/m", LARGE, ASYNC)
        assert (refused.status, refused["x-torchrelay-reason"]) == (503, "asynchronous_results")
        assert int(refused["retry-after"]) > 0
        message = refused.json["message"]
        assert message.startswith("asynchronous.results (s3://kept/some/folder) cannot be used now: ")
        assert message.endswith("see that the head node reaches it")
        assert server.result(server.later()).body == b"x"
        assert server("POST", "/predictions/m", LARGE).body == LARGE
    finally:
        s3.start()
    assert server.result(server.later(body=LARGE)).body == LARGE


def test_an_answer_waits_for_the_storage_that_is_down(start: Callable[..., Server], s3: S3, hurried: None) -> None:
    gate = Gate()
    server = start(gate, **said(s3.address))
    where = server.later(body=LARGE)
    server.until_is(lambda: bool(server.calls))
    s3.stop()
    try:
        gate.open.set()
        other = server.later()
        assert server.result(other).body == b"x"
        assert server("GET", where).json["state"] == "running"
    finally:
        s3.start()
    assert server.result(where).body == LARGE
    server.until_is(lambda: s3.names == {f"some/folder/{id_of(where)}.answer"})


def test_an_answer_that_cannot_be_stored_is_given_up_in_so_many_words(
    start: Callable[..., Server], s3: S3, hurried: None
) -> None:
    server = start(few_in_much_out, **said(s3.address, patience=0))
    s3.stop()
    try:
        where = server.later(body=b"1")
        document = server.until(where, "failed")
        assert document["status"] is None
        assert "could not be stored: asynchronous.results (s3://kept/some/folder)" in document["error"]
        answer = server("GET", f"{where}/result")
        assert (answer.status, answer["x-torchrelay-reason"]) == (410, "prediction_lost")
        assert document["error"] in answer.json["message"] and "again" in answer.json["message"]
    finally:
        s3.start()
    assert server("DELETE", where).status == 204


def test_a_server_starts_while_the_storage_is_down(start: Callable[..., Server], s3: S3, hurried: None) -> None:
    before = start(Gate(), **said(s3.address))
    where, small = before.later(body=LARGE), before.later()
    before.end()
    s3.stop()
    try:
        after = start(**said(s3.address))
        assert after.result(small).body == b"x"
        assert after("GET", where).json["state"] == "running"
    finally:
        s3.start()
    assert after.result(where).body == LARGE


def test_a_request_that_stays_unreadable_is_given_up(start: Callable[..., Server], s3: S3) -> None:
    before = start(Gate(), **said(s3.address))
    where = before.later(body=LARGE)
    before.end()
    s3.stop()
    try:
        after = start(**said(s3.address, patience=0))
        assert "asynchronous.results" in after.until(where, "failed")["error"]
    finally:
        s3.start()


def test_what_cannot_be_removed_now_is_removed_later(start: Callable[..., Server], s3: S3, hurried: None) -> None:
    server = start(**said(s3.address))
    where = server.later(body=LARGE)
    server.until(where, "done")
    s3.stop()
    try:
        assert server("DELETE", where).status == 204
    finally:
        s3.start()
    assert server("GET", where).status == 404
    server.until_is(lambda: s3.names == set())


def test_what_somebody_else_removed_is_lost_and_said_to_be(start: Callable[..., Server], s3: S3) -> None:
    server = start(Gate(), **said(s3.address))
    queued = server.later(body=LARGE)
    server.end()
    s3.client.delete_object(Bucket="kept", Key=f"some/folder/{id_of(queued)}.request")
    after = start(**said(s3.address))
    assert "removed from asynchronous.results" in after.until(queued, "failed")["error"]
    done = after.later(body=LARGE)
    after.until(done, "done")
    s3.client.delete_object(Bucket="kept", Key=f"some/folder/{id_of(done)}.answer")
    for where in (queued, done):
        answer = after("GET", f"{where}/result")
        assert (answer.status, answer["x-torchrelay-reason"]) == (410, "prediction_lost")


def test_storage_that_refuses_says_who_must_be_allowed_what(start: Callable[..., Server], s3: S3) -> None:
    guest = s3.guest()
    s3.look_at_who_asks(True)
    try:
        server = start(**said(s3.address, who=guest))
        message = server("POST", "/predictions/m", LARGE, ASYNC).json["message"]
        assert "access was refused" in message and "AWS_ACCESS_KEY_ID" in message
        assert message.endswith("must list, read, write and delete there")
    finally:
        s3.look_at_who_asks(False)


def test_no_bucket_is_made(start: Callable[..., Server], s3: S3) -> None:
    server = start(**said(s3.address, "s3://slip/folder"))
    message = server("POST", "/predictions/m", LARGE, ASYNC).json["message"]
    assert "there is no such bucket" in message
    assert [bucket["Name"] for bucket in s3.client.list_buckets()["Buckets"]] == ["kept"]


def test_an_operator_hears_of_it_at_the_start(
    start: Callable[..., Server], s3: S3, caplog: pytest.LogCaptureFixture
) -> None:
    server = start(**said(s3.address, "s3://slip/folder"))
    server.until_is(lambda: "asynchronous.results (s3://slip/folder) cannot be used now" in caplog.text)


def test_storage_that_hangs_holds_up_nobody_else(start: Callable[..., Server], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "_QUIET", 600.0)  # it is as patient as the machine may be slow
    asked, over = asyncio.Event(), asyncio.Event()

    async def hangs(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.set()
        await over.wait()
        writer.close()

    async def behaves(server: Server, listener: asyncio.Server) -> None:
        many = [asyncio.ensure_future(server.ask("POST", "/predictions/m", LARGE, ASYNC)) for _ in range(40)]
        await asked.wait()
        # The loop turns, calls are answered, small predictions too, while forty large ones wait for the storage.
        assert (await server.ask("POST", "/predictions/m", LARGE)).status == 200
        where = (await server.ask("POST", "/predictions/m", b"x", ASYNC))["location"]
        while (answer := await server.ask("GET", f"{where}/result")).status == 202:
            await asyncio.sleep(0.005)
        assert answer.body == b"x"
        assert not any(one.done() for one in many)
        listener.close()
        over.set()
        assert {(await one)["x-torchrelay-reason"] for one in many} == {"asynchronous_results"}

    async def listen() -> asyncio.Server:
        return await asyncio.start_server(hangs, "127.0.0.1", 0)

    probe = start()
    listener = probe.loop.run_until_complete(listen())
    port = listener.sockets[0].getsockname()[1]
    server = start(**said(f"http://127.0.0.1:{port}"))
    server.loop.run_until_complete(asyncio.wait_for(behaves(server, listener), 120))


# Where it cannot be


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("memory://kept", "memory:// ends with the process"),
        ("https://example.com/kept", "https:// cannot be written"),
        ("nope://kept", "nope:// is not known; write a path, s3://bucket/folder"),
        ("s3://", "names no bucket; write s3://bucket/folder"),
        ("s3:///kept", "names no bucket"),
        ("file://kept", "file:///and/its/path"),
    ],
)
def test_a_place_that_is_none_stops_the_start(tmp_path: Path, place: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=r"^asynchronous\.results: ") as error:
        main.build({"home": str(tmp_path), "asynchronous": {"results": place}})
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("place", "package", "cure"),
    [("s3://kept/a", "s3fs", "pip install torchrelay[s3]"), ("sftp://me:word@host/a", "paramiko", "paramiko")],
)
def test_a_package_that_is_not_there_stops_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, package: str, cure: str
) -> None:
    known = sys.modules["fsspec.registry"]._registry  # what it has imported already
    monkeypatch.delitem(known, place.partition(":")[0], raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigurationError, match="needs a package that is not installed here") as error:
        main.build({"home": str(tmp_path), "asynchronous": {"results": place}})
    assert cure in str(error.value) and "word" not in str(error.value)


def test_a_path_starts_at_home(start: Callable[..., Server], tmp_path: Path) -> None:
    server = start(asynchronous={"results": "kept/here", "inline": 10})
    where = server.later(body=b"x" * 11)
    server.until(where, "done")
    assert [file.name for file in (tmp_path / "kept/here").iterdir()] == [f"{id_of(where)}.answer"]


def test_a_folder_that_cannot_be_written(start: Callable[..., Server], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in its place")
    server = start(asynchronous={"results": "file", "inline": 10})
    message = server("POST", "/predictions/m", b"x" * 11, ASYNC).json["message"]
    assert message.startswith(f"asynchronous.results ({tmp_path / 'file'}) cannot be used now: ")
