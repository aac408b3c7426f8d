"""TensorFlow Serving's JSON: instances in, predictions out."""

from __future__ import annotations

import base64
import binascii
import json
from typing import Any

from handlers.envelopes.base import GroupedEnvelope, parsed
from handlers.errors import PredictionException


class JSONEnvelope(GroupedEnvelope):
    """``{"instances": [...]}`` to ``{"predictions": [...]}``, as JSON text; each instance is a row.

    ``{"b64": ...}``, as an instance or as a field of one, becomes its bytes.
    """

    def open(self, index: int, row: dict[str, Any]) -> list[Any]:
        return [_decoded(instance) for instance in parsed(row, "instances")["instances"]]

    def close(self, index: int, values: list[Any]) -> str:
        return json.dumps({"predictions": values})


def _decoded(instance: Any) -> Any:
    if not isinstance(instance, dict):
        return instance
    if list(instance) == ["b64"]:
        return _bytes(instance["b64"])
    return {
        name: _bytes(value["b64"]) if isinstance(value, dict) and list(value) == ["b64"] else value
        for name, value in instance.items()
    }


def _bytes(text: Any) -> bytes:
    try:
        return base64.b64decode(text)
    except (binascii.Error, TypeError, ValueError) as error:
        raise PredictionException(f"An instance's b64 is not base64: {error}", 400) from error
