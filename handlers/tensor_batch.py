"""Rows that are named arrays: they are joined along their first axis, run together and split again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np


def is_tensor_batch(data: Any) -> bool:
    """Return whether the rows of a batch are named arrays; all of its rows are, or none."""
    row = data[0] if isinstance(data, list) and data else None
    return (
        isinstance(row, Mapping)
        and bool(row)
        and all(isinstance(value, np.ndarray) for value in row.values())
    )


def run(
    data: Sequence[Mapping[str, np.ndarray]],
    model: Callable[[dict[str, np.ndarray]], Mapping[str, Any]],
    separately: bool = False,
) -> list[Any]:
    """Return for each row the outputs of ``model``, ``{name: array}``, or the exception that it raised.

    Rows whose names, datatypes and shapes agree except for the first axis are joined for one call of
    ``model``. A row without a common first axis is run in a call of its own, as is every row with
    ``separately``. If a joined call fails, or its outputs have another length, its rows are run again one by
    one. So each row's error and length are its own.
    """
    groups: dict[Any, list[int]] = {}
    for index, row in enumerate(data):
        groups.setdefault(index if separately else _group_key(row) or index, []).append(index)
    outputs_by_row: list[Any] = [None] * len(data)
    for indices in groups.values():
        joined = _run_joined([data[index] for index in indices], model) if len(indices) > 1 else None
        for place, index in enumerate(indices):
            outputs_by_row[index] = joined[place] if joined is not None else _run_single(data[index], model)
    return outputs_by_row


def _group_key(row: Mapping[str, np.ndarray]) -> tuple[Any, ...] | None:
    """Return the properties that rows must share to be joined; None for a row that cannot be joined."""
    if any(array.ndim == 0 for array in row.values()) or len({len(array) for array in row.values()}) != 1:
        return None
    return tuple(sorted((name, array.dtype.str, array.shape[1:]) for name, array in row.items()))


def _run_joined(
    rows: Sequence[Mapping[str, np.ndarray]], model: Callable[[dict[str, np.ndarray]], Mapping[str, Any]]
) -> list[dict[str, Any]] | None:
    """Return the outputs of one call; None where it fails or its outputs cannot be split by row."""
    lengths = [len(next(iter(row.values()))) for row in rows]
    try:
        outputs = model({name: np.concatenate([row[name] for row in rows]) for name in rows[0]})
    except Exception:  # each row is then run by itself, and the failing one raises again
        return None
    if any(np.ndim(value) == 0 or len(value) != sum(lengths) for value in outputs.values()):
        return None
    ends = np.cumsum(lengths).tolist()
    return [
        {name: value[end - length : end] for name, value in outputs.items()}
        for end, length in zip(ends, lengths)
    ]


def _run_single(
    row: Mapping[str, np.ndarray], model: Callable[[dict[str, np.ndarray]], Mapping[str, Any]]
) -> Any:
    try:
        return dict(model(dict(row)))
    except Exception as error:
        return error
