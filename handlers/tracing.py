"""Spans of a handler's stages, where the server traces the request (OpenTelemetry)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def stage_spans() -> Callable[[str], Any] | None:
    """Return a function that starts the span of a stage, as a context manager; None where nothing is traced.

    The spans are children of the current span, which authors get by ``opentelemetry.trace.get_current_span``.
    """
    api = sys.modules.get("opentelemetry.trace")
    if api is None:
        return None
    span = api.get_current_span()
    if not span.is_recording():
        return None
    # The server's spans start their children themselves, which costs less; a span of the author's SDK cannot.
    start: Callable[[str], Any] | None = getattr(span, "stage", None)
    return start or api.get_tracer("torchrelay.handlers").start_as_current_span
