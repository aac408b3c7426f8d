"""A wire format around a handler."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any


class BaseEnvelope(ABC):
    """Reads a format's requests into the rows of a handler, and writes what it returns in that format."""

    def __init__(self, handle_fn: Callable[[Any, Any], Any]) -> None:
        self._handle_fn = handle_fn
        self.context: Any = None

    def handle(self, data: Any, context: Any) -> Any:
        """The handler's own ``handle``, with both translations around it; an empty batch passes untouched."""
        self.context = context
        results = self._handle_fn(self.parse_input(data) if data else data, context)
        return self.format_output(results) if results else results

    @abstractmethod
    def parse_input(self, data: list[dict[str, Any]]) -> Any:
        """What the handler gets for the rows ``data``."""

    @abstractmethod
    def format_output(self, data: list[Any]) -> list[Any]:
        """One response for each request, from what the handler returned."""
