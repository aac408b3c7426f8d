"""Rows that are named arrays, run together along their first axis and taken apart again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np


def are(data: Any) -> bool:
    """Whether a batch is of such rows; all of its rows are, or none."""
    row = data[0] if isinstance(data, list) and data else None
    return isinstance(row, Mapping) and bool(row) and all(isinstance(value, np.ndarray) for value in row.values())


def run(
    data: Sequence[Mapping[str, np.ndarray]],
    model: Callable[[dict[str, np.ndarray]], Mapping[str, Any]],
    apart: bool = False,
) -> list[Any]:
    """For each row what ``model`` makes of it: ``{name: array}``, or the exception that it raised.

    Rows of the same names, datatypes and shapes but for the first axis are one call of ``model``; those of a row
    without a common first axis, every row where ``apart``, and rows whose call gives outputs of another length, are a
    call each. So no row's error or length is another's.
    """
    alike: dict[Any, list[int]] = {}
    for index, row in enumerate(data):
        alike.setdefault(index if apart else _kind(row) or index, []).append(index)
    answers: list[Any] = [None] * len(data)
    for indices in alike.values():
        together = _together([data[index] for index in indices], model) if len(indices) > 1 else None
        for place, index in enumerate(indices):
            answers[index] = together[place] if together is not None else _alone(data[index], model)
    return answers


def _kind(row: Mapping[str, np.ndarray]) -> tuple[Any, ...] | None:
    """What rows must have in common to be joined; None for one that cannot be."""
    if any(array.ndim == 0 for array in row.values()) or len({len(array) for array in row.values()}) != 1:
        return None
    return tuple(sorted((name, array.dtype.str, array.shape[1:]) for name, array in row.items()))


def _together(
    rows: Sequence[Mapping[str, np.ndarray]], model: Callable[[dict[str, np.ndarray]], Mapping[str, Any]]
) -> list[dict[str, Any]] | None:
    """The answers of one call; None where it fails, or its outputs cannot be told apart."""
    lengths = [len(next(iter(row.values()))) for row in rows]
    try:
        outputs = model({name: np.concatenate([row[name] for row in rows]) for name in rows[0]})
    except Exception:  # each row is asked about by itself, and the guilty one says it again
        return None
    if any(np.ndim(value) == 0 or len(value) != sum(lengths) for value in outputs.values()):
        return None
    ends = np.cumsum(lengths).tolist()
    return [{name: value[end - length : end] for name, value in outputs.items()} for end, length in zip(ends, lengths)]


def _alone(row: Mapping[str, np.ndarray], model: Callable[[dict[str, np.ndarray]], Mapping[str, Any]]) -> Any:
    try:
        return dict(model(dict(row)))
    except Exception as error:
        return error
