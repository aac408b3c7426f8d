"""The readings of many processes as one page in TorchServe's text form."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator

from serve_app.telemetry.torchserve.catalogue import Family
from serve_app.telemetry.torchserve.meters import BUCKETS, Reading

log = logging.getLogger("torchrelay.metrics")

_BOUNDS = (*(repr(bound) for bound in BUCKETS), "+Inf")


class Page:
    """Counters and histograms add up, and what an ended process counted stays; of a gauge's values the newest holds.

    ``shown`` are the families that stand on the page before anybody has updated them.
    """

    def __init__(self, shown: Iterable[Family] = ()) -> None:
        self._families = {family.name: family for family in shown}
        self._live: dict[str, list[Reading]] = {}
        self._ended: dict[tuple[str, tuple[str, ...]], Reading] = {}
        self._told: set[str] = set()

    def put(self, source: str, readings: list[Reading]) -> None:
        self._live[source] = readings

    def end(self, source: str) -> None:
        """The process behind ``source`` is gone: keep its counts, forget its gauges."""
        readings = [reading for reading in self._live.pop(source, ()) if reading.family.kind != "gauge"]
        self._add(self._ended, readings)

    def render(self, names: Collection[str] | None = None) -> str:
        """The page; with ``names`` only the samples that are called so, and the families that have some."""
        held = dict(self._ended)
        for readings in self._live.values():
            self._add(held, readings)
        samples: dict[str, list[str]] = {name: [] for name in self._families}
        for (name, _), reading in held.items():
            samples[name] += (line for called, line in _samples(reading) if names is None or called in names)
        lines: list[str] = []
        for name, family in self._families.items():
            if names is None or samples[name]:
                lines += (f"# HELP {name} {_escaped(family.help)}", f"# TYPE {name} {family.kind}", *samples[name])
        return "".join(f"{line}\n" for line in lines)

    def _add(self, held: dict[tuple[str, tuple[str, ...]], Reading], readings: Iterable[Reading]) -> None:
        for reading in readings:
            family = reading.family
            known = self._families.setdefault(family.name, family)
            if (known.kind, known.dimensions) != (family.kind, family.dimensions):
                if family.name not in self._told:
                    self._told.add(family.name)
                    log.warning("%s is measured in two ways, of which %s is shown: %s", family.name, known, family)
                continue
            key = (family.name, reading.values)
            there = held.get(key)
            held[key] = reading if there is None else _together(there, reading)


def _together(one: Reading, other: Reading) -> Reading:
    if one.family.kind == "gauge":
        return max(one, other, key=lambda reading: reading.time)
    if isinstance(one.number, tuple) and isinstance(other.number, tuple):
        return one._replace(number=tuple(a + b for a, b in zip(one.number, other.number, strict=True)))
    return one._replace(number=one.number + other.number)  # type: ignore[operator]


def _samples(reading: Reading) -> Iterator[tuple[str, str]]:
    """Each sample's name and line; labels end in a comma, as TorchServe's do."""
    name, number = reading.family.name, reading.number
    labels = "".join(f'{k}="{_quoted(v)}",' for k, v in zip(reading.family.dimensions, reading.values, strict=True))
    if not isinstance(number, tuple):
        yield name, f"{name}{{{labels}}} {_text(number)}"
        return
    *counts, total = number
    reached = 0.0
    for bound, count in zip(_BOUNDS, counts, strict=True):
        reached += count
        yield f"{name}_bucket", f'{name}_bucket{{{labels}le="{bound}",}} {_text(reached)}'
    yield f"{name}_count", f"{name}_count{{{labels}}} {_text(reached)}"
    yield f"{name}_sum", f"{name}_sum{{{labels}}} {_text(total)}"


def _text(number: float) -> str:
    text = repr(float(number))
    return {"inf": "+Inf", "-inf": "-Inf", "nan": "NaN"}.get(text, text)


def _quoted(text: str) -> str:
    return _escaped(text).replace('"', '\\"')


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")
