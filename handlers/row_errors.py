"""Errors of single rows of a batch, whose other rows continue."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import numpy as np

_batch: ContextVar[RowErrors | None] = ContextVar("batch", default=None)  # each thread has its own


class RowErrors:
    """The errors of a batch of ``size`` rows, by row."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._errors: dict[int, Exception] = {}

    @contextlib.contextmanager
    def activate(self) -> Iterator[None]:
        """Record in this object what the current thread rejects, until the end of the block."""
        token = _batch.set(self)
        try:
            yield
        finally:
            _batch.reset(token)

    @property
    def is_complete(self) -> bool:
        """Return whether every row has an error."""
        return len(self._errors) >= self._size

    def merge_into(self, output: Any) -> Any:
        """Return ``output`` with the errors in their rows' places.

        ``output`` is returned unchanged where it does not have one value for each row.
        """
        if not self._errors or not isinstance(output, (list, np.ndarray)) or len(output) != self._size:
            return output
        return [self._errors.get(index, value) for index, value in enumerate(output)]

    def to_list(self) -> list[Exception]:
        """Return the errors of all rows; the batch must be complete."""
        return [self._errors[index] for index in range(self._size)]

    @staticmethod
    def reject(index: int, error: Exception) -> None:
        """Record ``error`` for row ``index`` of the batch that this thread runs; without such a batch, raise
        it.
        """
        batch = _batch.get()
        if batch is None:
            raise error
        batch._errors[index] = error
