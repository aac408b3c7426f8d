"""A wrapper of BaseHandler that splits batches into micro-batches, so that stages run in parallel."""

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
from handlers.row_errors import RowErrors

STAGES = ("preprocess", "inference", "postprocess")


class MicroBatching:
    """A runner of a BaseHandler's stages in separate threads, ``micro_batch_size`` rows at a time.

    While one micro-batch is in the model, the next is preprocessed and the previous one postprocessed. Assign
    it to the handler's ``handle``. ``parallelism`` has the number of threads of each stage, 1 by default; a
    stage with more threads is called by several of them at once.
    """

    def __init__(
        self, parent_handler: Any, micro_batch_size: int = 1, parallelism: Mapping[str, int] | None = None
    ) -> None:
        self.handler = parent_handler
        self.micro_batch_size = micro_batch_size
        self.thread_groups: dict[str, list[threading.Thread]] = {stage: [] for stage in STAGES}
        self._queues: dict[str, SimpleQueue[_MicroBatch | _StopThread]] = {
            stage: SimpleQueue() for stage in STAGES
        }
        self._parallelism: dict[str, int] = {}
        self._thread_state = threading.local()
        self._is_shut_down = False
        self.parallelism = dict.fromkeys(STAGES, 1) | dict(parallelism or {})

    @classmethod
    def from_config(cls, handler: Any, options: Any) -> MicroBatching:
        """Return a MicroBatching with the options of ``micro_batching`` in model-config.yaml.

        An example is ``{micro_batch_size: 4, parallelism: {preprocess: 2}}``.
        """
        keys = ("micro_batch_size", "parallelism")
        if not isinstance(options, Mapping) or not set(options) <= set(keys):
            raise ValueError(
                f"model-config.yaml: micro_batching is {options!r}. It holds "
                "micro_batch_size and parallelism: "
                "{micro_batch_size: 4, parallelism: {preprocess: 2, inference: 1, postprocess: 2}}."
            )
        size = options.get("micro_batch_size", 1)
        if not isinstance(size, int) or size < 1:
            raise ValueError(
                f"model-config.yaml: micro_batching.micro_batch_size is {size!r}; it is 1 or more."
            )
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
                raise ValueError(
                    f"parallelism: there is no stage {stage!r}.{hint} There are {', '.join(STAGES)}."
                )
            if not isinstance(count, int) or count < 1:
                raise ValueError(f"parallelism: {stage} is {count!r}; a stage has 1 thread or more.")
        self._parallelism |= parallelism
        for stage, count in self._parallelism.items():
            self._resize(stage, count)

    def shutdown(self) -> None:
        """Stop the threads after they have finished their queued micro-batches."""
        self._is_shut_down = True
        for stage in STAGES:
            self._resize(stage, 0)

    def __del__(self) -> None:
        for stage, threads in getattr(self, "thread_groups", {}).items():
            for _ in threads:
                self._queues[stage].put(_StopThread())

    def _resize(self, stage: str, count: int) -> None:
        threads = self.thread_groups[stage]
        place = STAGES.index(stage)
        next_queue = self._queues[STAGES[place + 1]] if place + 1 < len(STAGES) else None
        while len(threads) < count:
            thread = threading.Thread(
                target=_run_stage,
                args=(self.handler, stage, self._queues[stage], next_queue, self._thread_state),
                name=f"{stage}-{len(threads)}",
                daemon=True,
            )
            thread.start()
            threads.append(thread)
        while len(threads) > count:
            stop = _StopThread()
            self._queues[stage].put(stop)
            thread = stop.stopped.get()
            thread.join()
            threads.remove(thread)

    def get_micro_batch_idx(self) -> int | None:
        """Return, in a stage, the index from 0 of this thread's micro-batch in its batch; elsewhere None."""
        return getattr(self._thread_state, "micro_batch_idx", None)

    def handle(self, data: Any) -> list[Any]:
        """Run the stages over ``data``; raise a stage's error once every micro-batch is done."""
        jobs = self._process(data)
        for job in jobs:
            if job.error is not None:
                raise job.error
        return [value for job in jobs for value in job.value]

    def __call__(self, data: list[Any], context: Any) -> list[Any]:
        """Run the stages in the place of the handler's ``handle``; a stage's error fails only its
        micro-batch.
        """
        from handlers.base import BaseHandler

        handler = self.handler
        handler.context = context
        if os.environ.get("ENABLE_TORCH_PROFILER") or handler._is_describe() or handler._is_explain():
            return BaseHandler.handle(handler, data, context)
        started = time.perf_counter()
        jobs = self._process(data)
        errors = [job.error for job in jobs if job.error is not None]
        fatal = [error for error in errors if not isinstance(error, Exception)]  # cannot fail single rows
        if errors and (fatal or len(errors) == len(jobs)):
            raise (fatal or errors)[0]
        output: list[Any] = []
        for job in jobs:
            output.extend([job.error] * job.size if job.error is not None else job.value)
        if context.metrics is not None:
            context.metrics.add_time(
                "HandlerTime", round((time.perf_counter() - started) * 1000, 2), None, "ms"
            )
        return output

    def _process(self, data: Any) -> list[_MicroBatch]:
        if self._is_shut_down:
            raise RuntimeError("This MicroBatching was shut down: make a new one.")
        done: SimpleQueue[_MicroBatch] = SimpleQueue()
        jobs: list[_MicroBatch] = []
        for start in range(0, len(data), self.micro_batch_size):
            rows = data[start : start + self.micro_batch_size]
            jobs.append(_MicroBatch(len(jobs), len(rows), rows, done, RowErrors(len(rows))))
            self._queues["preprocess"].put(jobs[-1])
        for _ in jobs:
            done.get()
        return jobs


@dataclass
class _MicroBatch:
    """A micro-batch in the stages, with the gradient modes of the thread that sent it."""

    index: int
    size: int
    value: Any
    done: SimpleQueue[_MicroBatch]
    row_errors: RowErrors
    error: BaseException | None = None
    inference_mode: bool = field(default_factory=torch.is_inference_mode_enabled)
    gradients: bool = field(default_factory=torch.is_grad_enabled)


@dataclass
class _StopThread:
    """A message that stops one thread of a stage; the thread puts itself into ``stopped``."""

    stopped: SimpleQueue[threading.Thread] = field(default_factory=SimpleQueue)


def _run_stage(
    handler: Any, stage: str, queue: SimpleQueue[Any], next_queue: SimpleQueue[Any] | None, thread_state: Any
) -> None:
    """Run one stage's micro-batches, as the body of a thread.

    The thread holds no reference to its MicroBatching, so that this can be garbage-collected.
    """
    while True:
        job = queue.get()
        if isinstance(job, _StopThread):
            job.stopped.put(threading.current_thread())
            return
        thread_state.micro_batch_idx = job.index
        try:
            with torch.inference_mode(job.inference_mode), torch.set_grad_enabled(job.gradients):
                with job.row_errors.activate():
                    job.value = getattr(handler, stage)(job.value)
                is_finished = next_queue is None
                if is_finished:
                    job.value = job.row_errors.merge_into(job.value)
        except BaseException as error:  # SystemExit too: it must reach the caller, and not end this thread
            is_finished = True
            if isinstance(error, PredictionException) and job.row_errors.is_complete:
                job.value = job.row_errors.to_list()
            else:
                job.error = error
        (job.done if is_finished or next_queue is None else next_queue).put(job)
        del job  # free its rows before the wait for the next job
