"""The envelope ``body``, whose rows are bare values."""

from __future__ import annotations

from typing import Any

from handlers.envelopes.base import BaseEnvelope


class BodyEnvelope(BaseEnvelope):
    """An envelope that passes each request's ``data`` or ``body`` itself; values are returned unchanged."""

    def parse_input(self, data: list[dict[str, Any]]) -> list[Any]:
        return [row.get("data") or row.get("body") for row in data]

    def format_output(self, data: list[Any]) -> list[Any]:
        return data
