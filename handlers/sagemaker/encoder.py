"""An encoder of arrays and lists to response bodies."""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np

from handlers.sagemaker.content_types import CSV, JSON, NPY, media_type
from handlers.sagemaker.errors import UnsupportedFormatError

SUPPORTED_CONTENT_TYPES = {JSON, CSV, NPY}


def encode(array_like: Any, content_type: str | None) -> Any:
    """Return the text of JSON or CSV, or the bytes of NPY. Raises UnsupportedFormatError."""
    kind = media_type(content_type)
    if kind == JSON:
        return json.dumps(array_like, default=_to_list)
    if kind == CSV:
        text = io.StringIO()
        np.savetxt(text, array_like, delimiter=",", fmt="%s")
        return text.getvalue()
    if kind == NPY:
        buffer = io.BytesIO()
        np.save(buffer, array_like)
        return buffer.getvalue()
    raise UnsupportedFormatError(content_type)


def _to_list(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} has no JSON; return a list or an array from predict_fn")
