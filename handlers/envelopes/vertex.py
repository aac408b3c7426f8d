"""The envelope ``vertex``: predictions of Vertex AI, and its raw predictions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from handlers import json_text
from handlers.builtin import vertex_instance
from handlers.envelopes.json import JSONEnvelope, refuse_stream
from handlers.errors import PredictionException
from handlers.loading.extension_points import get_extension

_STREAM = "The model streams, and predictions of instances are one document: send a body without instances."


class VertexEnvelope(JSONEnvelope):
    """The envelope ``json``, which passes any other body to the handler as it came: a raw prediction.

    Its response is the handler's value. A handler with the attribute ``takes_instances`` gets a row for all
    instances, ``{"body": {"instances": [...], "params": {...}}}``, and its value is the response. A handler
    that generates text has the attribute ``instance_defaults``, the fields of an instance without them; its
    instances are those of Vertex AI's containers of vLLM, and the response to a single chat is its
    completion.
    """

    def __init__(self, handle_fn: Callable[[Any, Any], Any]) -> None:
        super().__init__(handle_fn)
        instance = getattr(handle_fn, "instance", None)
        self._takes_instances = get_extension(instance, "takes_instances") is True
        self._defaults: Mapping[str, Any] | None = get_extension(instance, "instance_defaults")

    def parse_input(self, data: list[dict[str, Any]]) -> list[Any]:
        self._raw: set[int] = set()
        self._chats: set[int] = set()  # requests of a single chat
        return super().parse_input(data)

    def parse_request(self, index: int, row: dict[str, Any]) -> list[Any]:
        if _has_instances(row.get("data") or row.get("body")):
            rows = super().parse_request(index, row)
            if self._defaults is not None and len(rows) == 1 and vertex_instance.FORMAT in rows[0]["body"]:
                self._chats.add(index)
            if not self._takes_instances:
                return rows
            parameters = self._parameters[index]
            row = {"body": {"instances": rows, **({"params": parameters} if parameters else {})}}
        self._raw.add(index)
        return [row]

    def make_row(self, instance: Any, parameters: Mapping[str, Any]) -> dict[str, Any]:
        if self._defaults is None:
            return super().make_row(instance, parameters)
        body = vertex_instance.merge(instance, parameters, self._defaults)
        refuse_stream(body)
        return {"body": body}

    def select_rows(self, context: Any) -> Any:
        requests = self.list_requests()

        def emit(row: int, value: Any) -> None:
            if requests[row] not in self._raw:
                raise PredictionException(_STREAM, 400)
            context.emit(requests[row], value)

        return context.select(requests, emit)

    def format_response(self, index: int, values: list[Any]) -> Any:
        if index in self._raw and values:
            return values[0]
        self.context.set_response_content_type(index, "application/json")
        if index in self._chats and values:
            return {"predictions": values[0]}
        return super().format_response(index, values)


def _has_instances(body: Any) -> bool:
    if isinstance(body, (bytes, bytearray, str)):
        try:
            body = json_text.loads(body)
        except ValueError:
            return False
    return isinstance(body, dict) and "instances" in body
