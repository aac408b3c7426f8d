"""Requests of the Open Inference Protocol."""

from __future__ import annotations

from typing import Any

import numpy as np


def build_document(
    data: Any, datatype: str = "FP32", shape: list[int] | None = None, **fields: Any
) -> dict[str, Any]:
    """Return a request with the input ``x`` and further ``fields``."""
    shape = list(np.shape(data)) if shape is None else shape
    return {"inputs": [{"name": "x", "datatype": datatype, "shape": shape, "data": data}], **fields}
