"""Rows that a batch answers with an error while its other rows go on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import numpy as np

_batch: ContextVar[Rejections | None] = ContextVar("batch", default=None)  # a thread's own


class Rejections:
    """The errors of a batch of ``size`` rows, by row."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._errors: dict[int, Exception] = {}

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Until the end of the block, what this thread rejects is a row of this batch."""
        token = _batch.set(self)
        try:
            yield
        finally:
            _batch.reset(token)

    @property
    def complete(self) -> bool:
        """Whether no row is left."""
        return len(self._errors) >= self._size

    def over(self, output: Any) -> Any:
        """``output`` with the errors in their rows' places; as it is where it has not one value a row."""
        if not self._errors or not isinstance(output, (list, np.ndarray)) or len(output) != self._size:
            return output
        return [self._errors.get(index, value) for index, value in enumerate(output)]

    def alone(self) -> list[Exception]:
        """The answers of a batch that is ``complete``."""
        return [self._errors[index] for index in range(self._size)]

    @staticmethod
    def reject(index: int, error: Exception) -> None:
        """Answer row ``index`` of the batch that this thread works on with ``error``; without one, raise it."""
        batch = _batch.get()
        if batch is None:
            raise error
        batch._errors[index] = error
