"""One batch's turn in the handler: its rows go in, and one reply or one error for each comes out."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

import handlers
from handlers.context import Context, Row
from handlers.errors import PredictionException
from serve_app.errors import (
    CountMismatch,
    HandlerFailed,
    HandlerSaid,
    InvalidInput,
    InvalidOutput,
    OutOfResources,
    OutputTooLarge,
    RelayError,
)
from serve_app.runtime import rows
from serve_app.runtime.row_form import RowForm
from serve_app.types import Call, Reply

_NOT_AMONG_HEADERS = {"content-type", "ts_stream_next"}  # a field of its own; and a door's word, not a handler's
_OURS = (handlers.__file__, os.path.dirname(__file__) + os.sep)  # where no frame is an author's

Emit = Callable[[int, "bytes | Reply"], None]


class Turn:
    """``failures`` collects what went wrong, in full, for the log; callers are told less.

    An error that stands for the whole batch is one object in every place. ``limit`` (bytes, 0: none) bounds
    each answer and each piece of a streamed one. A call that ``form`` refuses to read never comes to the handler.
    """

    def __init__(
        self, context: Context, calls: Sequence[Call], emit: Emit, version: str, form: RowForm, limit: int = 0
    ) -> None:
        self.failures: list[str] = []
        self.context = context
        self._calls = calls
        self._refused: dict[int, RelayError] = {}
        self._emit = emit
        self._version = version
        self._form = form
        self._limit = limit
        self._streamed: set[int] = set()
        self._broken: dict[int, RelayError] = {}  # rows whose stream ended in an error
        self._began = 0.0  # when the handler got its rows

    @property
    def ids(self) -> str:
        """The request ids of its rows, for the log."""
        return ", ".join(call.request_id for call in self._calls)

    def open(self, ahead: Sequence[Future[Any] | None] = ()) -> list[Any]:
        """The handler's ``data``, with the context open for it; ``ahead`` as in Runner.run. Empty: leave it alone."""
        try:
            data = self._read(ahead)
        except InvalidInput:
            data = self._read_each(ahead)
        calls = self._calls
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
        if isinstance(values, np.ndarray) and values.ndim:
            values = self._form.rows(self._calls, values)
        if not isinstance(values, list):
            detail = f"a handler returns a list with one element a row, this one returned {type(values).__name__}"
            self.failures.append(detail)
            return self._all([InvalidOutput(detail)] * count)
        if len(values) != count:
            detail = f"the handler got {count} rows and returned {len(values)} elements"
            self.failures.append(detail)
            return self._all([CountMismatch(detail)] * count)
        if self.context.metrics is not None:
            self.context.metrics.add_time("PredictionTime", round(seconds * 1000, 2))
        if self._broken:
            return self._all([self._broken.get(i) or self._reply(i, value) for i, value in enumerate(values)])
        return self._all([self._reply(i, value) for i, value in enumerate(values)])

    def fail(self, error: BaseException) -> list[Reply | RelayError]:
        """The answers where the handler raised."""
        return self._all([failure(error, self.failures)] * len(self._calls))

    def _all(self, answers: list[Any]) -> list[Reply | RelayError]:
        """The answers of the turn's rows, and those of the calls that could not be read, each in its place."""
        if not self._refused:
            return answers
        rest = iter(answers)
        return [self._refused.get(place) or next(rest) for place in range(len(answers) + len(self._refused))]

    def _read(self, ahead: Sequence[Future[Any] | None]) -> list[Any]:
        if ahead:
            return [self._row(call, begun) for call, begun in zip(self._calls, ahead, strict=True)]
        return [self._form.read(call) for call in self._calls]

    def _read_each(self, ahead: Sequence[Future[Any] | None]) -> list[Any]:
        """The rows of the calls that can be read; the others are answered already, and are no part of the turn."""
        data, kept = [], []
        for place, call in enumerate(self._calls):
            try:
                data.append(self._row(call, ahead[place] if ahead else None))
                kept.append(place)
            except InvalidInput as error:
                self._refused[place] = error
        emit, self._calls = self._emit, [self._calls[place] for place in kept]
        self._emit = lambda index, piece: emit(kept[index], piece)
        return data

    def _row(self, call: Call, begun: Future[Any] | None) -> Any:
        if begun is None or begun.cancelled() or begun.cancel():  # no thread has got to it: the handler does it itself
            return Row(self._form.read(call))
        return begun.result()

    def _on_emit(self, index: int, value: Any) -> None:
        if index in self._broken:
            return
        first = index not in self._streamed
        self._streamed.add(index)
        piece = self._reply(index, value)
        if not isinstance(piece, Reply):
            self._broken[index] = piece
        else:
            self._emit(index, piece if first else piece.body)

    def _reply(self, index: int, value: Any) -> Reply | RelayError:
        if isinstance(value, Exception):
            return failure(value, self.failures)
        status, phrase = self.context.get_response_status(index)
        content_type = None
        try:
            if index in self._streamed or status >= 400:  # pieces, and words: neither is a tensor
                body = rows.encode(value)
            else:
                body, content_type = self._form.write(self._calls[index], value)
        except RelayError as error:
            self.failures.append(str(error.args[0]))
            return error
        except MemoryError as error:
            return failure(error, self.failures)
        if 0 < self._limit < len(body):
            large = OutputTooLarge(len(body), self._limit)
            self.failures.append(str(large))
            return large
        named = self.context.get_response_headers(index)
        if not named:
            return Reply(body, content_type, status, phrase, (), self._version)
        others = tuple((name, str(value)) for name, value in named.items() if name.lower() not in _NOT_AMONG_HEADERS)
        content_type = content_type or self.context.get_response_content_type(index)
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
