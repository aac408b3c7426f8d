"""What every envelope is, and what those share whose requests hold several rows each."""

from __future__ import annotations

import copy
import inspect
import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from handlers.errors import PredictionException


class BaseEnvelope(ABC):
    """Reads a format's requests into the rows of a handler, and writes what it returns in that format.

    ``handle`` takes the handler's place. Around an ``async def`` handler it returns an awaitable.
    """

    def __init__(self, handle_fn: Callable[[Any, Any], Any]) -> None:
        self._handle_fn = handle_fn
        self.context: Any = None

    def handle(self, data: Any, context: Any) -> Any:
        """The handler's own ``handle``, with both translations around it.

        An empty batch passes untouched, as does a call that asks the model to describe itself.
        """
        if _describes(context):
            return self._handle_fn(data, context)
        if getattr(self._handle_fn, "asynchronous", False) or inspect.iscoroutinefunction(self._handle_fn):
            return copy.copy(self)._handle_later(data, context)  # batches overlap, so each has a state of its own
        rows = self._opened(data, context)
        return self._answered(self._handle_fn(rows, context)) if self._asks_for(rows) else self.format_output([])

    async def _handle_later(self, data: Any, context: Any) -> Any:
        rows = self._opened(data, context)
        return self._answered(await self._handle_fn(rows, context)) if self._asks_for(rows) else self.format_output([])

    def _opened(self, data: Any, context: Any) -> Any:
        self.context = context
        return self.parse_input(data) if data else data

    def _answered(self, results: Any) -> Any:
        return self.format_output(results) if results else results

    def _asks_for(self, rows: Any) -> bool:
        """Whether the handler is to be asked at all."""
        return True

    @abstractmethod
    def parse_input(self, data: list[dict[str, Any]]) -> Any:
        """What the handler gets for the rows ``data``."""

    @abstractmethod
    def format_output(self, data: list[Any]) -> list[Any]:
        """One response for each request, from what the handler returned."""


class GroupedEnvelope(BaseEnvelope):
    """An envelope whose requests hold any number of rows each: the handler sees them all in one batch.

    A request that cannot be read, or one of whose rows failed, is answered with that error; the others
    go on. A subclass says how to ``open`` a request and to ``close`` its answer.
    """

    def __init__(self, handle_fn: Callable[[Any, Any], Any]) -> None:
        super().__init__(handle_fn)
        self._groups: list[int | PredictionException] = []  # the number of rows of each request, or its error

    def parse_input(self, data: list[dict[str, Any]]) -> list[Any]:
        self._groups = []
        flat: list[Any] = []
        for index, row in enumerate(data):
            try:
                opened = self.open(index, row)
            except PredictionException as error:
                self._groups.append(error)
            else:
                self._groups.append(len(opened))
                flat += opened
        return flat

    def format_output(self, data: Any) -> list[Any]:
        counts = [count for count in self._groups if isinstance(count, int)]
        alone = len(counts) == 1  # then all the results are its, however many they are
        if not alone and len(data) != sum(counts):
            raise ValueError(
                f"The handler got {sum(counts)} rows, of {len(counts)} requests, and returned {len(data)} values: it "
                "has to return one for each row, so that each request gets its own. Or set the batch size to 1."
            )
        answers: list[Any] = []
        cursor = 0
        for index, count in enumerate(self._groups):
            if isinstance(count, PredictionException):
                answers.append(count)
                continue
            values = data if alone else data[cursor : cursor + count]
            cursor += count
            failed = next((value for value in values if isinstance(value, Exception)), None)
            answers.append(self._closed(index, values) if failed is None else failed)
        return answers

    def _closed(self, index: int, values: Any) -> Any:
        try:
            return self.close(index, values)
        except (TypeError, ValueError) as error:  # values that the format cannot hold: this request's own trouble
            return error

    def _asks_for(self, rows: Any) -> bool:
        return bool(rows) or not self._groups

    @abstractmethod
    def open(self, index: int, row: dict[str, Any]) -> list[Any]:
        """The handler's rows in request ``index``; PredictionException where it cannot be read."""

    @abstractmethod
    def close(self, index: int, values: list[Any]) -> Any:
        """The answer to request ``index``, of the values that the handler returned for its rows."""


def parsed(row: dict[str, Any], key: str) -> dict[str, Any]:
    """The JSON object that ``row`` brings, which has ``key``; PredictionException (400) where it brings none."""
    body = row.get("data") or row.get("body") or row
    if isinstance(body, (bytes, bytearray, str)):
        try:
            body = json.loads(body)
        except ValueError as error:
            raise PredictionException(f"The request is not JSON: {error}", 400) from error
    if not isinstance(body, dict) or not isinstance(body.get(key), list):
        raise PredictionException(f'The request has no list of {key}: send {{"{key}": [...]}}.', 400)
    return body


def _describes(context: Any) -> bool:
    header = getattr(context, "get_request_header", None)
    return header is not None and bool(context.request_ids) and header(0, "describe") == "True"
