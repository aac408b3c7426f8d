"""The option ``profile:`` of model-config.yaml: a trace of a replica's first batches for Perfetto and
Chrome.
"""

from __future__ import annotations

import inspect
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

_DEFAULT_BATCHES = 3  # with ``profile: true``
_MAX_BATCHES = 100
_MAX_TRACES = 10  # the newest traces of one version
_DIGIT = "[0-9]"


def parse_batch_count(value: Any) -> int:
    """Return the number of batches that the value of ``profile:`` requests; 0 for none.

    Raises ValueError with the valid values.
    """
    if value is None or value is False:
        return 0
    count = _DEFAULT_BATCHES if value is True else None
    if isinstance(value, Mapping) and set(value) <= {"active"}:
        count = value.get("active", _DEFAULT_BATCHES)
    if type(count) is not int or not 1 <= count <= _MAX_BATCHES:
        raise ValueError(
            f"profile: {value!r} must be true, false or {{active: BATCHES}}, from 1 to {_MAX_BATCHES} of them"
        )
    return count


class BatchProfiler:
    """A replacement of a handler for its next ``count`` batches, which records them and writes their trace.

    It then calls ``on_complete``. The trace is written to ``directory`` as ``NAME-TIME-PID.json.gz``, by a
    separate thread; the ten newest of a name are kept. Calls must come from one thread, as torch's profiler
    requires; those of an async handler may overlap.
    """

    def __init__(
        self,
        handle: Callable[..., Any],
        count: int,
        directory: Path,
        name: str,
        on_complete: Callable[[], None],
    ) -> None:
        import torch

        self._handle = handle
        self._count = count
        self._directory = directory
        self._name = name
        self._on_complete = on_complete
        self._record = torch.profiler.record_function
        self._started_batches = self._finished_batches = 0
        self._profile = torch.profiler.profile(record_shapes=True)
        with torch.profiler.profile():  # the first one of a process is slow to start
            pass

    def __call__(self, data: Any, context: Any) -> Any:
        if not self._started_batches:
            self._profile.start()
        self._started_batches += 1
        if self._started_batches > self._count:  # batches of an async handler may overlap
            return self._handle(data, context)
        with self._record(f"batch {self._started_batches}"):
            try:
                result = self._handle(data, context)
            except BaseException:
                self._finish_batch()
                raise
        if inspect.isawaitable(result):
            return self._await_result(result)
        self._finish_batch()
        return result

    async def _await_result(self, result: Any) -> Any:
        try:
            return await result
        finally:
            self._finish_batch()

    def _finish_batch(self) -> None:
        self._finished_batches += 1
        if self._finished_batches == self._count:
            self._profile.stop()
            self._on_complete()
            threading.Thread(target=self._write_trace, name="profile", daemon=True).start()

    def _write_trace(self) -> None:
        file = self._directory / f"{self._name}-{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}.json.gz"
        temporary = self._directory / f".{file.name}"  # so that no partial trace has the final name
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._profile.export_chrome_trace(str(temporary))
            temporary.replace(file)
            for old in sorted(self._directory.glob(f"{self._name}-{_DIGIT * 8}T{_DIGIT * 6}-*.json.gz"))[
                :-_MAX_TRACES
            ]:
                old.unlink(missing_ok=True)
        except Exception:  # a full disk must not stop the model
            logger.exception("The trace could not be written to %s", file)
            return
        logger.info("The trace of %d batches is in %s; https://ui.perfetto.dev opens it", self._count, file)
