"""Parsers of a row: its value as a tensor, and its options of an explanation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from handlers.errors import PredictionException


def parse_row(row: Any) -> Any:
    """Return the value of a row; text and bytes are parsed as JSON."""
    if isinstance(row, Mapping):
        row = row["data"] if row.get("data") is not None else row.get("body")
    return json.loads(row) if isinstance(row, (str, bytes, bytearray)) else row


def to_tensor(values: list[Any]) -> torch.Tensor:
    """Return numbers and nested lists of numbers as a tensor.

    Raises ValueError where a value is not a number, or lists differ in length.
    """
    array = np.asarray(values)  # several times faster than torch.as_tensor on nested lists
    if array.dtype.kind not in "biuf":
        raise ValueError("not all of it are numbers")
    return torch.from_numpy(array.astype(np.float32) if array.dtype == np.float64 else array)


def parse_tensor_row(row: Any) -> torch.Tensor:
    """Return the tensor of a row. Raises PredictionException (400) for other values."""
    try:
        return to_tensor([parse_row(row)])[0]
    except ValueError as error:
        raise PredictionException(f"The input is not a JSON list of numbers: {error}", 400) from error


def read_explanation_input(row: Any, default: Any) -> tuple[Any, Any]:
    """Return the value of a row that is to be explained, and the output that it selects."""
    if not isinstance(row, Mapping):
        return row, default
    return row.get("data") or row.get("body"), _parse_target(row.get("target"), default)


def read_explanation_fields(row: Any) -> list[Any]:
    """Return the row's fields that select a method of explanation, unparsed."""
    return (
        [row.get(key) for key in ("method", "steps", "internal_batch_size")]
        if isinstance(row, Mapping)
        else []
    )


def _parse_target(value: Any, default: Any) -> Any:
    """Return the target as an integer where it is one.

    A form sends its fields as text; any other text is passed to the author's get_insights unchanged.
    """
    if value is None or value == "" or value == b"":
        return default
    try:
        return int(value) if isinstance(value, (str, bytes, bytearray)) else value
    except ValueError:
        return value
