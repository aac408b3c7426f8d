"""The tap of a replica's requests: the one place through which every protocol and path leads.

It lies in front of the batcher, so a request is captured once, by the replica that answers it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from serve_app.dataplane.capture.recorder import MAX_QUEUED_BYTES, CaptureRecorder
from serve_app.domain.request import InferenceRequest, InferenceResponse, OnDone, ResponseStream
from serve_app.runtime.batching.concurrency_limit import ConcurrencyLimit
from serve_app.runtime.batching.interface import FutureBatcher


class CaptureTap(FutureBatcher):
    """A batcher's interface that offers answered requests to a recorder."""

    def __init__(self, limit: ConcurrencyLimit, recorder: CaptureRecorder) -> None:
        self._limit = limit
        self._recorder = recorder

    def enqueue(self, request: InferenceRequest) -> asyncio.Future[InferenceResponse | ResponseStream]:
        future = self._limit.enqueue(request)
        if self._recorder.wants(request):
            if future.done():  # its callback would run after the client has the stream
                self._record_future(request, future)
            else:
                future.add_done_callback(partial(self._record_future, request))
        return future

    def find_submit(self) -> Callable[[InferenceRequest, OnDone], Callable[[], None]]:
        return self.submit_nowait

    def submit_nowait(self, request: InferenceRequest, on_done: OnDone) -> Callable[[], None]:
        if not self._recorder.wants(request):
            return self._limit.submit_nowait(request, on_done)

        def complete(outcome: InferenceResponse | ResponseStream | Exception) -> None:
            self._record(request, outcome)
            on_done(outcome)

        return self._limit.submit_nowait(request, complete)

    def _record_future(
        self, request: InferenceRequest, future: asyncio.Future[InferenceResponse | ResponseStream]
    ) -> None:
        if not future.cancelled() and future.exception() is None:
            self._record(request, future.result())

    def _record(
        self, request: InferenceRequest, outcome: InferenceResponse | ResponseStream | Exception
    ) -> None:
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
