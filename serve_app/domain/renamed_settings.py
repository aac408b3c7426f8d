"""Settings of earlier versions, each with the setting that replaces it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from serve_app.errors import ConfigurationError

RENAMED = {
    "asynchronous": "async_predictions",
    "async_predictions.keep": "async_predictions.retention_s",
    "async_predictions.patience": "async_predictions.max_queue_time_s",
    "async_predictions.inline": "async_predictions.inline_max_bytes",
    "async_predictions.webhook_pause": "async_predictions.webhook_backoff",
    "inference.short_hops": "inference.unix_sockets",
    "inference.also_management": "inference.serve_management",
    "inference.also_metrics": "inference.serve_metrics",
    "inference.late_answer": "inference.late_response",
    "management.also_metrics": "management.serve_metrics",
}


def reject_renamed(mapping: Mapping[str, Any], where: str) -> None:
    """Raise ConfigurationError with the new key when ``mapping`` has a key of an earlier version."""
    for old, new in RENAMED.items():
        section, _, key = old.partition(".")
        values = mapping.get(section)
        if section in mapping and (not key or (isinstance(values, Mapping) and key in values)):
            raise ConfigurationError(where, f"the setting {old} is now called {new}; rename it")
