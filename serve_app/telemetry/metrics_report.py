"""Reports of a process's metrics: all values at first, then only those that have changed.

With 1,000 versions a process has 6,000 instruments, whose values take 20 ms to collect, send and read. Most
of them have not changed since the report before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from serve_app.telemetry.batch_stats import BatchStats
from serve_app.telemetry.instruments import Number
from serve_app.telemetry.torchserve.recorders import RecorderSample

InstrumentKey = tuple[str, ...]  # the name of one of Torchrelay's own metrics, and its label values
VersionKey = tuple[str, str]  # model and version


class MetricsReport(NamedTuple):
    """The values of a process that differ from its report ``base``; 0: it has all of them.

    ``values`` are of Torchrelay's own metrics, ``samples`` of those under TorchServe's names, and ``batches``
    are the batches by size. Only gauges are ever ``removed``.
    """

    number: int  # counts the reports of the process from 1
    base: int
    values: Mapping[InstrumentKey, Number]
    removed: tuple[InstrumentKey, ...]
    samples: tuple[RecorderSample, ...]
    batches: Mapping[VersionKey, BatchStats]


class ReportedValues:
    """The values of a process as last reported, kept at both ends."""

    def __init__(self) -> None:
        self.number = 0  # of the last report
        self.values: dict[InstrumentKey, Number] = {}
        self.samples: dict[tuple[str, tuple[str, ...]], RecorderSample] = {}  # by name and label values
        self.batches: dict[VersionKey, BatchStats] = {}

    def report(
        self,
        values: Mapping[InstrumentKey, Number],
        samples: Iterable[RecorderSample],
        batches: Mapping[VersionKey, BatchStats],
        full: bool,
    ) -> MetricsReport:
        """Return the next report of a process that has these values now."""
        base = 0 if full else self.number
        if full:
            self._clear()
        report = MetricsReport(
            number=self.number + 1,
            base=base,
            values={key: number for key, number in values.items() if self.values.get(key) != number},
            removed=tuple(self.values.keys() - values.keys()),
            samples=tuple(sample for sample in samples if self.samples.get(_key(sample)) != sample),
            batches={key: stats.copy() for key, stats in batches.items() if self.batches.get(key) != stats},
        )
        self.apply(report)
        return report

    def apply(self, report: MetricsReport) -> bool:
        """Take over a report; return False where it continues another one than the last."""
        if report.base == 0:
            self._clear()
        elif report.base != self.number:
            return False
        self.number = report.number
        self.values.update(report.values)
        for key in report.removed:
            del self.values[key]
        self.samples.update((_key(sample), sample) for sample in report.samples)
        self.batches.update(report.batches)
        return True

    def _clear(self) -> None:
        self.values.clear()
        self.samples.clear()
        self.batches.clear()


def _key(sample: RecorderSample) -> tuple[str, tuple[str, ...]]:
    return sample.family.name, sample.values
