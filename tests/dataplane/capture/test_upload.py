"""The upload of captured requests to an object store that is down at first."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from serve_app.control.drift.destination import CaptureDestination
from serve_app.dataplane.capture import upload as capture_upload
from serve_app.dataplane.capture.recorder import CaptureRecorder
from serve_app.domain.capture import CapturePolicy
from serve_app.domain.model import ModelRef
from serve_app.domain.request import InferenceRequest, InferenceResponse, InputPart
from serve_app.settings import ModelStoreSettings, Settings, TelemetrySettings
from tests.support.ports import refusing_port
from tests.support.s3_server import running_s3

pytestmark = pytest.mark.integration

REF = ModelRef("m", "1.0")
DESTINATION = "s3://captured/here"


class RemoteMethod:
    """A method of an actor, as Ray's handles have it, which runs here in a thread."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    async def remote(self, *args: Any) -> Any:
        return await asyncio.to_thread(self._call, *args)


class LocalManagement:
    """The part of Management that stores files."""

    def __init__(self, settings: Settings) -> None:
        destination = CaptureDestination(settings)
        self.store_capture = RemoteMethod(lambda *args: destination.write(DESTINATION, *args))


def test_files_wait_until_the_store_is_reachable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture_upload, "_PERIOD_S", 0.05)
    monkeypatch.setattr(capture_upload, "_RETRY_PERIOD_S", 0.05)
    servers = contextlib.ExitStack()
    port = servers.enter_context(refusing_port())
    address = f"http://127.0.0.1:{port}"
    options = {"s3": {"endpoint_url": address, "key": "any", "secret": "any"}}
    settings = Settings(
        store=ModelStoreSettings(storage_options=options),
        telemetry=TelemetrySettings(capture_destinations=("s3://captured/.*",)),
    )
    recorder = CaptureRecorder(REF, "d", CapturePolicy(destination=DESTINATION), tmp_path, "one")
    recorder.offer(InferenceRequest("m", inputs=(InputPart("body", b"1"),)), InferenceResponse(b"2"))
    recorder.close()
    (file,) = tmp_path.iterdir()

    async def upload() -> None:
        task = asyncio.create_task(capture_upload.upload_files(recorder, LocalManagement(settings), REF))
        await wait(lambda: "s3://captured/here cannot be written" in (recorder._errors.last))
        assert file.exists(), "it is sent again"
        client = await asyncio.to_thread(servers.enter_context, running_s3("captured", port))
        await wait(lambda: not file.exists())
        found = client.get_object(Bucket="captured", Key=f"here/m/1.0/{file.name}")
        assert b'"request_id"' in found["Body"].read()
        task.cancel()

    with servers:
        asyncio.run(upload())


def test_a_store_that_stays_down_loses_the_oldest_files_which_are_counted(tmp_path: Path) -> None:
    policy = CapturePolicy(destination=DESTINATION, max_megabytes=1)
    recorder = CaptureRecorder(REF, "d", policy, tmp_path, "one")
    for number in range(40):
        request = InferenceRequest("m", inputs=(InputPart("body", b"x" * 60_000),), request_id=str(number))
        recorder.offer(request, InferenceResponse(b"2"))
        if number % 4 == 3:
            deadline = time.monotonic() + 60
            while recorder.queued and time.monotonic() < deadline:
                time.sleep(0.01)
    recorder.close()
    kept = sum(file.read_bytes().count(b"\n") for file in tmp_path.iterdir())
    assert 0 < recorder.counts.upload_failed == 40 - kept


async def wait(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)
