"""Statistics of experiments and rollouts in this process: counted here, and sent to Management for
aggregation.

A request costs a few additions; only requested metrics are computed.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from serve_app.dataplane.count_journal import CountJournal
from serve_app.dataplane.routing.version_router import VersionSelection
from serve_app.domain.experiment import BUCKET_GROUPS
from serve_app.domain.json_path import find, parse_json
from serve_app.domain.request import InferenceResponse
from serve_app.domain.traffic_policy import ActiveSplit

log = logging.getLogger(__name__)

LATENCY, ERROR_RATE, UNITS = "latency", "error_rate", "units"  # the sums of every experiment
OUTPUT, REWARD = "output:", "reward:"  # and before a metric's name, those of its own
REQUEST_EXPOSURES = "/calls"  # behind a trial's id: its exposures by request id, where its units are keys

_BIN_GROWTH = 1.05  # of a histogram's bin: its end over its beginning
_BINS_PER_E = 1 / math.log(_BIN_GROWTH)
_FIRST_BIN_S = 1e-6  # seconds, where the first bin begins
_MAX_OUTPUT = 1e12  # of an output: more could not be squared and summed
_EMPTY = (b"", b'""', b"[]", b"{}", b"null")
_MAX_EXPOSURES = 100_000  # that wait for the link, and as many again whose keys are remembered

_Key = TypeVar("_Key")
_Outputs = tuple[tuple[str, "float | None"], ...]  # the number of each metric's output, where there is one


def bin_index(seconds: float) -> int:
    """Return the histogram bin of a duration; each bin is 5 % wide."""
    return int(math.log(seconds * 1e6) * _BINS_PER_E) if seconds > _FIRST_BIN_S else 0


def bin_upper_bound(bin: int) -> float:
    """Return the end of a bin, in seconds."""
    return _FIRST_BIN_S * _BIN_GROWTH ** (bin + 1)


def quantile(latency: dict[int, int], q: float) -> float:
    """Return the end of the bin that contains the quantile ``q`` of the latency; nan without requests."""
    wanted = q * sum(latency.values())
    seen = 0
    for bin in sorted(latency):
        seen += latency[bin]
        if seen >= wanted:
            return bin_upper_bound(bin)
    return math.nan


def count_slower(latency: dict[int, int], seconds: float) -> int:
    """Return a lower bound on the number of requests slower than ``seconds``: those in later bins."""
    last = bin_index(seconds)
    return sum(count for bin, count in latency.items() if bin > last)


@dataclass
class ArmStats:
    """The statistics of one arm. Those of several processes and periods add up.

    ``latency`` is a histogram of answered requests: the index of a bin and its count; see ``bin_index``.
    ``sums`` has for each metric and each group of buckets the number of values and their sum: ``latency`` in
    seconds, of answered requests; ``error_rate``, 1 for each failed request; ``output:NAME``;
    ``reward:NAME``, each event a value; and ``units``, of which only the counts matter, where the split
    records exposures.
    """

    calls: int = 0
    units: int = 0  # different keys, where the trial remembers them; else calls
    failed: dict[str, int] = field(default_factory=dict)  # by reason; callers that left are not among them
    empty: int = 0
    non_finite: int = 0
    missing: dict[str, int] = field(default_factory=dict)  # answers without the number of ``output:NAME``
    latency: dict[int, int] = field(default_factory=dict)
    sums: dict[str, dict[int, tuple[float, float]]] = field(default_factory=dict)

    @property
    def failures(self) -> int:
        return sum(self.failed.values())

    def add(self, other: ArmStats) -> None:
        self.calls += other.calls
        self.units += other.units
        self.empty += other.empty
        self.non_finite += other.non_finite
        _add_counts(self.failed, other.failed)
        _add_counts(self.missing, other.missing)
        _add_counts(self.latency, other.latency)
        for name, groups in other.sums.items():
            sums = self.sums.setdefault(name, {})
            for group, (values, total) in groups.items():
                before = sums.get(group)
                sums[group] = (values, total) if before is None else (before[0] + values, before[1] + total)


def _add_counts(counts: dict[_Key, int], other: dict[_Key, int]) -> None:
    for key, count in other.items():
        counts[key] = counts.get(key, 0) + count


@dataclass
class ExperimentReport:
    """The statistics since the last report, by split and arm, and the new exposures."""

    figures: dict[str, dict[str, ArmStats]] = field(default_factory=dict)
    exposures: list[tuple[str, str, str, int]] = field(default_factory=list)  # trial, unit, arm, bucket


class _ArmCounts:
    """The counts of an arm since they were last drained."""

    __slots__ = ("counts_units", "groups", "stats")

    def __init__(self, counts_units: bool) -> None:
        self.counts_units = counts_units  # every request is a unit; else exposures count them
        self.stats = ArmStats()
        self.groups: dict[int, list[float]] = {}  # answers, their seconds, failures

    def add_response(self, group: int, seconds: float, quality: str, outputs: _Outputs) -> None:
        sums = self.groups.setdefault(group, [0, 0.0, 0])
        sums[0] += 1
        sums[1] += seconds
        bin, stats = bin_index(seconds), self.stats
        stats.latency[bin] = stats.latency.get(bin, 0) + 1
        stats.empty += quality == "empty"
        stats.non_finite += quality == "non_finite"
        for name, value in outputs:
            key = OUTPUT + name
            if value is None:
                stats.missing[key] = stats.missing.get(key, 0) + 1
            else:
                totals = stats.sums.setdefault(key, {})
                count, total = totals.get(group, (0, 0.0))
                totals[group] = (count + 1, total + value)

    def add_failure(self, group: int, reason: str) -> None:
        self.groups.setdefault(group, [0, 0.0, 0])[2] += 1
        self.stats.failed[reason] = self.stats.failed.get(reason, 0) + 1

    def finish(self) -> ArmStats:
        """Return the statistics with the totals of all groups."""
        stats, groups = self.stats, self.groups.items()
        stats.calls = sum(stats.latency.values()) + stats.failures
        stats.units = stats.calls if self.counts_units else 0
        stats.sums[ERROR_RATE] = {g: (answered + failed, failed) for g, (answered, _, failed) in groups}
        if stats.latency:
            stats.sums[LATENCY] = {g: (answered, total) for g, (answered, total, _) in groups if answered}
        return stats


class ExperimentCollector:
    """The collector of one process, on its event loop. ``max_exposures`` limits those that wait, and the
    known keys.

    Memory is limited by the number of active splits and of exposures: the oldest are dropped while no process
    drains them.
    """

    def __init__(self, max_exposures: int = _MAX_EXPOSURES, journal: CountJournal | None = None) -> None:
        self.journal = journal  # of all counts since they were last drained
        self._limit = max_exposures
        self._arms: dict[tuple[str, str], _ArmCounts] = {}
        self._exposures: dict[tuple[str, str], tuple[str, int]] = {}  # (trial, unit) -> (arm, bucket)
        # Keys whose exposure was reported, so that it is not reported again: the newer ones, and the older.
        self._known_keys: set[tuple[str, str]] = set()
        self._older_keys: set[tuple[str, str]] = set()
        self._lost = False

    def record_response(
        self,
        choice: VersionSelection,
        request_id: str,
        reply: InferenceResponse,
        seconds: float,
        streamed: bool = False,
    ) -> None:
        """Count a response of ``choice.active_split`` that took ``seconds``.

        A status of 500 and above is a failure. Of a ``streamed`` response, which has ended, only the head is
        given and no content is checked.
        """
        if reply.status >= 500:
            self.record_failure(choice, request_id, f"status_{reply.status}")
            return
        split = choice.active_split
        assert split is not None
        quality = "" if streamed or not split.checks else _judge(reply)
        outputs = () if streamed or not split.outputs else _find_outputs(split, reply.body)
        self._add(choice, request_id, seconds, "", quality, outputs)

    def record_failure(self, choice: VersionSelection, request_id: str, reason: str) -> None:
        """Count a failed request of ``choice.active_split``, whatever the cause: arms are compared, and
        clients are distributed evenly.

        Requests whose client disconnected are not recorded.
        """
        self._add(choice, request_id, 0.0, reason, "", ())

    def _add(
        self,
        choice: VersionSelection,
        request_id: str,
        seconds: float,
        reason: str,  # of a failure
        quality: str,
        outputs: _Outputs,
    ) -> None:
        split = choice.active_split
        assert split is not None
        key, group = (split.id, choice.arm), choice.bucket % BUCKET_GROUPS
        if (arm := self._arms.get(key)) is None:
            arm = self._arms[key] = _ArmCounts(not split.exposures)
        if reason:
            arm.add_failure(group, reason)
        else:
            arm.add_response(group, seconds, quality, outputs)
        exposed = self._expose(split, choice, request_id) if split.exposures else ()
        if self.journal is not None:
            self.journal.append((*key, arm.counts_units, group, seconds, reason, quality, outputs, exposed))

    def drain(self) -> ExperimentReport | None:
        """Return the statistics since the last call; None where there are none."""
        if not self._arms:
            return None
        seen = ExperimentReport(exposures=[(*unit, *given) for unit, given in self._exposures.items()])
        for (trial, name), arm in self._arms.items():
            seen.figures.setdefault(trial, {})[name] = arm.finish()
        self._arms, self._exposures, self._lost = {}, {}, False
        return seen

    def _expose(
        self, trial: ActiveSplit, choice: VersionSelection, request_id: str
    ) -> tuple[tuple[str, str, str, int], ...]:
        """Remember the exposures of a request; return the new ones, as a report has them."""
        if trial.key is None:
            units = [(trial.id, request_id)]
        else:
            units = [(trial.id + REQUEST_EXPOSURES, request_id)] if trial.rewards else []
            unit = (trial.id, choice.unit)
            if unit not in self._known_keys and unit not in self._older_keys:
                if len(self._known_keys) >= self._limit:
                    self._older_keys, self._known_keys = self._known_keys, set()
                self._known_keys.add(unit)
                units.append(unit)
        for unit in units:
            self._remember(unit, choice)
        return tuple((*unit, choice.arm, choice.bucket) for unit in units)

    def _remember(self, unit: tuple[str, str], choice: VersionSelection) -> None:
        if len(self._exposures) >= self._limit:
            oldest = next(iter(self._exposures))
            del self._exposures[oldest]
            self._known_keys.discard(oldest)
            self._older_keys.discard(oldest)
            if not self._lost:
                self._lost = True
                log.warning(
                    "Management has not fetched the exposures of experiments; the oldest are dropped, and "
                    "their rewards will be refused"
                )
        self._exposures[unit] = (choice.arm, choice.bucket)


def replay(records: Iterable[tuple[Any, ...]]) -> ExperimentReport:
    """Return the report of a journal's records."""
    report = ExperimentReport()
    arms: dict[tuple[str, str], _ArmCounts] = {}
    for trial, name, counts_units, group, seconds, reason, quality, outputs, exposed in records:
        arm = arms.setdefault((trial, name), _ArmCounts(counts_units))
        if reason:
            arm.add_failure(group, reason)
        else:
            arm.add_response(group, seconds, quality, outputs)
        report.exposures.extend(exposed)
    for (trial, name), arm in arms.items():
        report.figures.setdefault(trial, {})[name] = arm.finish()
    return report


def _find_outputs(split: ActiveSplit, body: bytes) -> _Outputs:
    document = parse_json(body)
    found = ((name, find(document, path)) for name, path in split.outputs)
    return tuple(
        # A comparison with nan is false.
        (name, value if isinstance(value, (int, float)) and abs(value) <= _MAX_OUTPUT else None)
        for name, value in found
    )


def _judge(reply: InferenceResponse) -> str:
    """Return "empty", "non_finite" or nothing."""
    if _is_empty(reply.body):
        return "empty"
    return "non_finite" if reply.non_finite or _is_non_finite(reply.body) else ""


def _is_empty(body: bytes) -> bool:
    return len(body) < 16 and b"".join(body.split()) in _EMPTY


def _is_non_finite(body: bytes) -> bool:
    """Return whether a JSON response has NaN or an infinity among its values; in strings they do not
    count.
    """
    if b"NaN" not in body and b"Infinity" not in body:
        return False
    found: list[str] = []
    try:
        json.loads(body, parse_constant=found.append)
    except (ValueError, RecursionError):
        return False
    return bool(found)
