"""The reference of drift in a file: JSON lines of inputs, or files that capture has written."""

from __future__ import annotations

import base64
import binascii
from itertools import islice
from pathlib import Path
from typing import Any

import orjson

from serve_app.dataplane.capture.features import find_features
from serve_app.domain import tensors
from serve_app.domain.capture import CapturePolicy
from serve_app.domain.drift_window import FeatureWindow
from serve_app.domain.request import InferenceRequest, InferenceResponse, InputPart
from serve_app.errors import ConfigurationError, RelayError

MAX_LINES = 100_000  # of a file; later ones are not read
_TENSOR = ("name", "datatype", "shape", "data")
_MAX_LINE = 16 << 20  # bytes


def read_reference(file: Path, policy: CapturePolicy, where: str) -> FeatureWindow:
    """Return the statistics of a file; ``where`` is its name in errors. Blocking.

    A line is a captured request, or ``{"input": …, "output": …}``, or the JSON document of an input.
    Raises ConfigurationError, which names the line.
    """
    window = FeatureWindow(policy.max_features)
    with file.open("rb") as lines:
        for number, line in enumerate(islice(lines, MAX_LINES), 1):
            if not line.strip():
                continue
            try:
                if len(line) > _MAX_LINE:
                    raise ValueError(f"it has more than {_MAX_LINE} bytes")
                request, response = _parse(orjson.loads(line))
            except (ValueError, TypeError, KeyError, binascii.Error, RelayError) as error:
                raise ConfigurationError(
                    where, f"line {number}: {error}; each line is a JSON document, as capture writes them"
                ) from None
            window.add(find_features(request, response, policy.redact))
    if not window.requests:
        raise ConfigurationError(where, "it has no line; write one JSON document a line")
    return window


def _parse(document: Any) -> tuple[InferenceRequest, InferenceResponse]:
    inputs: tuple[InputPart, ...]
    response = InferenceResponse(b"")
    if isinstance(document, dict) and isinstance(document.get("inputs"), list) and "request_id" in document:
        inputs = tuple(
            _read_tensor(part) or InputPart(part["name"], *_read_value(part)) for part in document["inputs"]
        )
        response = InferenceResponse(*_read_value(document["output"]))
    elif isinstance(document, dict) and "input" in document and document.keys() <= {"input", "output"}:
        inputs = (InputPart("body", orjson.dumps(document["input"]), "application/json"),)
        if "output" in document:
            response = InferenceResponse(orjson.dumps(document["output"]), "application/json")
    else:
        inputs = (InputPart("body", orjson.dumps(document), "application/json"),)
    return InferenceRequest("", inputs=inputs), response


def _read_tensor(part: dict[str, Any]) -> InputPart | None:
    """Return a stored tensor as an input; None for other inputs."""
    match part.get("json"):
        case [{"datatype": datatype, "shape": shape, "data": data}]:
            return InputPart(*tensors.from_list(part["name"], datatype, shape, data).to_part())
        case _:
            return None


def _read_value(part: dict[str, Any]) -> tuple[bytes, str | None]:
    """Return the bytes and the content type of a stored input or output."""
    content_type = part.get("content_type")
    match part.get("json"):
        case [{"name": _, "datatype": _, "shape": _, "data": _}, *_] as stored:
            values = (tensors.from_list(*(t[key] for key in _TENSOR)) for t in stored)
            return tensors.pack(list(values)), tensors.PACKED_MEDIA_TYPE
    if "json" in part:
        return orjson.dumps(part["json"]), content_type
    if "text" in part:
        return part["text"].encode(), content_type
    return base64.b64decode(part.get("base64", "")), content_type
