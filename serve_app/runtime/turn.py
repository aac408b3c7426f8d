"""One batch's turn in the handler: its rows go in, and one reply or one error for each comes out."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import handlers
from handlers.context import Context, Row
from handlers.errors import PredictionException
from serve_app.errors import (
    CountMismatch,
    HandlerFailed,
    HandlerSaid,
    InvalidOutput,
    OutOfResources,
    OutputTooLarge,
    RelayError,
)
from serve_app.runtime import rows
from serve_app.types import Call, Reply

_NOT_AMONG_HEADERS = {"content-type", "ts_stream_next"}  # a field of its own; and a door's word, not a handler's
_OURS = (handlers.__file__, os.path.dirname(__file__) + os.sep)  # where no frame is an author's

Emit = Callable[[int, "bytes | Reply"], None]


class Turn:
    """``failures`` collects what went wrong, in full, for the log; callers are told less.

    An error that stands for the whole batch is one object in every place. ``limit`` (bytes, 0: none) bounds
    each answer and each piece of a streamed one.
    """

    def __init__(
        self, context: Context, calls: Sequence[Call], emit: Emit, version: str, decoded: bool, limit: int = 0
    ) -> None:
        self.failures: list[str] = []
        self.context = context
        self._calls = calls
        self._emit = emit
        self._version = version
        self._decoded = decoded
        self._limit = limit
        self._streamed: set[int] = set()
        self._broken: dict[int, RelayError] = {}  # rows whose stream ended in an error
        self._began = 0.0  # when the handler got its rows

    @property
    def ids(self) -> str:
        """The request ids of its rows, for the log."""
        return ", ".join(call.request_id for call in self._calls)

    def open(self, ahead: Sequence[Future[Any] | None] = ()) -> list[Any]:
        """The handler's ``data``, with the context open for it; ``ahead`` as in Runner.run."""
        calls = self._calls
        if ahead:
            data = [self._row(call, begun) for call, begun in zip(calls, ahead, strict=True)]
        else:
            data = [rows.row(call, self._decoded) for call in calls]
        self.context.begin(
            [call.request_id for call in calls],
            [rows.headers(call) for call in calls],
            [rows.parameters(call) for call in calls],
            self._on_emit,
        )
        metrics = self.context.metrics
        if metrics is not None:
            metrics.request_ids = self.context.request_ids
        self._began = time.perf_counter()
        return data

    def close(self, values: Any) -> list[Reply | RelayError]:
        """The answers that the handler's return value makes."""
        count = len(self._calls)
        seconds = time.perf_counter() - self._began
        if not isinstance(values, list):
            detail = f"a handler returns a list with one element a row, this one returned {type(values).__name__}"
            self.failures.append(detail)
            return [InvalidOutput(detail)] * count
        if len(values) != count:
            detail = f"the handler got {count} rows and returned {len(values)} elements"
            self.failures.append(detail)
            return [CountMismatch(detail)] * count
        if self.context.metrics is not None:
            self.context.metrics.add_time("PredictionTime", round(seconds * 1000, 2))
        if self._broken:
            return [self._broken.get(i) or self._reply(i, value) for i, value in enumerate(values)]
        return [self._reply(i, value) for i, value in enumerate(values)]

    def fail(self, error: BaseException) -> list[Reply | RelayError]:
        """The answers where the handler raised."""
        return [failure(error, self.failures)] * len(self._calls)

    def _row(self, call: Call, begun: Future[Any] | None) -> Row:
        if begun is None or begun.cancel():  # no thread has got to it: the handler does it itself
            return Row(rows.row(call, self._decoded))
        return begun.result()

    def _on_emit(self, index: int, value: Any) -> None:
        if index in self._broken:
            return
        piece = self._reply(index, value)
        if not isinstance(piece, Reply):
            self._broken[index] = piece
        elif index in self._streamed:
            self._emit(index, piece.body)
        else:
            self._streamed.add(index)
            self._emit(index, piece)

    def _reply(self, index: int, value: Any) -> Reply | RelayError:
        if isinstance(value, Exception):
            return failure(value, self.failures)
        try:
            body = rows.encode(value)
        except RelayError as error:
            self.failures.append(str(error.args[0]))
            return error
        except MemoryError as error:
            return failure(error, self.failures)
        if 0 < self._limit < len(body):
            large = OutputTooLarge(len(body), self._limit)
            self.failures.append(str(large))
            return large
        status, phrase = self.context.get_response_status(index)
        named = self.context.get_response_headers(index)
        if not named:
            return Reply(body, None, status, phrase, (), self._version)
        others = tuple((name, str(value)) for name, value in named.items() if name.lower() not in _NOT_AMONG_HEADERS)
        content_type = self.context.get_response_content_type(index)
        return Reply(body, content_type, status, phrase, others, self._version)


def failure(error: BaseException, failures: list[str]) -> HandlerFailed:
    """What a caller is told of what an author's code raised."""
    if isinstance(error, PredictionException):
        return HandlerSaid(error.message, error.error_code)
    text = trace(error)
    failures.append(text)
    # TorchServe's rule: whatever speaks of CUDA is taken for an exhausted device.
    if out_of_memory(error) or "CUDA" in str(error):
        return OutOfResources(text)
    return HandlerFailed(text)


def out_of_memory(error: BaseException | None) -> bool:
    """Whether the host's memory or the device's ran out, here or in what this error was raised from."""
    while error is not None:
        text = str(error)
        if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
            return True
        if "CUDA" in text and "out of memory" in text:
            return True
        error = error.__cause__
    return False


def trace(error: BaseException) -> str:
    """The traceback from the author's first frame on."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(_OURS):
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))
