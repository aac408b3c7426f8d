"""The envelope ``json``, TensorFlow Serving's format: instances in, predictions out."""

from __future__ import annotations

import base64
import binascii
import json
from typing import Any

from handlers.envelopes.base import GroupedEnvelope, parse_json_body
from handlers.errors import PredictionException


class JSONEnvelope(GroupedEnvelope):
    """An envelope from ``{"instances": [...]}`` to ``{"predictions": [...]}``, as JSON text; an instance is a
    row.

    ``{"b64": ...}``, as an instance or as a field of one, becomes its bytes.
    """

    def parse_request(self, index: int, row: dict[str, Any]) -> list[Any]:
        return [_decode_instance(instance) for instance in parse_json_body(row, "instances")["instances"]]

    def format_response(self, index: int, values: list[Any]) -> str | dict[str, Any]:
        document = {"predictions": values}
        try:
            return json.dumps(document, allow_nan=False)
        except ValueError:  # NaN or an infinity, which the server's encoder replaces or refuses
            return document


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
