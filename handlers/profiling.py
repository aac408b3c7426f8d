"""``profile:`` of model-config.yaml: a trace of a replica's first batches, as Perfetto and Chrome open it."""

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

_BATCHES = 3  # that ``profile: true`` means
_MOST = 100
_KEPT = 10  # traces of one version, the newest
_DIGIT = "[0-9]"


def batches(asked: Any) -> int:
    """The batches that ``profile:`` asks for, 0: none. ValueError with what to write."""
    if asked is None or asked is False:
        return 0
    count = _BATCHES if asked is True else None
    if isinstance(asked, Mapping) and set(asked) <= {"active"}:
        count = asked.get("active", _BATCHES)
    if type(count) is not int or not 1 <= count <= _MOST:
        raise ValueError(f"profile: {asked!r} must be true, false or {{active: BATCHES}}, from 1 to {_MOST} of them")
    return count


class Profile:
    """Stands in a handler's place for its next ``count`` batches, then calls ``done`` and writes their trace.

    It goes to ``directory`` as ``NAME-TIME-PID.json.gz``, by a thread of its own; the ten newest of a name are
    kept. Calls come from one thread, as torch's profiler wants it; those of an asynchronous handler may overlap.
    """

    def __init__(
        self, handle: Callable[..., Any], count: int, directory: Path, name: str, done: Callable[[], None]
    ) -> None:
        import torch

        self._handle = handle
        self._count = count
        self._directory = directory
        self._name = name
        self._done = done
        self._record = torch.profiler.record_function
        self._begun = self._ended = 0
        self._profile = torch.profiler.profile(record_shapes=True)
        with torch.profiler.profile():  # the first one of a process takes long to begin
            pass

    def __call__(self, data: Any, context: Any) -> Any:
        if not self._begun:
            self._profile.start()
        self._begun += 1
        if self._begun > self._count:  # of an asynchronous handler, while others are under way
            return self._handle(data, context)
        with self._record(f"batch {self._begun}"):
            try:
                answers = self._handle(data, context)
            except BaseException:
                self._end()
                raise
        if inspect.isawaitable(answers):
            return self._awaited(answers)
        self._end()
        return answers

    async def _awaited(self, answers: Any) -> Any:
        try:
            return await answers
        finally:
            self._end()

    def _end(self) -> None:
        self._ended += 1
        if self._ended == self._count:
            self._profile.stop()
            self._done()
            threading.Thread(target=self._write, name="profile", daemon=True).start()

    def _write(self) -> None:
        file = self._directory / f"{self._name}-{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}.json.gz"
        part = self._directory / f".{file.name}"  # nobody finds half a trace
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._profile.export_chrome_trace(str(part))
            part.replace(file)
            for old in sorted(self._directory.glob(f"{self._name}-{_DIGIT * 8}T{_DIGIT * 6}-*.json.gz"))[:-_KEPT]:
                old.unlink(missing_ok=True)
        except Exception:  # a full disk is no reason for a model to stop
            logger.exception("The trace could not be written to %s", file)
            return
        logger.info("The trace of %d batches is in %s; https://ui.perfetto.dev opens it", self._count, file)
