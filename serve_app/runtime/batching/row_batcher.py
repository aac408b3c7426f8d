"""The batcher of a version's rows, as its spec and its handler need it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from serve_app.domain.model import ModelSpec
from serve_app.runtime.batching.async_batcher import AsyncBatcher
from serve_app.runtime.batching.batcher import Batcher
from serve_app.runtime.batching.continuous_batcher import ContinuousBatcher
from serve_app.runtime.batching.interface import RequestBatcher
from serve_app.runtime.handler_thread import HandlerThread
from serve_app.runtime.runner import Runner
from serve_app.telemetry.metrics import Meters


def create_row_batcher(
    runner: Runner,
    run: Callable[..., Any],
    spec: ModelSpec,
    meters: Meters,
    handler_thread: HandlerThread,
    on_hung: Callable[[str], None],
) -> RequestBatcher:
    """Return the batcher of a loaded handler; ``run`` is ``Runner.run``, or that of a group of ranks."""
    limits: dict[str, Any] = {
        "handler_thread": handler_thread,
        "queue_size": spec.job_queue_size,
        "response_timeout": spec.response_timeout,
        "on_hung": on_hung,
        "signature": runner.signature,
    }
    if runner.loop is not None:
        return AsyncBatcher(runner.run_async, runner.loop, spec.ref, meters, **limits)
    if spec.continuous_batching:
        # Twice as many where there are sequences: a request to a running stream needs a place beside it.
        size = spec.batch_size * (2 if spec.sequence_batching else 1)
        limits |= {"max_batch_size": size, "max_batch_delay": spec.max_batch_delay}
        return ContinuousBatcher(run, spec.ref, meters, **limits)
    return Batcher(
        run,
        spec.ref,
        meters,
        prepare=runner.prepare,
        max_batch_size=spec.batch_size,
        max_batch_delay=spec.max_batch_delay,
        retries=spec.retries,
        use_job_ticket=spec.use_job_ticket,
        bucket_by_length=spec.bucket_by_length,
        **limits,
    )
