"""The samples of many processes as first page in TorchServe's text format."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial

from serve_app.telemetry.torchserve.catalog import MetricFamily
from serve_app.telemetry.torchserve.recorders import BUCKETS, RecorderSample

log = logging.getLogger(__name__)

_BOUNDS = (*(repr(bound) for bound in BUCKETS), "+Inf")


class MetricsPage:
    """A page with the sums of counters and histograms, and the newest value of each gauge.

    The counts of ended processes are kept. ``initial`` are the families that are rendered before their first
    update.
    """

    def __init__(self, initial: Iterable[MetricFamily] = ()) -> None:
        self._families = {family.name: family for family in initial}
        self._ended: dict[tuple[str, tuple[str, ...]], RecorderSample] = {}
        self._warned: set[str] = set()

    def keep_counts(self, readings: Iterable[RecorderSample]) -> None:
        """Keep the counts of an ended process, without its gauges."""
        self._add(self._ended, (reading for reading in readings if reading.family.kind != "gauge"))

    def prepare(
        self, live: Iterable[RecorderSample], names: Collection[str] | None = None
    ) -> Callable[[], str]:
        """Return a function that renders the page with the samples of all ``live`` processes, in any thread.

        With ``names`` it has only these samples, and the families that have some.
        """
        totals = dict(self._ended)
        self._add(totals, live)
        return partial(_render, dict(self._families), totals, names)

    def _add(
        self, totals: dict[tuple[str, tuple[str, ...]], RecorderSample], readings: Iterable[RecorderSample]
    ) -> None:
        for reading in readings:
            family = reading.family
            declared = self._families.setdefault(family.name, family)
            if (declared.kind, declared.dimensions) != (family.kind, family.dimensions):
                if family.name not in self._warned:
                    self._warned.add(family.name)
                    log.warning(
                        "%s has two definitions, of which %s is rendered: %s", family.name, declared, family
                    )
                continue
            key = (family.name, reading.values)
            total = totals.get(key)
            totals[key] = reading if total is None else _combine(total, reading)


def _render(
    families: Mapping[str, MetricFamily],
    totals: Mapping[tuple[str, tuple[str, ...]], RecorderSample],
    names: Collection[str] | None,
) -> str:
    samples: dict[str, list[str]] = {name: [] for name in families}
    for (name, _), reading in totals.items():
        samples[name] += (line for sample, line in _samples(reading) if names is None or sample in names)
    lines: list[str] = []
    for name, family in families.items():
        if names is None or samples[name]:
            lines += (
                f"# HELP {name} {_escape(family.help)}",
                f"# TYPE {name} {family.kind}",
                *samples[name],
            )
    return "".join(f"{line}\n" for line in lines)


def _combine(first: RecorderSample, second: RecorderSample) -> RecorderSample:
    if first.family.kind == "gauge":
        return max(first, second, key=lambda reading: reading.time)
    if isinstance(first.number, tuple) and isinstance(second.number, tuple):
        return first._replace(number=tuple(a + b for a, b in zip(first.number, second.number, strict=True)))
    return first._replace(number=first.number + second.number)  # type: ignore[operator]


def _samples(reading: RecorderSample) -> Iterator[tuple[str, str]]:
    """Each sample's name and line; labels end in a comma, as TorchServe's do."""
    name, number = reading.family.name, reading.number
    labels = "".join(
        f'{k}="{_quote(v)}",' for k, v in zip(reading.family.dimensions, reading.values, strict=True)
    )
    if not isinstance(number, tuple):
        yield name, f"{name}{{{labels}}} {_format_number(number)}"
        return
    *counts, total = number
    cumulative = 0.0
    for bound, count in zip(_BOUNDS, counts, strict=True):
        cumulative += count
        yield f"{name}_bucket", f'{name}_bucket{{{labels}le="{bound}",}} {_format_number(cumulative)}'
    yield f"{name}_count", f"{name}_count{{{labels}}} {_format_number(cumulative)}"
    yield f"{name}_sum", f"{name}_sum{{{labels}}} {_format_number(total)}"


def _format_number(number: float) -> str:
    text = repr(float(number))
    return {"inf": "+Inf", "-inf": "-Inf", "nan": "NaN"}.get(text, text)


def _quote(text: str) -> str:
    return _escape(text).replace('"', '\\"')


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")
