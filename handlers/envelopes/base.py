"""The base classes of envelopes."""

from __future__ import annotations

import copy
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from handlers import json_text
from handlers.errors import PredictionException


class BaseEnvelope(ABC):
    """A translator of a format's requests into the rows of a handler, and of its values into responses.

    ``handle`` replaces the handler's. Around an ``async def`` handler it returns an awaitable.
    """

    def __init__(self, handle_fn: Callable[[Any, Any], Any]) -> None:
        self._handle_fn = handle_fn
        self.context: Any = None

    def handle(self, data: Any, context: Any) -> Any:
        """Call the handler with the parsed requests, and format its values.

        An empty batch is passed on unchanged, as is a request that describes the model.
        """
        if _is_describe(context):
            return self._handle_fn(data, context)
        if getattr(self._handle_fn, "is_async", False) or inspect.iscoroutinefunction(self._handle_fn):
            # Batches overlap, so each has a state of its own.
            return copy.copy(self)._handle_async(data, context)
        rows = self._parse(data, context)
        if not self._has_rows(rows):
            return self.format_output([])
        selected = self.select_rows(context)
        results = self._handle_fn(rows, selected)
        if selected is not context:
            context.adopt(selected)
        return self._format(results)

    async def _handle_async(self, data: Any, context: Any) -> Any:
        rows = self._parse(data, context)
        if not self._has_rows(rows):
            return self.format_output([])
        return self._format(await self._handle_fn(rows, self.select_rows(context)))

    def _parse(self, data: Any, context: Any) -> Any:
        self.context = context
        return self.parse_input(data) if data else data

    def _format(self, results: Any) -> Any:
        return self.format_output(results) if results else results

    def _has_rows(self, rows: Any) -> bool:
        """Return whether the handler must be called."""
        return True

    def select_rows(self, context: Any) -> Any:
        """Return the context of the handler's rows, from that of the requests."""
        return context

    @abstractmethod
    def parse_input(self, data: list[dict[str, Any]]) -> Any:
        """Return the handler's data for the rows ``data``."""

    @abstractmethod
    def format_output(self, data: list[Any]) -> list[Any]:
        """Return one response for each request, from the handler's values."""


class GroupedEnvelope(BaseEnvelope):
    """An envelope whose requests hold any number of rows each, which the handler gets in one batch.

    A request that cannot be parsed, or one of whose rows failed, is answered with that error; the others
    continue. A subclass implements ``parse_request`` and ``format_response``.
    """

    def __init__(self, handle_fn: Callable[[Any, Any], Any]) -> None:
        super().__init__(handle_fn)
        self._row_counts: list[
            int | PredictionException
        ] = []  # the number of rows of each request, or its error

    def parse_input(self, data: list[dict[str, Any]]) -> list[Any]:
        self._row_counts = []
        all_rows: list[Any] = []
        for index, row in enumerate(data):
            try:
                rows = self.parse_request(index, row)
            except PredictionException as error:
                self._row_counts.append(error)
            else:
                self._row_counts.append(len(rows))
                all_rows += rows
        return all_rows

    def format_output(self, data: Any) -> list[Any]:
        counts = [count for count in self._row_counts if isinstance(count, int)]
        is_single = len(counts) == 1  # all results belong to it, however many there are
        if not is_single and len(data) != sum(counts):
            raise ValueError(
                f"The handler got {sum(counts)} rows, of {len(counts)} requests, and returned {len(data)} "
                "values: it has to return one for each row, so that each request gets its own. Or set the "
                "batch size to 1."
            )
        responses: list[Any] = []
        cursor = 0
        for index, count in enumerate(self._row_counts):
            if isinstance(count, PredictionException):
                responses.append(count)
                continue
            values = data if is_single else data[cursor : cursor + count]
            cursor += count
            failed = next((value for value in values if isinstance(value, Exception)), None)
            responses.append(self._format_response(index, values) if failed is None else failed)
        return responses

    def _format_response(self, index: int, values: Any) -> Any:
        try:
            return self.format_response(index, values)
        except (TypeError, ValueError) as error:  # the format cannot hold the values: fail this request alone
            return error

    def _has_rows(self, rows: Any) -> bool:
        return bool(rows) or not self._row_counts

    def select_rows(self, context: Any) -> Any:
        requests = self.list_requests()
        return context if requests == list(range(len(self._row_counts))) else context.select(requests)

    def list_requests(self) -> list[int]:
        """Return the index of the request of each row."""
        counts = enumerate(self._row_counts)
        return [index for index, count in counts if isinstance(count, int) for _ in range(count)]

    @abstractmethod
    def parse_request(self, index: int, row: dict[str, Any]) -> list[Any]:
        """Return the handler's rows in request ``index``.

        Raises PredictionException where it is malformed.
        """

    @abstractmethod
    def format_response(self, index: int, values: list[Any]) -> Any:
        """Return the response to request ``index``, from the handler's values for its rows."""


def parse_json_body(row: dict[str, Any], key: str) -> dict[str, Any]:
    """Return the JSON object in ``row``, whose ``key`` is a list.

    Raises PredictionException (400) for any other body.
    """
    body = row.get("data") or row.get("body") or row
    if isinstance(body, (bytes, bytearray, str)):
        try:
            body = json_text.loads(body)
        except ValueError as error:
            raise PredictionException(f"The request is not JSON: {error}", 400) from error
    if not isinstance(body, dict) or not isinstance(body.get(key), list):
        raise PredictionException(f'The request has no list of {key}: send {{"{key}": [...]}}.', 400)
    return body


def _is_describe(context: Any) -> bool:
    header = getattr(context, "get_request_header", None)
    return header is not None and bool(context.request_ids) and header(0, "describe") == "True"
