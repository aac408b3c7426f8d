"""A decoder of request bodies to arrays."""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from handlers import json_text
from handlers.sagemaker.content_types import CSV, JSON, NPY, media_type
from handlers.sagemaker.errors import UnsupportedFormatError


def decode(obj: Any, content_type: str | None) -> np.ndarray:
    """Return the array in a body of JSON, CSV or NPY; an NPY of Python objects is refused.

    Raises UnsupportedFormatError, and ValueError for a body that cannot be parsed.
    """
    kind = media_type(content_type)
    if kind == JSON:
        return np.array(json_text.loads(obj))
    if kind == CSV:
        text = obj if isinstance(obj, str) else bytes(obj).decode()
        return np.genfromtxt(io.StringIO(text), delimiter=",")
    if kind == NPY:
        array: np.ndarray = np.load(io.BytesIO(obj), allow_pickle=False)
        return array
    raise UnsupportedFormatError(content_type)
