"""Decorators that measure times, among them those of a handler's stages."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)


def timed(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method whose time is recorded as the metric ``ts_handler_<name>``, in milliseconds.

    It is recorded only with ``handler: {profile: true}`` in model-config.yaml. The GPU is synchronized before
    each reading, so that a stage's time includes only its own work.
    """

    @functools.wraps(func)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        context = getattr(self, "context", None)
        if context is None or not _is_profiled(context):
            return func(self, *args, **kwargs)
        started = _now()
        result = func(self, *args, **kwargs)
        context.metrics.add_time(f"ts_handler_{func.__name__}", (_now() - started) * 1000)
        return result

    return wrapper


def timeit(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose time and CPU time are logged after each call."""

    @functools.wraps(func)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        started, started_cpu = time.perf_counter(), time.process_time()
        result = func(*args, **kwargs)
        elapsed, elapsed_cpu = time.perf_counter() - started, time.process_time() - started_cpu
        logger.info("%s took %.4f s, and %.4f s of CPU time", func.__name__, elapsed, elapsed_cpu)
        return result

    return wrapper


def _is_profiled(context: Any) -> bool:
    options = (getattr(context, "model_yaml_config", None) or {}).get("handler")
    return (
        isinstance(options, dict)
        and bool(options.get("profile"))
        and getattr(context, "metrics", None) is not None
    )


def _now() -> float:
    import torch

    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()
