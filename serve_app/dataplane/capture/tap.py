"""The tap of a replica's requests: the one place through which every protocol and path leads.

It lies in front of the batcher, so a request is captured once, by the replica that answers it.
"""

from __future__ import annotations

from dataclasses import replace

from serve_app.dataplane.capture.recorder import MAX_QUEUED_BYTES, CaptureRecorder
from serve_app.domain.request import Cancel, InferenceRequest, OnDone, Outcome, ResponseStream
from serve_app.runtime.backends import Backend


class CaptureTap(Backend):
    """A backend that offers answered requests to a recorder."""

    def __init__(self, backend: Backend, recorder: CaptureRecorder) -> None:
        self._backend = backend
        self._recorder = recorder

    def submit(self, request: InferenceRequest, on_done: OnDone) -> Cancel:
        if not self._recorder.wants(request):
            return self._backend.submit(request, on_done)

        def complete(outcome: Outcome) -> None:
            self._record(request, outcome)
            on_done(outcome)

        return self._backend.submit(request, complete)

    def _record(self, request: InferenceRequest, outcome: Outcome) -> None:
        if isinstance(outcome, ResponseStream):
            _StreamCapture(self._recorder, request, outcome)
        elif not isinstance(outcome, Exception):
            self._recorder.offer(request, outcome)


class _StreamCapture:
    """The chunks of a streamed response, which is captured when it ends."""

    def __init__(self, recorder: CaptureRecorder, request: InferenceRequest, stream: ResponseStream) -> None:
        self._recorder = recorder
        self._request = request
        self._head = stream.head
        self._chunks: list[bytes] = []
        self._size = 0
        stream.add_chunk_callback(self._add)
        stream.add_status_callback(self._end)

    def _add(self, chunk: bytes) -> None:
        if self._size < MAX_QUEUED_BYTES // 8:
            self._chunks.append(chunk)
            self._size += len(chunk)

    def _end(self, status: str) -> None:
        if status == "ok":
            self._recorder.offer(self._request, replace(self._head, body=b"".join(self._chunks)))
