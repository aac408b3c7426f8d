"""Captured requests in files: sampling, redaction, bounds, full disks, and reports."""

from __future__ import annotations

import asyncio
import json
import resource
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest

from serve_app.dataplane.capture import recorder as recorders
from serve_app.dataplane.capture.files import CaptureFiles
from serve_app.dataplane.capture.recorder import CaptureRecorder
from serve_app.dataplane.capture.reference import read_reference
from serve_app.dataplane.capture.tap import CaptureTap
from serve_app.domain import tensors
from serve_app.domain.capture import CapturePolicy
from serve_app.domain.drift_window import compare_windows
from serve_app.domain.model import ModelRef
from serve_app.domain.request import (
    Cancel,
    InferenceRequest,
    InferenceResponse,
    InputPart,
    OnDone,
    ResponseStream,
)
from serve_app.errors import ConfigurationError, HandlerFailed
from serve_app.runtime.backends import Backend
from serve_app.runtime.batching.admission_control import ConcurrencyLimit
from serve_app.telemetry.metrics import Meters
from tests.support.disk_calls import DiskCalls

REF = ModelRef("m", "1.0")
JSON = "application/json"
Start = Callable[..., CaptureRecorder]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started = []

    def start(**policy: Any) -> CaptureRecorder:
        recorder = CaptureRecorder(REF, "digest", CapturePolicy(**policy), tmp_path / "m/1.0", "replica#1")
        started.append(recorder)
        return recorder

    yield start
    for recorder in started:
        recorder.close()


def request(document: Any, number: int = 0, **more: Any) -> InferenceRequest:
    value = document if isinstance(document, bytes) else json.dumps(document).encode()
    content_type = more.pop("content_type", JSON)
    headers = {"authorization": "Bearer secret-key"}
    return InferenceRequest(
        "m", None, (InputPart("body", value, content_type),), headers, request_id=f"r{number}", **more
    )


def response(document: Any) -> InferenceResponse:
    return InferenceResponse(json.dumps(document).encode(), JSON)


def lines(folder: Path) -> list[dict[str, Any]]:
    files = sorted(folder.rglob("*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def test_a_request_is_stored_with_its_response_and_without_headers(start: Start, tmp_path: Path) -> None:
    recorder = start()
    recorder.offer(request({"x": 1}), response({"y": 2}))
    recorder.offer(request(b"\xff\xd8\xff\x00", 1, content_type="image/jpeg"), InferenceResponse(b"plain"))
    recorder.close()
    first, second = lines(tmp_path)
    assert first.pop("time") == pytest.approx(time.time(), abs=60)
    assert first == {
        "request_id": "r0",
        "model": "m",
        "version": "1.0",
        "inputs": [{"name": "body", "content_type": JSON, "json": {"x": 1}}],
        "output": {"status": 200, "content_type": JSON, "json": {"y": 2}},
    }
    image = {"name": "body", "content_type": "image/jpeg", "base64": "/9j/AA==", "bytes": 4}
    assert second["inputs"] == [image]
    assert second["output"] == {"status": 200, "text": "plain"}
    assert "secret-key" not in "".join(file.read_text() for file in tmp_path.rglob("*.jsonl"))


def test_redacted_values_are_neither_stored_nor_measured(start: Start, tmp_path: Path) -> None:
    recorder = start(redact=("$.user.email", "$.token"))
    recorder.offer(request({"user": {"email": "a@b.c", "age": 3}}), response({"token": "t0k3n"}))
    recorder.offer(request(b"a@b.c in a text", content_type="text/plain"), response(1))
    recorder.close()
    text = "".join(file.read_text() for file in tmp_path.rglob("*.jsonl"))
    assert "a@b.c" not in text and "t0k3n" not in text
    assert json.loads(text.splitlines()[0])["inputs"][0]["json"] == {
        "user": {"email": "[redacted]", "age": 3}
    }
    report = recorder.drain()
    assert report is not None and report.window is not None
    assert set(report.window.features) == {"input.user.age", "output"}


def test_tensors_are_stored_as_json(start: Start, tmp_path: Path) -> None:
    recorder = start()
    x = tensors.from_array("x", np.array([[1.5, 2.0]], np.float32))
    half = tensors.from_array("h", np.array([1.0], np.float16))
    inputs = (InputPart(*x.to_part()), InputPart(*half.to_part()))
    body = tensors.pack([tensors.from_array("y", np.array([3]))])
    recorder.offer(
        InferenceRequest("m", inputs=inputs, kind="tensors"),
        InferenceResponse(body, tensors.PACKED_MEDIA_TYPE),
    )
    recorder.close()
    (record,) = lines(tmp_path)
    assert record["inputs"][0]["json"] == [
        {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1.5, 2.0]}
    ]
    assert record["inputs"][1]["content_type"] == half.content_type, "JSON cannot hold FP16"
    assert record["output"]["json"] == [{"name": "y", "datatype": "INT64", "shape": [1], "data": [3]}]


def test_the_bytes_of_a_request_are_bounded(start: Start, tmp_path: Path) -> None:
    recorder = start(max_bytes_per_request=1000)
    recorder.offer(request("x" * 5000), response("y" * 500))
    recorder.close()
    (record,) = lines(tmp_path)
    assert record["output"]["json"] == "y" * 500
    stored = record["inputs"][0]
    assert stored["cut"] is True and stored["bytes"] == 5002
    assert len(stored["text"]) == 1000 - 502


def test_a_share_of_the_requests_is_captured(start: Start) -> None:
    recorder = start(sample=0.2)
    wanted = sum(recorder.wants(request(1)) for _ in range(5000))
    assert 800 < wanted < 1200
    assert not start(sample=0.0).wants(request(1))
    assert not start().wants(request(1, kind="explain")), "explanations are no predictions"


def test_a_full_queue_loses_requests_and_counts_them(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorders, "_PERIOD_S", 60.0)
    recorder = start()
    for number in range(recorders.MAX_QUEUED + 7):
        recorder.offer(request(number), response(1))
    recorder.offer(request(b"x" * (recorders.MAX_QUEUED_BYTES + 1)), response(1))
    recorder.close()
    report = recorder.drain()
    assert report is not None
    assert (report.captured, report.dropped) == (recorders.MAX_QUEUED, {"queue_full": 8})
    meters = Meters()
    recorder.record_metrics(meters)
    samples = {(name, dict(labels).get("reason")): value for name, labels, value in meters.samples()}
    assert samples["torchrelay_captured_requests_total", None] == recorders.MAX_QUEUED
    assert samples["torchrelay_capture_dropped_total", "queue_full"] == 8
    recorder.record_metrics(meters)
    assert sum(value for name, _, value in meters.samples() if "captured" in name) == recorders.MAX_QUEUED


def test_files_roll_and_the_oldest_are_removed(tmp_path: Path) -> None:
    files = CaptureFiles(tmp_path, "one", "jsonl", 40_000, 60.0)
    for number in range(100):
        files.write([{"number": number, "text": "x" * 1000}])
    files.close()
    stored = [record["number"] for record in lines(tmp_path)]
    assert stored == list(range(stored[0], 100)), "the newest are kept"
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 40_000 + 11_000
    assert files.take_removed() == stored[0]
    assert files.find_closed(60.0) == sorted(tmp_path.iterdir())


def test_a_file_that_another_replica_removed_is_replaced(tmp_path: Path) -> None:
    files = CaptureFiles(tmp_path, "one", "jsonl", 1 << 20, 60.0)
    files.write([{"n": 1}])
    for file in tmp_path.iterdir():
        file.unlink()
    files.write([{"n": 2}])
    files.close()
    assert [record["n"] for record in lines(tmp_path)] == [2]


def test_a_parquet_file_is_synced_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = DiskCalls.record(monkeypatch)
    files = CaptureFiles(tmp_path, "one", "parquet", 1 << 20, 60.0)
    files.write([{"request_id": "r", "time": 0.0, "model": "m", "version": "1", "inputs": [], "output": {}}])
    files.close()
    [path] = files.find_files()
    [rename] = [i for i, call in enumerate(calls) if call.kind == "rename"]
    assert path.stat().st_ino in {call.inode for call in calls[:rename]}


def test_a_damaged_parquet_file_can_be_removed(tmp_path: Path) -> None:
    (tmp_path / "20200101T000000-0001-old.parquet").write_bytes(b"x" * 2_000)
    files = CaptureFiles(tmp_path, "one", "parquet", 1_000, 60.0)
    files.remove_oldest()
    assert files.find_files() == [] and files.take_removed() == 0


def test_parquet_has_a_row_for_each_request(start: Start, tmp_path: Path) -> None:
    recorder = start(format="parquet")
    for number in range(3):
        recorder.offer(request({"x": number}, number), response({"y": number}))
    recorder.close()
    (file,) = tmp_path.rglob("*.parquet")
    rows = pyarrow.parquet.read_table(file).to_pylist()
    assert [row["request_id"] for row in rows] == ["r0", "r1", "r2"]
    assert json.loads(rows[2]["inputs"])[0]["json"] == {"x": 2}
    assert json.loads(rows[2]["output"])["json"] == {"y": 2}


def test_a_disk_without_space_loses_requests_until_it_has_some(start: Start, tmp_path: Path) -> None:
    """RLIMIT_FSIZE makes writes fail as a full disk does, in the middle of a line."""
    recorder = start()
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
        for number in range(50):
            recorder.offer(request("x" * 100, number), response(1))
        wait(lambda: recorder.counts.write_failed)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    failed = recorder.drain()
    assert failed is not None and failed.dropped["write_failed"] > 0
    assert "m/1.0" in failed.last_error and "free space" in failed.last_error
    recorder.offer(request("after", 51), response(1))
    recorder.close()
    assert lines(tmp_path)[-1]["request_id"] == "r51", "every line is whole"
    assert recorder.counts.captured + recorder.counts.write_failed == 51


def test_a_folder_that_cannot_be_created_fails_no_request(start: Start, tmp_path: Path) -> None:
    (tmp_path / "m").write_text("a file in the place of the folder")
    recorder = start()
    recorder.offer(request(1), response(1))
    recorder.close()
    report = recorder.drain()
    assert report is not None
    assert (report.captured, report.dropped) == (0, {"write_failed": 1})
    assert report.window is not None and report.window.requests == 1, "drift needs no disk"


def test_without_megabytes_only_drift_is_measured(start: Start, tmp_path: Path) -> None:
    recorder = start(max_megabytes=0)
    recorder.offer(request({"x": 1}), response(1))
    recorder.close()
    assert not list(tmp_path.rglob("*.jsonl"))
    report = recorder.drain()
    assert report is not None and report.captured == 1 and report.window is not None


def test_captured_files_are_a_reference(start: Start, tmp_path: Path) -> None:
    recorder = start()
    x = InputPart(*tensors.from_array("x", np.array([[1.0, 2.0]])).to_part())
    packed = InferenceResponse(
        tensors.pack([tensors.from_array("y", np.array([3.0]))]), tensors.PACKED_MEDIA_TYPE
    )
    for number in range(50):
        recorder.offer(request({"age": number, "pet": "cat"}, number), response({"cat": 0.9, "dog": 0.1}))
        recorder.offer(InferenceRequest("m", inputs=(x,), kind="tensors", request_id="t"), packed)
    recorder.close()
    report = recorder.drain()
    (file,) = tmp_path.rglob("*.jsonl")
    reference = read_reference(file, CapturePolicy(), "reference.jsonl")
    assert report is not None and report.window is not None
    assert set(reference.features) == set(report.window.features)
    assert {f["psi"] for f in compare_windows(reference, report.window)} == {0.0}


@pytest.mark.parametrize("text", ["", '{"a": 1}\n{"b":', '{"request_id": 1, "inputs": [{}]}'])
def test_a_reference_that_cannot_be_read_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "reference.jsonl"
    file.write_text(text)
    with pytest.raises(ConfigurationError, match=r"reference\.jsonl"):
        read_reference(file, CapturePolicy(), "reference.jsonl")


def test_a_reference_of_plain_documents(tmp_path: Path) -> None:
    file = tmp_path / "reference.jsonl"
    file.write_text('{"age": 1}\n\n{"input": {"age": 2}, "output": {"cat": 0.9, "dog": 0.1}}\n')
    found = read_reference(file, CapturePolicy(), "reference.jsonl")
    assert found.requests == 2
    assert set(found.features) == {"input.age", "output.label", "output.score"}


class _Answers(Backend):
    """A backend that answers at once: a stream, an error, or the input."""

    def submit(self, call: InferenceRequest, on_done: OnDone) -> Cancel:
        body = call.inputs[0].value
        if body == b'"fail"':
            on_done(HandlerFailed("traceback"))
        elif body == b'"stream"':
            on_done(ResponseStream(InferenceResponse(b""), _chunks()))
        else:
            on_done(InferenceResponse(body, JSON))
        return lambda: None


async def _chunks() -> Any:
    for word in (b"one ", b"two"):
        yield word


def test_every_way_into_the_replica_is_captured_once(start: Start, tmp_path: Path) -> None:
    recorder = start()

    async def run() -> None:
        tap = CaptureTap(ConcurrencyLimit(_Answers(), REF), recorder)  # type: ignore[arg-type]
        await tap.infer(request("submit", 1))
        await tap.infer_all([request("all", 2), request("fail", 3)])
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        tap.submit(request("nowait", 4), done.set_result)
        await done
        stream = await tap.infer(request("stream", 5))
        assert isinstance(stream, ResponseStream)
        assert [chunk async for chunk in stream] == [b"one ", b"two"]
        left = await tap.infer(request("stream", 6))
        await left.aclose()  # a client that disconnected

    asyncio.run(run())
    recorder.close()
    assert {record["request_id"]: record["output"].get("json", record["output"].get("text")) for record in
            lines(tmp_path)} == {"r1": "submit", "r2": "all", "r4": "nowait", "r5": "one two"}  # fmt: skip
    assert recorder.counts.captured == 4


def wait(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
