"""The recorder of captured requests in a replica: a bounded queue, and a thread that stores and measures.

A request costs the event loop a random number and an append. A full queue, a full disk and an unreachable
object store lose captured requests, which are counted; they delay and fail no request of a client.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import random
from typing import Any, NamedTuple

import orjson

from serve_app.dataplane.capture.features import find_features
from serve_app.dataplane.capture.files import CaptureFiles
from serve_app.dataplane.stored_values import find_paths, to_stored_input, to_stored_response
from serve_app.domain import tensors
from serve_app.domain.capture import CapturePolicy
from serve_app.domain.drift_window import FeatureWindow
from serve_app.domain.model import ModelRef
from serve_app.domain.request import InferenceRequest, InferenceResponse, InputPart
from serve_app.errors import RelayError
from serve_app.telemetry.metrics import Meters

log = logging.getLogger(__name__)

MAX_QUEUED = 2_000  # requests that wait for the thread
MAX_QUEUED_BYTES = 32 << 20
_PERIOD_S = 0.2  # between two rounds of the thread, each of which stores all waiting requests
_FILE_PERIOD_S = 300.0  # after which a file is closed
_REMOTE_FILE_PERIOD_S = 30.0  # the same, of files for an object store
_REPORT_PERIOD_S = 1.0  # between two reports to Management
_WARNING_PERIOD_S = 60.0  # between two warnings
_CLOSE_TIMEOUT_S = 5.0  # for which a replica that stops waits for the thread


class CaptureReport(NamedTuple):
    """The captured requests of a process since its last report; ``digest`` is that of the archive."""

    ref: ModelRef
    digest: str
    captured: int
    dropped: dict[str, int]  # by reason
    last_error: str
    last_error_time: float  # in seconds since the epoch; 0: there was none
    window: FeatureWindow | None


class _CapturedRequest(NamedTuple):
    request: InferenceRequest
    response: InferenceResponse
    time: float  # in seconds since the epoch
    size: int


@dataclass
class CaptureCounts:
    """Counts of captured requests; each field is changed by one thread."""

    captured: int = 0
    queue_full: int = 0
    write_failed: int = 0
    upload_failed: int = 0
    invalid: int = 0

    def dropped(self) -> dict[str, int]:
        names = ("queue_full", "write_failed", "upload_failed", "invalid")
        return {name: getattr(self, name) for name in names}


@dataclass
class _Errors:
    """The last error of storing, which is logged at most once a minute."""

    last: str = ""
    time: float = 0.0
    logged_at: float = field(default=-_WARNING_PERIOD_S)

    def set(self, ref: ModelRef, message: str) -> None:
        self.last, self.time = message, round(time.time(), 3)
        if time.monotonic() - self.logged_at >= _WARNING_PERIOD_S:
            self.logged_at = time.monotonic()
            log.warning("%s: captured requests are lost: %s", ref.app, message)


class CaptureRecorder:
    """The recorder of one replica. ``offer`` and ``drain`` belong to the event loop.

    ``folder`` is that of the version's files on this node, ``process`` a name of this process.
    """

    def __init__(self, ref: ModelRef, digest: str, policy: CapturePolicy, folder: Path, process: str) -> None:
        self.policy = policy
        self.counts = CaptureCounts()
        self._ref = ref
        self._digest = digest
        period = _REMOTE_FILE_PERIOD_S if policy.is_remote else _FILE_PERIOD_S
        name = "".join(c if c.isalnum() else "_" for c in process)
        self.files = CaptureFiles(folder, name, policy.format, policy.max_megabytes << 20, period)
        self._queue: deque[_CapturedRequest] = deque()
        self._added = self._removed = 0  # bytes, of which the difference waits
        self._window = FeatureWindow(policy.max_features)
        self._lock = threading.Lock()  # of the window
        self._errors = _Errors()
        self._reported = CaptureCounts()
        self._metered = CaptureCounts()
        self._next_report = 0.0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="capture", daemon=True)
        self._thread.start()

    # On the event loop

    def wants(self, request: InferenceRequest) -> bool:
        """Return whether this request belongs to the sample."""
        return request.kind in ("predict", "tensors") and random() < self.policy.sample

    def offer(self, request: InferenceRequest, response: InferenceResponse) -> None:
        """Add a request with its response, unless the queue is full."""
        size = len(response.body) + sum(len(part.value) for part in request.inputs)
        if len(self._queue) >= MAX_QUEUED or self._added - self._removed + size > MAX_QUEUED_BYTES:
            self.counts.queue_full += 1
            return
        self._added += size
        self._queue.append(_CapturedRequest(request, response, time.time(), size))

    @property
    def queued(self) -> int:
        """The number of requests that wait for the thread."""
        return len(self._queue)

    def drain(self) -> CaptureReport | None:
        """Return the report since the last one, at most once a second; None where there is nothing new."""
        if time.monotonic() < self._next_report:
            return None
        with self._lock:
            window, self._window = self._window, FeatureWindow(self.policy.max_features)
        captured = self.counts.captured - self._reported.captured
        before, now = self._reported.dropped(), self.counts.dropped()
        dropped = {name: now[name] - before[name] for name in now if now[name] > before[name]}
        if not captured and not dropped and not window.requests:
            return None
        self._next_report = time.monotonic() + _REPORT_PERIOD_S
        self._reported = CaptureCounts(self.counts.captured, **now)
        has_features = self.policy.drift and window.requests > 0
        return CaptureReport(
            self._ref,
            self._digest,
            captured,
            dropped,
            self._errors.last,
            self._errors.time,
            window if has_features else None,
        )

    def record_metrics(self, meters: Meters) -> None:
        """Add the counts since the last call to the counters."""
        before, now = self._metered.dropped(), self.counts.dropped()
        new = {name: now[name] - before[name] for name in now}
        captured = self.counts.captured
        meters.captured(self._ref.name, self._ref.version, captured - self._metered.captured, new)
        self._metered = CaptureCounts(captured, **now)

    def set_error(self, message: str) -> None:
        """Keep and log the error of an upload."""
        self._errors.set(self._ref, message)

    def close(self) -> None:
        """Store the waiting requests and end the thread, within ``_CLOSE_TIMEOUT_S``. Blocking."""
        self._closed.set()
        self._thread.join(_CLOSE_TIMEOUT_S)

    # In the thread

    def _run(self) -> None:
        while not self._closed.wait(_PERIOD_S):
            self._store_waiting()
        self._store_waiting()
        if self.policy.stores:
            self._try(self.files.close)
            self.counts.write_failed += self.files.take_unwritten()
        self._next_report = 0.0  # the last report is due at once

    def _store_waiting(self) -> None:
        batch = [self._queue.popleft() for _ in range(len(self._queue))]
        records = []
        captured_count = 0
        for captured in batch:
            self._removed += captured.size
            try:
                if self.policy.stores:
                    records.append(self._build_record(captured))
                if self.policy.drift:
                    features = find_features(captured.request, captured.response, self.policy.redact)
                    with self._lock:
                        self._window.add(features)
                captured_count += 1
            except Exception as error:  # of unexpected data: the next request is captured
                self.counts.invalid += 1
                self._errors.set(self._ref, f"{captured.request.request_id}: {error!r}")
        if not self.policy.stores or self._try(partial(self.files.write, records)):
            self.counts.captured += captured_count
        else:
            self.counts.write_failed += captured_count
        if self.policy.stores:
            self._try(self.files.roll)
            self.counts.write_failed += self.files.take_unwritten()
            removed = self.files.take_removed()
            self.counts.upload_failed += removed if self.policy.is_remote else 0

    def _try(self, work: Callable[[], Any]) -> bool:
        """Call a method of the files; return whether it raised no OSError, as that of a full disk."""
        try:
            work()
        except OSError as error:
            cure = "free space, or correct the folder's rights"
            self._errors.set(self._ref, f"{self.files.folder}: {error.strerror or error}; {cure}")
            return False
        return True

    def _build_record(self, captured: _CapturedRequest) -> dict[str, Any]:
        """Return what is stored of a request: no header, and no value at a redacted path."""
        request, policy = captured.request, self.policy
        left = policy.max_bytes_per_request
        response = _decode_response(captured.response, policy.redact, left)
        output = to_stored_response(response, policy.redact, left)
        left = max(0, left - len(response.body))
        inputs = []
        for part in (_decode_part(part, policy.max_bytes_per_request) for part in request.inputs):
            inputs.append({"name": part.name, **to_stored_input(part, policy.redact, left)})
            left = max(0, left - len(part.value))
        return {
            "request_id": request.request_id,
            "time": round(captured.time, 3),
            "model": self._ref.name,
            "version": self._ref.version,
            "inputs": inputs,
            "output": output,
        }


def _decode_part(part: InputPart, limit: int) -> InputPart:
    """Return a tensor as JSON; other inputs, and large tensors, as they are."""
    content_type = part.content_type or ""
    if len(part.value) > limit or not content_type.startswith("application/x-tensor;"):
        return part
    try:
        tensor = tensors.from_content_type(part.name, part.value, content_type)
        return InputPart(part.name, _encode_tensors([tensor]), "application/json")
    except RelayError:  # of a data type that JSON cannot hold
        return part


def _decode_response(response: InferenceResponse, redact: tuple[str, ...], limit: int) -> InferenceResponse:
    """Return tensors as JSON, without redacted ones; other bodies, and large ones, as they are."""
    if len(response.body) > limit or response.content_type != tensors.PACKED_MEDIA_TYPE:
        return response
    try:
        shown = (t for t in tensors.unpack(response.body) if find_paths(t.name, redact) is not None)
        body = _encode_tensors(shown)
        return InferenceResponse(body, "application/json", response.status)
    except RelayError:
        return response


def _encode_tensors(found: Iterable[tensors.Tensor]) -> bytes:
    """Return tensors as the Open Inference Protocol writes them in JSON."""
    return orjson.dumps(
        [
            {
                "name": tensor.name,
                "datatype": tensor.datatype,
                "shape": list(tensor.shape),
                "data": orjson.Fragment(tensor.to_json()),
            }
            for tensor in found
        ]
    )
