"""The envelope ``json``, TensorFlow Serving's format: instances in, predictions out."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Mapping
from typing import Any

from handlers import json_text
from handlers.envelopes.base import GroupedEnvelope, parse_json_body
from handlers.errors import PredictionException
from handlers.loading.extension_points import get_extension


class JSONEnvelope(GroupedEnvelope):
    """An envelope from ``{"instances": [...]}`` to ``{"predictions": [...]}``, as JSON text; an instance is a
    row.

    ``{"b64": ...}``, as an instance or as a field of one, becomes its bytes; bytes of a value are JSON, or
    become such an object. The handler reads the object
    ``parameters`` beside the instances by ``context.get_parameters(idx)``. A handler with the attribute
    ``takes_parameters`` gets rows ``{"body": {"inputs": instance, "parameters": {...}}}`` instead; an
    instance's own fields take precedence.
    """

    def __init__(self, handle_fn: Callable[[Any, Any], Any]) -> None:
        super().__init__(handle_fn)
        self._takes_parameters = (
            get_extension(getattr(handle_fn, "instance", None), "takes_parameters") is True
        )

    def parse_input(self, data: list[dict[str, Any]]) -> list[Any]:
        self._parameters: dict[int, Mapping[str, Any]] = {}  # by request
        rows = super().parse_input(data)
        self.context.set_parameters([self._parameters.get(index, {}) for index in range(len(data))])
        return rows

    def parse_request(self, index: int, row: dict[str, Any]) -> list[Any]:
        document = parse_json_body(row, "instances")
        parameters = document.get("parameters")
        parameters = {} if parameters is None else parameters
        if not isinstance(parameters, Mapping):
            raise PredictionException(
                f"parameters is {parameters!r:.100}: it is an object, of the parameters of all instances.",
                400,
            )
        self._parameters[index] = parameters
        rows = [_decode_instance(instance) for instance in document["instances"]]
        return [self.make_row(row, parameters) for row in rows] if self._takes_parameters else rows

    def make_row(self, instance: Any, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Return the row of a handler that takes parameters. Raises PredictionException."""
        body = instance if isinstance(instance, dict) else {"inputs": instance}
        own = body.get("parameters")
        if own is None or isinstance(own, Mapping):  # any other is the handler's to refuse
            others = {name: value for name, value in parameters.items() if name not in body}
            parameters = {**others, **(own or {})}
            if parameters:
                body = {**body, "parameters": parameters}
            refuse_stream(body, parameters)
        return {"body": body}

    def format_response(self, index: int, values: list[Any]) -> str | dict[str, Any]:
        document = {"predictions": [_encode_bytes(value) for value in values]}
        try:
            return json.dumps(document, allow_nan=False)
        except ValueError:  # NaN or an infinity, which the server's encoder replaces or refuses
            return document


def refuse_stream(*fields: Mapping[str, Any]) -> None:
    """Raise PredictionException where an instance is to be streamed: the response is one document."""
    if any(mapping.get("stream") for mapping in fields):
        raise PredictionException(
            "stream: the predictions of instances are one document. Send the request without instances.", 400
        )


def _encode_bytes(value: Any) -> Any:
    """Return bytes as the JSON that they are, or else in base64; any other value unchanged."""
    if not isinstance(value, (bytes, bytearray)):
        return value
    try:
        return json_text.loads(value)
    except ValueError:
        return {"b64": base64.b64encode(value).decode()}


def _decode_instance(instance: Any) -> Any:
    if not isinstance(instance, dict):
        return instance
    if list(instance) == ["b64"]:
        return _decode_base64(instance["b64"])
    return {
        name: _decode_base64(value["b64"]) if isinstance(value, dict) and list(value) == ["b64"] else value
        for name, value in instance.items()
    }


def _decode_base64(text: Any) -> bytes:
    try:
        return base64.b64decode(text)
    except (binascii.Error, TypeError, ValueError) as error:
        raise PredictionException(f"An instance's b64 is not base64: {error}", 400) from error
