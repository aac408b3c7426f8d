"""A batch cut into micro-batches, so that the stages of a handler work side by side."""

from __future__ import annotations

import difflib
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import torch

from handlers.errors import PredictionException
from handlers.rejections import Rejections

STAGES = ("preprocess", "inference", "postprocess")


class MicroBatching:
    """Runs a BaseHandler's stages in threads of their own, ``micro_batch_size`` rows at a time.

    While one micro-batch is in the model, the next is being read and the one before written. Put it in the
    place of the handler's ``handle``. ``parallelism`` has the number of threads of each stage, 1 unless it
    says otherwise; a stage with more than one is called by several threads at once.
    """

    def __init__(
        self, parent_handler: Any, micro_batch_size: int = 1, parallelism: Mapping[str, int] | None = None
    ) -> None:
        self.handler = parent_handler
        self.micro_batch_size = micro_batch_size
        self.thread_groups: dict[str, list[threading.Thread]] = {stage: [] for stage in STAGES}
        self._inboxes: dict[str, SimpleQueue[_Job | _Leave]] = {stage: SimpleQueue() for stage in STAGES}
        self._parallelism: dict[str, int] = {}
        self._here = threading.local()
        self._ended = False
        self.parallelism = dict.fromkeys(STAGES, 1) | dict(parallelism or {})

    @classmethod
    def of(cls, handler: Any, options: Any) -> MicroBatching:
        """As ``micro_batching`` of model-config.yaml says: ``{micro_batch_size: 4, parallelism: {preprocess: 2}}``."""
        known = ("micro_batch_size", "parallelism")
        if not isinstance(options, Mapping) or not set(options) <= set(known):
            raise ValueError(
                f"model-config.yaml: micro_batching is {options!r}. It holds micro_batch_size and parallelism: "
                "{micro_batch_size: 4, parallelism: {preprocess: 2, inference: 1, postprocess: 2}}."
            )
        size = options.get("micro_batch_size", 1)
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"model-config.yaml: micro_batching.micro_batch_size is {size!r}; it is 1 or more.")
        return cls(handler, size, options.get("parallelism"))

    @property
    def parallelism(self) -> dict[str, int]:
        """The number of threads of each stage; assign a dict to change those that it names."""
        return dict(self._parallelism)

    @parallelism.setter
    def parallelism(self, parallelism: Mapping[str, int]) -> None:
        for stage, count in parallelism.items():
            if stage not in STAGES:
                near = difflib.get_close_matches(str(stage), STAGES, 1)
                hint = f" Did you mean {near[0]!r}?" if near else ""
                raise ValueError(f"parallelism: there is no stage {stage!r}.{hint} There are {', '.join(STAGES)}.")
            if not isinstance(count, int) or count < 1:
                raise ValueError(f"parallelism: {stage} is {count!r}; a stage has 1 thread or more.")
        self._parallelism |= parallelism
        for stage, count in self._parallelism.items():
            self._resize(stage, count)

    def shutdown(self) -> None:
        """End the threads; what is in them is finished first."""
        self._ended = True
        for stage in STAGES:
            self._resize(stage, 0)

    def __del__(self) -> None:
        for stage, threads in getattr(self, "thread_groups", {}).items():
            for _ in threads:
                self._inboxes[stage].put(_Leave())

    def _resize(self, stage: str, count: int) -> None:
        threads = self.thread_groups[stage]
        place = STAGES.index(stage)
        following = self._inboxes[STAGES[place + 1]] if place + 1 < len(STAGES) else None
        while len(threads) < count:
            thread = threading.Thread(
                target=_work,
                args=(self.handler, stage, self._inboxes[stage], following, self._here),
                name=f"{stage}-{len(threads)}",
                daemon=True,
            )
            thread.start()
            threads.append(thread)
        while len(threads) > count:
            leave = _Leave()
            self._inboxes[stage].put(leave)
            gone = leave.by.get()
            gone.join()
            threads.remove(gone)

    def get_micro_batch_idx(self) -> int | None:
        """In a stage: which micro-batch of its batch this thread works on, from 0; elsewhere None."""
        return getattr(self._here, "micro_batch_idx", None)

    def handle(self, data: Any) -> list[Any]:
        """The stages over ``data``; what a stage raises is raised here, once every micro-batch is done."""
        jobs = self._run(data)
        for job in jobs:
            if job.error is not None:
                raise job.error
        return [value for job in jobs for value in job.value]

    def __call__(self, data: list[Any], context: Any) -> list[Any]:
        """In the place of the handler's ``handle``: what a stage raises answers the rows of its micro-batch alone."""
        from handlers.base import BaseHandler

        handler = self.handler
        handler.context = context
        if os.environ.get("ENABLE_TORCH_PROFILER") or handler._is_describe() or handler._is_explain():
            return BaseHandler.handle(handler, data, context)
        started = time.perf_counter()
        jobs = self._run(data)
        errors = [job.error for job in jobs if job.error is not None]
        fatal = [error for error in errors if not isinstance(error, Exception)]  # no row can be answered with those
        if errors and (fatal or len(errors) == len(jobs)):
            raise (fatal or errors)[0]
        output: list[Any] = []
        for job in jobs:
            output.extend([job.error] * job.size if job.error is not None else job.value)
        if context.metrics is not None:
            context.metrics.add_time("HandlerTime", round((time.perf_counter() - started) * 1000, 2), None, "ms")
        return output

    def _run(self, data: Any) -> list[_Job]:
        if self._ended:
            raise RuntimeError("This MicroBatching was shut down: make a new one.")
        done: SimpleQueue[_Job] = SimpleQueue()
        jobs = []
        for start in range(0, len(data), self.micro_batch_size):
            rows = data[start : start + self.micro_batch_size]
            jobs.append(_Job(len(jobs), len(rows), rows, done, Rejections(len(rows))))
            self._inboxes["preprocess"].put(jobs[-1])
        for _ in jobs:
            done.get()
        return jobs


@dataclass
class _Job:
    """A micro-batch on its way through the stages, in the modes of the thread that sent it."""

    index: int
    size: int
    value: Any
    done: SimpleQueue[_Job]
    rejections: Rejections
    error: BaseException | None = None
    inference_mode: bool = field(default_factory=torch.is_inference_mode_enabled)
    gradients: bool = field(default_factory=torch.is_grad_enabled)


@dataclass
class _Leave:
    """Tells one thread of a stage to end; it says by which."""

    by: SimpleQueue[threading.Thread] = field(default_factory=SimpleQueue)


def _work(handler: Any, stage: str, inbox: SimpleQueue[Any], following: SimpleQueue[Any] | None, here: Any) -> None:
    """One thread of a stage. It knows nothing of its MicroBatching, so that nobody's last reference is here."""
    while True:
        job = inbox.get()
        if isinstance(job, _Leave):
            job.by.put(threading.current_thread())
            return
        here.micro_batch_idx = job.index
        try:
            with torch.inference_mode(job.inference_mode), torch.set_grad_enabled(job.gradients):
                with job.rejections.taken():
                    job.value = getattr(handler, stage)(job.value)
                over = following is None
                if over:
                    job.value = job.rejections.over(job.value)
        except BaseException as error:  # SystemExit too: it is the caller's to see, not this thread's
            over = True
            if isinstance(error, PredictionException) and job.rejections.complete:
                job.value = job.rejections.alone()
            else:
                job.error = error
        (job.done if over or following is None else following).put(job)
        del job  # its rows are not to live until the next comes
