"""Parsers of a row: its value as a tensor, and its options of an explanation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from handlers import json_text
from handlers.errors import PredictionException


class ExplanationTarget(str):
    """The text of a request's field ``target``; where it is an integer, lists and tensors accept it as an
    index.

    TorchServe passes its handlers the field as the form has it: they convert it themselves.
    """

    def __index__(self) -> int:
        return int(str(self))  # int(self) would call this method


def resolve_target(target: Any) -> Any:
    """Return a target as Captum accepts it: the text of a form as an integer where it is one."""
    if not isinstance(target, ExplanationTarget):
        return target
    try:
        return int(target)
    except ValueError:
        return str(target)


def parse_row(row: Any) -> Any:
    """Return the value of a row; text and bytes are parsed as JSON."""
    if isinstance(row, Mapping):
        row = row["data"] if row.get("data") is not None else row.get("body")
    return json_text.loads(row) if isinstance(row, (str, bytes, bytearray)) else row


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
    """Return the value of a row that is to be explained, and the output that it selects.

    A form sends its fields as text, which becomes an ExplanationTarget.
    """
    if not isinstance(row, Mapping):
        return row, default
    target = row.get("target")
    if target is None or target == "" or target == b"":
        target = default
    elif isinstance(target, (bytes, bytearray)):
        target = ExplanationTarget(target.decode(errors="replace"))
    elif isinstance(target, str):
        target = ExplanationTarget(target)
    return row.get("data") or row.get("body"), target


def read_explanation_fields(row: Any) -> list[Any]:
    """Return the row's fields that select a method of explanation, unparsed."""
    return (
        [row.get(key) for key in ("method", "steps", "internal_batch_size")]
        if isinstance(row, Mapping)
        else []
    )
