"""Labels of a classifier's outputs, from ``index_to_name.json``."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any


def load_label_mapping(mapping_file_path: str | os.PathLike[str]) -> dict[str, str] | None:
    """Return the labels by class index, which is text; None if the file does not exist.

    The file has one of three forms: ``{"0": "cat"}``, ``{"0": ["n02123045", "cat"]}`` (the last name is
    used), or ``{"object_type_names": ...}`` around a list of names or either of the others.
    """
    if not os.path.isfile(mapping_file_path):
        return None
    try:
        with open(mapping_file_path, encoding="utf-8") as file:
            mapping = json.load(file)
    except ValueError as error:
        raise ValueError(
            f'{mapping_file_path}: this is not JSON ({error}). Write it as {{"0": "cat"}}.'
        ) from error
    if isinstance(mapping, dict) and isinstance(mapping.get("object_type_names"), (list, dict)):
        names = mapping["object_type_names"]
        mapping = {str(index): name for index, name in enumerate(names)} if isinstance(names, list) else names
    if not isinstance(mapping, dict):
        raise ValueError(
            f'{mapping_file_path}: a label mapping is a JSON object like {{"0": "cat"}}, '
            f"and this is a {type(mapping).__name__}."
        )
    return {index: _label(index, value, mapping_file_path) for index, value in mapping.items()}


def _label(index: str, value: Any, path: object) -> str:
    name = value[-1] if isinstance(value, list) and value else value
    if not isinstance(name, str):
        raise ValueError(
            f"{path}: the label of class {index} is {value!r}; it must be a string or a list of strings."
        )
    return name


def map_class_to_label(
    probs: list[list[float]],
    mapping: dict[str, str] | None = None,
    lbl_classes: Sequence[Sequence[int]] | None = None,
) -> list[dict[str, float]]:
    """Return ``{label: probability}`` for each row, in the given order.

    ``lbl_classes`` has the class of each probability (by default 0, 1, 2 ...). A class without a label in
    ``mapping`` is given by its number.
    """
    if not isinstance(probs, list):
        raise TypeError(f"probs is a {type(probs).__name__}: give a list of lists (tensor.tolist()).")
    if mapping is not None and not isinstance(mapping, dict):
        raise TypeError(
            f"mapping is a {type(mapping).__name__}: give a dict such as load_label_mapping returns."
        )
    names = mapping or {}
    classes = lbl_classes if lbl_classes is not None else [range(len(row)) for row in probs]
    return [
        {names.get(str(cls), str(cls)): prob for cls, prob in zip(row, values)}
        for row, values in zip(classes, probs)
    ]
