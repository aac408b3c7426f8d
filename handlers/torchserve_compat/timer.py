"""How long each stage of a handler takes, where the model's configuration asks for it."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)


def timed(func: Callable[..., Any]) -> Callable[..., Any]:
    """A method whose time is reported as the metric ``ts_handler_<name>``, in milliseconds.

    Only where model-config.yaml says ``handler: {profile: true}``. The GPU's
    queue is emptied before each reading, so a stage is charged with its own work only.
    """

    @functools.wraps(func)
    def measured(self: Any, *args: Any, **kwargs: Any) -> Any:
        context = getattr(self, "context", None)
        if not _asked_for(context):
            return func(self, *args, **kwargs)
        started = _now()
        result = func(self, *args, **kwargs)
        context.metrics.add_time(f"ts_handler_{func.__name__}", (_now() - started) * 1000)
        return result

    return measured


def timeit(func: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose time, and time of the CPU, is logged after each call."""

    @functools.wraps(func)
    def measured(*args: Any, **kwargs: Any) -> Any:
        started, started_cpu = time.perf_counter(), time.process_time()
        result = func(*args, **kwargs)
        took, took_cpu = time.perf_counter() - started, time.process_time() - started_cpu
        logger.info("%s took %.4f s, and %.4f s of CPU time", func.__name__, took, took_cpu)
        return result

    return measured


def _asked_for(context: Any) -> bool:
    options = (getattr(context, "model_yaml_config", None) or {}).get("handler")
    return isinstance(options, dict) and bool(options.get("profile")) and getattr(context, "metrics", None) is not None


def _now() -> float:
    import torch

    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()
