"""Features of a request and its response: named numbers and strings, whose drift is measured.

A number of a JSON document is a feature, and so is a string; the rows of a batch share their names. A vector
of at most 16 numbers has a feature for each place, a longer one its mean, standard deviation and length. An
image has its brightness, contrast, width and height; the response of a classifier its first label and score.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from serve_app.dataplane.shadow import comparison
from serve_app.dataplane.stored_values import REDACTED, find_paths, without_paths
from serve_app.domain import json_path, tensors
from serve_app.domain.request import InferenceRequest, InferenceResponse, InputPart

Feature = tuple[str, float | str]

MAX_VECTOR = 16  # numbers with a feature each
_MAX_ROWS = 64  # of a request
_MAX_DEPTH = 6
_MAX_NAME = 100  # characters
_MAX_BYTES = 256 << 10  # of a parsed value: a parser holds the interpreter lock for a millisecond then
_MAX_IMAGE_BYTES = 16 << 20
_MAX_PIXELS = 50_000_000
_WHOLE_BODY = ("body", "data")  # names of the only input of a request
_IMAGES = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n")  # also without their content type


def find_features(
    request: InferenceRequest, response: InferenceResponse, redact: tuple[str, ...]
) -> list[Feature]:
    """Return the features of a request and its response, without redacted values."""
    found: list[Feature] = []
    for part in request.inputs:
        paths = find_paths(part.name, redact)
        if paths is not None:
            name = "input" if part.name in _WHOLE_BODY else f"input.{part.name}"
            found.extend(_find_in_part(name, part, paths))
    if response.body:
        found.extend(_find_in_response(response, redact))
    return [
        (name, value)
        for name, value in found
        if len(name) <= _MAX_NAME and value != REDACTED and (isinstance(value, str) or math.isfinite(value))
    ]


def _find_in_part(name: str, part: InputPart, redact: tuple[str, ...]) -> Iterator[Feature]:
    content_type = part.content_type or ""
    if content_type.startswith("application/x-tensor;"):
        return _find_in_tensor(name, tensors.from_content_type(part.name, part.value, content_type))
    return _find_in_body(name, part.value, content_type, redact)


def _find_in_response(response: InferenceResponse, redact: tuple[str, ...]) -> Iterator[Feature]:
    if response.content_type == tensors.PACKED_MEDIA_TYPE:
        for tensor in tensors.unpack(response.body):
            if find_paths(tensor.name, redact) is not None:
                yield from _find_in_tensor(f"output.{tensor.name}", tensor)
        return
    document = _parse(response.body, redact)
    if document is not json_path.NO_JSON and comparison.is_ranking(document):
        label, score = _top_label(comparison.unwrap(document))
        yield "output.label", str(label)
        if score is not None:
            yield "output.score", score
        return
    yield from _find_in_body("output", response.body, response.content_type or "", redact)


def _parse(body: bytes, redact: tuple[str, ...]) -> Any:
    """Return the redacted document of a body, or NO_JSON."""
    document = json_path.parse_json(body) if len(body) <= _MAX_BYTES else json_path.NO_JSON
    return document if document is json_path.NO_JSON else without_paths(document, redact)


def _find_in_body(name: str, body: bytes, content_type: str, redact: tuple[str, ...]) -> Iterator[Feature]:
    is_image = content_type.startswith("image/") or body.startswith(_IMAGES)
    if is_image and len(body) <= _MAX_IMAGE_BYTES:
        yield from _find_in_image(name, body)
        return
    document = _parse(body, redact)
    if document is not json_path.NO_JSON:
        yield from _find_in_document(name, document, 0)
    elif redact:
        return  # its content is unknown
    elif (text := _decode_text(body)) is not None:
        yield name, text
    else:
        yield f"{name}.bytes", float(len(body))


def _decode_text(body: bytes) -> str | None:
    try:
        return body.decode() if len(body) <= _MAX_BYTES else None
    except UnicodeDecodeError:
        return None


def _find_in_document(name: str, value: Any, depth: int) -> Iterator[Feature]:
    if isinstance(value, bool):
        yield name, str(value).lower()
    elif isinstance(value, int | float):
        yield name, _to_float(value)
    elif isinstance(value, str):
        yield name, value
    elif depth >= _MAX_DEPTH:
        return
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _find_in_document(f"{name}.{key}", item, depth + 1)
    elif isinstance(value, list):
        if value and set(map(type, value)) <= {int, float}:
            yield from _find_in_vector(name, np.array([_to_float(item) for item in value]))
        else:
            for item in value[:_MAX_ROWS]:
                yield from _find_in_document(f"{name}[]", item, depth + 1)


def _to_float(value: int | float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.nan


def _find_in_vector(name: str, values: np.ndarray) -> Iterator[Feature]:
    if len(values) <= MAX_VECTOR:
        yield from ((f"{name}[{place}]", value) for place, value in enumerate(values.tolist()))
        return
    yield f"{name}.mean", float(values.mean())
    yield f"{name}.std", float(values.std())
    yield f"{name}.length", float(len(values))


def _find_in_tensor(name: str, tensor: tensors.Tensor) -> Iterator[Feature]:
    """Return the features of a tensor, whose first axis is that of the rows."""
    if tensor.datatype == "BYTES":
        for element in tensors.decode_elements(tensor)[:_MAX_ROWS]:
            yield name, element.decode("utf-8", "replace")
        return
    array = tensor.to_array()
    if array.ndim <= 1:
        yield from ((name, float(value)) for value in array.reshape(-1)[:_MAX_ROWS])
        return
    for row in array[:_MAX_ROWS].astype(np.float64):
        yield from _find_in_vector(name, row.reshape(-1))


def _find_in_image(name: str, body: bytes) -> Iterator[Feature]:
    """Return brightness and contrast (mean and standard deviation of the gray values, 0 to 255), and size."""
    from PIL import Image  # late: most processes need no images

    try:
        with Image.open(io.BytesIO(body)) as image:
            width, height = image.size
            if width * height > _MAX_PIXELS:
                return
            image.draft("L", (256, 256))  # a JPEG is decoded at a fraction of its size
            image.thumbnail((256, 256))
            gray = np.asarray(image.convert("L"), np.float64)
    except Exception:  # of any decoder: the handler reports a broken image
        yield f"{name}.bytes", float(len(body))
        return
    yield f"{name}.brightness", float(gray.mean())
    yield f"{name}.contrast", float(gray.std())
    yield f"{name}.width", float(width)
    yield f"{name}.height", float(height)


def _top_label(document: Any) -> tuple[Any, float | None]:
    """Return the first label of a ranking, and its score, if it has one."""
    if isinstance(document, dict):
        label = max(document, key=lambda name: document[name])
        return label, float(document[label])
    pairs = [_to_pair(item) for item in document]
    scored = [(label, score) for label, score in pairs if score is not None]
    return max(scored, key=lambda pair: pair[1]) if len(scored) == len(pairs) else pairs[0]


def _to_pair(item: Any) -> tuple[Any, float | None]:
    match item:
        case {"label": label, "score": int() | float() as score}:
            return label, float(score)
        case [str() as label, int() | float() as score]:
            return label, float(score)
        case {"label": label}:
            return label, None
        case _:
            return item, None
