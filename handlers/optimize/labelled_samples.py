"""Labelled sample requests for the metrics of a search."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from handlers.context import Row
from handlers.errors import HandlerLoadError


@dataclass(frozen=True)
class LabelledSamples:
    """Sample requests with a label each."""

    rows: Sequence[Row]
    labels: Sequence[Any]


def read_labelled_samples(file: Path, samples: Sequence[Path], rows: Sequence[Row]) -> LabelledSamples:
    """Return the labelled samples of ``file``; ``rows`` are those of the sample files.

    A ``.jsonl`` has the samples themselves: lines of ``{"input": …, "label": …}``. Any other file is JSON:
    the labels of the sample files, as a list in their order or as an object by their names. Raises
    HandlerLoadError.
    """
    try:
        if file.suffix == ".jsonl":
            lines = [json.loads(line) for line in file.read_text().splitlines() if line.strip()]
            found = LabelledSamples(
                [Row({"body": line["input"]}) for line in lines], [line["label"] for line in lines]
            )
        else:
            labels = json.loads(file.read_bytes())
            if isinstance(labels, Mapping):
                labels = [labels[sample.name] for sample in samples]
            found = LabelledSamples(rows, labels)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise HandlerLoadError(
            f"{file}: the labels cannot be read: {error!r}. Write lines of {{input, label}} as .jsonl, or a "
            "JSON list or object with the labels of the sample files."
        ) from error
    if not found.rows or not isinstance(found.labels, list) or len(found.rows) != len(found.labels):
        raise HandlerLoadError(f"{file}: there must be one label for each of the {len(found.rows)} samples")
    return found
