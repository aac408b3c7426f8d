"""Instruments of a process: counters, gauges and histograms in plain numbers.

They belong to one event loop and take no lock. ``prometheus_client`` takes one for each update, and compares
a value with each bucket: 3 µs for an observation, against 0.3 µs here. A request updates six instruments.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from functools import cache

from prometheus_client.utils import floatToGoString

Sample = tuple[str, tuple[tuple[str, str], ...], float]
Labels = tuple[tuple[str, str], ...]  # sorted by name


@cache
def _bound_labels(bounds: tuple[float, ...]) -> tuple[tuple[str, str], ...]:
    """Return the labels of a histogram's buckets; few histograms have others."""
    return tuple(("le", floatToGoString(bound)) for bound in (*bounds, float("inf")))


class CounterInstrument:
    """A number that only increases."""

    __slots__ = ("_labels", "_name", "value")

    def __init__(self, name: str, labels: Labels, buckets: Sequence[float] = ()) -> None:
        self._name = f"{name}_total"
        self._labels = labels
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        self.value += amount

    def samples(self) -> Iterator[Sample]:
        yield self._name, self._labels, self.value


class GaugeInstrument:
    """A number that is set, or changes in both directions."""

    __slots__ = ("_labels", "_name", "value")

    def __init__(self, name: str, labels: Labels, buckets: Sequence[float] = ()) -> None:
        self._name = name
        self._labels = labels
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        self.value += amount

    def set(self, value: float) -> None:
        self.value = float(value)

    def samples(self) -> Iterator[Sample]:
        yield self._name, self._labels, self.value


class HistogramInstrument:
    """Counts of values by bucket, and their sum; ``buckets`` are upper bounds.

    The last of ``counts`` is of the values beyond all ``bounds``.
    """

    __slots__ = ("_labels", "_name", "bounds", "counts", "sum")

    def __init__(self, name: str, labels: Labels, buckets: Sequence[float]) -> None:
        self._name = name
        self._labels = labels
        self.bounds = buckets
        self.counts = [0] * (len(buckets) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def observe_all(self, values: Iterable[float]) -> None:
        counts, bounds, total = self.counts, self.bounds, 0.0
        for value in values:
            counts[bisect_left(bounds, value)] += 1
            total += value
        self.sum += total

    def samples(self) -> Iterator[Sample]:
        """Return the cumulative counts by upper bound, the count and the sum, as Prometheus names them."""
        count, name = 0, f"{self._name}_bucket"
        for bound, number in zip(_bound_labels(tuple(self.bounds)), self.counts, strict=True):
            count += number
            yield name, tuple(sorted((*self._labels, bound))), float(count)
        yield f"{self._name}_count", self._labels, float(count)
        yield f"{self._name}_sum", self._labels, self.sum


Instrument = CounterInstrument | GaugeInstrument | HistogramInstrument
