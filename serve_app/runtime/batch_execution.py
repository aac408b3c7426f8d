"""Execution of one batch in the handler: rows go in, and one response or one error for each comes out."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from handlers.context import Context, Row
from handlers.errors import PredictionException
from handlers.loading import loader
from serve_app.domain.request import InferenceRequest, InferenceResponse, ResponseChunk
from serve_app.errors import (
    BatchSizeMismatch,
    HandlerFailed,
    HandlerOutOfMemory,
    HandlerRejected,
    InvalidInput,
    InvalidOutput,
    OutputTooLarge,
    RelayError,
    UnsupportedOutput,
)
from serve_app.runtime import codec
from serve_app.runtime.batching.request_queue import Emit
from serve_app.runtime.codec import NullifiedJSON, TensorRowCodec

_RESERVED_HEADERS = {"content-type", "ts_stream_next"}  # set by the response's fields and by protocols
_NON_FINITE = (
    "the handler returned NaN or an infinity, which JSON cannot hold, and runtime.non_finite_numbers is "
    "error; return finite numbers, or set it to null"
)
_INTERNAL_FILES = (loader.__file__, os.path.dirname(__file__) + os.sep)  # files without frames of a handler


class _RowViews(Sequence[Any]):
    """The result of a function for each request, computed when it is read: most handlers read none."""

    __slots__ = ("_read", "_requests")

    def __init__(
        self, requests: Sequence[InferenceRequest], read: Callable[[InferenceRequest], dict[str, Any]]
    ) -> None:
        self._requests = requests
        self._read = read

    def __len__(self) -> int:
        return len(self._requests)

    def __getitem__(self, index: Any) -> Any:
        return self._read(self._requests[index])


class BatchExecution:
    """An execution of one batch. ``failures`` collects the full errors for the log; clients get less.

    An error of the whole batch is one object for all rows. ``limit`` (bytes, 0: none) bounds each response
    and each chunk of a streamed one. ``refuse_non_finite``: NaN and infinities in JSON are an error of their
    row instead of null. A request that the tensor codec refuses never reaches the handler.
    """

    def __init__(
        self,
        context: Context,
        requests: Sequence[InferenceRequest],
        emit: Emit,
        version: str,
        tensor_codec: TensorRowCodec,
        limit: int = 0,
        refuse_non_finite: bool = False,
    ) -> None:
        self.failures: list[str] = []
        self.context = context
        self._calls = requests
        self._rejected: dict[int, RelayError] = {}
        self._emit = emit
        # Only the batcher of whole batches reports which callers have left.
        self._has_left: Callable[[int], bool] | None = getattr(emit, "has_left", None)
        self._version = version
        self._tensor_codec = tensor_codec
        self._max_response_size = limit
        self._refuse_non_finite = refuse_non_finite
        self._streamed: set[int] = set()
        self._failed_streams: dict[int, RelayError] = {}  # errors of rows whose stream failed
        self._started_at = 0.0  # when the handler received its rows

    @property
    def ids(self) -> str:
        """The request ids of its rows, for the log."""
        return ", ".join(request.request_id for request in self._calls)

    def open(self, prepared: Sequence[Future[Any] | None] = ()) -> list[Any]:
        """Return the handler's ``data``, and open the context for it; ``prepared`` is as in Runner.run.

        An empty list means that the handler must not run.
        """
        try:
            data = self._read(prepared)
        except InvalidInput:
            data = self._read_each(prepared)
        requests = self._calls
        self.context.begin(
            [request.request_id for request in requests],
            _RowViews(requests, codec.headers),
            _RowViews(requests, codec.parameters),
            self._on_emit,
            self._has_left,
        )
        metrics = self.context.metrics
        if metrics is not None:
            metrics.request_ids = self.context.request_ids
        self._started_at = time.perf_counter()
        return data

    def close(self, values: Any) -> list[InferenceResponse | RelayError]:
        """Return the responses to the handler's return value."""
        count = len(self._calls)
        seconds = time.perf_counter() - self._started_at
        if isinstance(values, np.ndarray) and values.ndim:
            values = self._tensor_codec.rows(self._calls, values)
        if not isinstance(values, list):
            detail = (
                f"a handler returns a list with one element a row, this one returned {type(values).__name__}"
            )
            self.failures.append(detail)
            return self._merge_rejected([InvalidOutput(detail)] * count)
        if len(values) != count:
            detail = f"the handler got {count} rows and returned {len(values)} elements"
            self.failures.append(detail)
            return self._merge_rejected([BatchSizeMismatch(detail)] * count)
        if self.context.metrics is not None:
            self.context.metrics.add_time("PredictionTime", round(seconds * 1000, 2))
        if self._failed_streams:
            return self._merge_rejected(
                [self._failed_streams.get(i) or self._response(i, value) for i, value in enumerate(values)]
            )
        return self._merge_rejected([self._response(i, value) for i, value in enumerate(values)])

    def fail(self, error: BaseException) -> list[InferenceResponse | RelayError]:
        """Return the responses where the handler raised."""
        return self._merge_rejected([handler_error(error, self.failures)] * len(self._calls))

    def _merge_rejected(self, answers: list[Any]) -> list[InferenceResponse | RelayError]:
        """Return the responses of all requests, with those of unreadable requests in their places."""
        if not self._rejected:
            return answers
        rest = iter(answers)
        return [
            self._rejected.get(place) or next(rest) for place in range(len(answers) + len(self._rejected))
        ]

    def _read(self, prepared: Sequence[Future[Any] | None]) -> list[Any]:
        if prepared:
            return [
                self._read_row(request, future) for request, future in zip(self._calls, prepared, strict=True)
            ]
        return [self._tensor_codec.read(request) for request in self._calls]

    def _read_each(self, prepared: Sequence[Future[Any] | None]) -> list[Any]:
        """Return the rows of readable requests; the others are answered, and leave the batch."""
        data, kept = [], []
        for place, request in enumerate(self._calls):
            try:
                data.append(self._read_row(request, prepared[place] if prepared else None))
                kept.append(place)
            except InvalidInput as error:
                self._rejected[place] = error
        emit, self._calls = self._emit, [self._calls[place] for place in kept]
        self._emit = lambda index, chunk: emit(kept[index], chunk)
        if (has_left := self._has_left) is not None:
            self._has_left = lambda index: has_left(kept[index])
        return data

    def _read_row(self, request: InferenceRequest, future: Future[Any] | None) -> Any:
        if future is None or future.cancelled() or future.cancel():  # no thread has prepared the row
            return Row(self._tensor_codec.read(request))
        return future.result()

    def _on_emit(self, index: int, value: Any) -> None:
        if index in self._failed_streams:
            return
        first = index not in self._streamed
        self._streamed.add(index)
        chunk = self._response(index, value)
        if not isinstance(chunk, InferenceResponse):
            self._failed_streams[index] = chunk
        else:
            self._emit(index, chunk if first else chunk.body)

    def _response(self, index: int, value: Any) -> InferenceResponse | RelayError:
        if isinstance(value, Exception):
            return handler_error(value, self.failures)
        has_properties = self.context.has_response_properties(index)
        status, phrase = self.context.get_response_status(index) if has_properties else (200, "")
        content_type = None
        try:
            if index in self._streamed or status >= 400:  # pieces, and words: neither is a tensor
                body = codec.encode(value)
            else:
                body, content_type = self._tensor_codec.write(self._calls[index], value)
        except RelayError as error:
            self.failures.append(str(error.args[0]))
            return error
        except MemoryError as error:
            return handler_error(error, self.failures)
        non_finite = type(body) is NullifiedJSON
        if non_finite:
            if self._refuse_non_finite:
                self.failures.append(_NON_FINITE)
                return UnsupportedOutput(_NON_FINITE)
            body = bytes(body)
        if 0 < self._max_response_size < len(body):
            large = OutputTooLarge(len(body), self._max_response_size)
            self.failures.append(str(large))
            return large
        named = self.context.get_response_headers(index) if has_properties else None
        if not named:
            return InferenceResponse(
                body, content_type, status, phrase, (), self._version, non_finite=non_finite
            )
        others = tuple(
            (name, str(value)) for name, value in named.items() if name.lower() not in _RESERVED_HEADERS
        )
        content_type = content_type or self.context.get_response_content_type(index)
        return InferenceResponse(
            body, content_type, status, phrase, others, self._version, non_finite=non_finite
        )


class DecodeStep(BatchExecution):
    """A step of continuous batching, after which the handler's criteria end some of the rows.

    It returns a ResponseChunk for each row that streams; its ``head`` is a response with the chunk.

    ``context.stopping_criteria[i]`` is called with the handler's value for row i: True ends its stream, False
    continues it, and None makes it a whole response. A handler without criteria returns whole responses.
    """

    _closing = False

    def close(self, values: Any) -> list[Any]:
        self._closing = True
        return super().close(list(values) if isinstance(values, np.ndarray) else values)

    def _response(self, index: int, value: Any) -> Any:
        reply = super()._response(index, value)
        criteria = self.context.stopping_criteria
        if not self._closing or not criteria or isinstance(reply, RelayError):
            return reply
        try:
            stops = criteria[index](value)
        except Exception as error:
            return handler_error(error, self.failures)
        assert isinstance(reply, InferenceResponse)
        return reply if stops is None else ResponseChunk(reply.body, bool(stops), reply)


def handler_error(error: BaseException, failures: list[str]) -> HandlerFailed:
    """Return the error that a client gets for an exception of a handler."""
    if isinstance(error, PredictionException):
        return HandlerRejected(error.message, error.error_code)
    text = format_traceback(error)
    failures.append(text)
    # TorchServe's rule: an error that mentions CUDA counts as an exhausted device.
    if is_out_of_memory(error) or "CUDA" in str(error):
        return HandlerOutOfMemory(text)
    return HandlerFailed(text)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether the memory of host or device ran out, here or in a cause of this error."""
    while error is not None:
        text = str(error)
        if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
            return True
        if "CUDA" in text and "out of memory" in text:
            return True
        if "DefaultCPUAllocator: " in text:  # torch has no class for the host's
            return True
        error = error.__cause__
    return False


def format_traceback(error: BaseException) -> str:
    """Return the traceback from the handler's first frame on."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(_INTERNAL_FILES):
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))
