"""Windows of requests as mergeable statistics of their features, and the comparison of two windows."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import numpy as np
from typing_extensions import TypedDict

from serve_app.domain import drift
from serve_app.domain.drift import LEVELS, DriftLevel, Weighted
from serve_app.domain.sketches import CategorySketch, QuantileSketch
from serve_app.domain.validation import documented

FeatureKind = Literal["numeric", "categorical", "text_length"]

_MIN_COUNT = 30  # values of each window, before drift is computed
_TEXT_SHARE = 0.1  # of the reference's strings may be beyond the counted ones; more are text, not categories
_CHART_BINS = 20
_CHART_RANGE = (0.005, 0.995)  # quantiles; the values beyond are in the first and the last bin
_CHART_CATEGORIES = 20
_MAX_OMITTED = 200  # names
_OTHER = "(other)"


class FeatureHistogram(TypedDict):
    """Shares of both windows in the same bins: those between ``edges``, or those of ``categories``."""

    edges: list[float]
    categories: list[str]
    reference: list[float]
    current: list[float]


class FeatureDrift(TypedDict):
    """The drift of one feature; the statistics are null while a window has fewer than 30 values."""

    name: str
    kind: FeatureKind
    psi: Annotated[float | None, documented("Population stability index.")]
    psi_critical: Annotated[float | None, documented("Exceeded by chance in one of 100 cases.")]
    ks: Annotated[float | None, documented("Kolmogorov-Smirnov statistic; null for categories.")]
    ks_critical: Annotated[float | None, documented("Exceeded by chance in one of 20 cases.")]
    level: DriftLevel
    reference_count: int
    current_count: int
    histogram: FeatureHistogram | None


class FeatureSketch:
    """The values of a feature: numbers, or strings with their lengths."""

    __slots__ = ("categories", "numbers")

    def __init__(self, numbers: QuantileSketch, categories: CategorySketch | None) -> None:
        self.numbers = numbers  # of strings the lengths
        self.categories = categories

    @property
    def count(self) -> int:
        return self.numbers.count

    @property
    def kind(self) -> FeatureKind:
        if self.categories is None:
            return "numeric"
        is_text = self.categories.other > _TEXT_SHARE * max(1, self.categories.count)
        return "text_length" if is_text else "categorical"

    def merge(self, other: FeatureSketch) -> None:
        """Add a sketch; one of the other type of values is ignored."""
        if (self.categories is None) != (other.categories is None):
            return
        self.numbers.merge(other.numbers)
        if self.categories is not None and other.categories is not None:
            self.categories.merge(other.categories)


@dataclass
class FeatureWindow:
    """The statistics of some requests. Those of several processes and periods add up.

    ``omitted`` are the names of features beyond ``limit``. Times are in seconds since the epoch.
    """

    limit: int
    requests: int = 0
    since: float = field(default_factory=time.time)
    until: float = 0.0
    features: dict[str, FeatureSketch] = field(default_factory=dict)
    omitted: set[str] = field(default_factory=set)

    def add(self, features: Iterable[tuple[str, float | str]]) -> None:
        """Add the feature values of one request."""
        self.requests += 1
        self.until = time.time()
        for name, value in features:
            is_text = isinstance(value, str)
            sketch = self.features.get(name)
            if sketch is None:
                sketch = self._create(name, is_text)
            if sketch is None or (sketch.categories is not None) != is_text:
                continue
            sketch.numbers.add((len(value) if isinstance(value, str) else value,))
            if sketch.categories is not None:
                sketch.categories.add(str(value))

    def _create(self, name: str, is_text: bool) -> FeatureSketch | None:
        if len(self.features) >= self.limit:
            if len(self.omitted) < _MAX_OMITTED:
                self.omitted.add(name)
            return None
        sketch = self.features[name] = FeatureSketch(QuantileSketch(), CategorySketch() if is_text else None)
        return sketch

    def merge(self, other: FeatureWindow) -> None:
        self.requests += other.requests
        self.since, self.until = min(self.since, other.since), max(self.until, other.until)
        for name, sketch in other.features.items():
            mine = self.features.get(name) or self._create(name, sketch.categories is not None)
            if mine is not None:
                mine.merge(sketch)
        self.omitted.update(list(other.omitted)[: _MAX_OMITTED - len(self.omitted)])

    def to_dict(self) -> dict[str, Any]:
        """Return the window as JSON data."""
        features = {
            name: [sketch.numbers.to_list(), sketch.categories.to_list() if sketch.categories else None]
            for name, sketch in self.features.items()
        }
        return {
            "limit": self.limit,
            "requests": self.requests,
            "since": self.since,
            "until": self.until,
            "features": features,
            "omitted": sorted(self.omitted),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> FeatureWindow:
        features = {
            name: FeatureSketch(
                QuantileSketch.from_list(numbers),
                CategorySketch.from_list(categories) if categories else None,
            )
            for name, (numbers, categories) in data["features"].items()
        }
        return cls(
            data["limit"], data["requests"], data["since"], data["until"], features, set(data["omitted"])
        )


def merge_windows(windows: Iterable[FeatureWindow], limit: int) -> FeatureWindow:
    """Return the sum of windows, which stay as they are."""
    total = FeatureWindow(limit)
    for window in windows:
        total.merge(window)
    return total


def compare_windows(reference: FeatureWindow, current: FeatureWindow) -> list[FeatureDrift]:
    """Return the drift of every feature of the reference, the largest index first."""
    found = [
        _compare_feature(name, sketch, current.features.get(name))
        for name, sketch in reference.features.items()
    ]
    return sorted(found, key=lambda feature: (-(feature["psi"] or 0.0), feature["name"]))


def worst_level(features: Iterable[FeatureDrift]) -> DriftLevel:
    return max((feature["level"] for feature in features), key=LEVELS.index, default="none")


def _compare_feature(name: str, reference: FeatureSketch, current: FeatureSketch | None) -> FeatureDrift:
    result: FeatureDrift = {
        "name": name,
        "kind": reference.kind,
        "psi": None,
        "psi_critical": None,
        "ks": None,
        "ks_critical": None,
        "level": "none",
        "reference_count": reference.count,
        "current_count": current.count if current is not None else 0,
        "histogram": None,
    }
    if current is None or min(reference.count, current.count) < _MIN_COUNT:
        return result
    sizes = reference.count, current.count
    if (
        reference.categories is not None
        and current.categories is not None
        and reference.kind == "categorical"
    ):
        categories, before, now = _align(reference.categories, current.categories)
        result["histogram"] = _chart_categories(categories, before, now)
    else:
        first, second = reference.numbers.weighted(), current.numbers.weighted()
        edges = drift.quantile_edges(first)
        before, now = drift.count_bins(first, edges), drift.count_bins(second, edges)
        result["ks"] = round(drift.ks_statistic(first, second), 6)
        result["ks_critical"] = round(drift.ks_critical(*sizes), 6)
        result["histogram"] = _chart_numbers(first, second)
    index = drift.stability_index(before, now)
    bins = int(np.count_nonzero(before + now))  # empty ones contribute nothing
    critical = drift.stability_index_critical(bins, *sizes)
    result["psi"], result["psi_critical"] = round(index, 6), round(critical, 6)
    result["level"] = drift.drift_level(index, critical)
    return result


def _align(reference: CategorySketch, current: CategorySketch) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Return the reference's categories, the others as one, and both windows' counts of them."""
    names = sorted(reference.counts, key=lambda name: (-reference.counts[name], name))
    before = np.array([*(reference.counts[name] for name in names), reference.other], np.float64)
    known = [current.counts.get(name, 0) for name in names]
    now = np.array([*known, current.count - sum(known)], np.float64)
    return [*names, _OTHER], before, now


def _chart_categories(names: list[str], before: np.ndarray, now: np.ndarray) -> FeatureHistogram:
    if len(names) > _CHART_CATEGORIES + 1:
        names = [*names[:_CHART_CATEGORIES], _OTHER]
        before, now = (
            np.append(counts[:_CHART_CATEGORIES], counts[_CHART_CATEGORIES:].sum())
            for counts in (before, now)
        )
    return {"edges": [], "categories": names, "reference": _shares(before), "current": _shares(now)}


def _chart_numbers(reference: Weighted, current: Weighted) -> FeatureHistogram:
    """Return bins of equal width over the values of both windows, without extreme ones."""
    bounds = [_quantiles(sample) for sample in (reference, current)]
    low, high = min(low for low, _ in bounds), max(high for _, high in bounds)
    edges = np.linspace(low, high, _CHART_BINS + 1) if low < high else np.array([low, low])
    counts = []
    for values, weights in (reference, current):
        bins = np.clip(np.searchsorted(edges, values, side="right") - 1, 0, len(edges) - 2)
        counts.append(np.bincount(bins, weights, minlength=len(edges) - 1))
    return {
        "edges": [float(f"{edge:.6g}") for edge in edges],
        "categories": [],
        "reference": _shares(counts[0]),
        "current": _shares(counts[1]),
    }


def _quantiles(sample: Weighted) -> tuple[float, float]:
    values, weights = sample
    ranks = np.cumsum(weights) / weights.sum()
    low, high = (values[min(int(np.searchsorted(ranks, q)), len(values) - 1)] for q in _CHART_RANGE)
    return float(low), float(high)


def _shares(counts: np.ndarray) -> list[float]:
    return [round(float(share), 4) for share in counts / counts.sum()]
