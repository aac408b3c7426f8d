"""What the calls of this process said of trials: counted here, fetched by its link, added up by Management.

A call costs a few additions; nothing is computed that is not asked for.
"""

from __future__ import annotations

import json
import logging
import math
from dataclasses import dataclass, field
from typing import Any

import orjson

from serve_app.experiment import GROUPS
from serve_app.json_path import find
from serve_app.policy import Trial
from serve_app.traffic import Choice
from serve_app.types import Reply

log = logging.getLogger("torchrelay.observations")

LATENCY, ERROR_RATE, UNITS = "latency", "error_rate", "units"  # the sums of every experiment
OUTPUT, REWARD = "output:", "reward:"  # and before a metric's name, those of its own
CALLS = "/calls"  # behind a trial's id: its exposures by request id, where its units are keys

_WIDTH = 1.05  # of a histogram's bin: its end over its beginning
_BINS_PER_E = 1 / math.log(_WIDTH)
_FIRST = 1e-6  # seconds, where the first bin begins
_GREATEST = 1e12  # of an output: more could not be squared and summed
_EMPTY = (b"", b'""', b"[]", b"{}", b"null")
_EXPOSURES = 100_000  # that wait for the link, and as many again whose keys are remembered


def bin_of(seconds: float) -> int:
    """The bin of a histogram that a time falls into; each is 5 % wide."""
    return int(math.log(seconds * 1e6) * _BINS_PER_E) if seconds > _FIRST else 0


def upper(bin: int) -> float:
    """Where a bin ends, in seconds."""
    return _FIRST * _WIDTH ** (bin + 1)


def quantile(latency: dict[int, int], q: float) -> float:
    """The time within which a share ``q`` of the calls was answered, to the end of its bin; nan without calls."""
    wanted = q * sum(latency.values())
    seen = 0
    for bin in sorted(latency):
        seen += latency[bin]
        if seen >= wanted:
            return upper(bin)
    return math.nan


def slower(latency: dict[int, int], seconds: float) -> int:
    """How many calls took longer for sure: those in the bins behind that of ``seconds``."""
    last = bin_of(seconds)
    return sum(count for bin, count in latency.items() if bin > last)


@dataclass
class ArmFigures:
    """What the calls of one arm came to. Figures of several processes and times add up.

    ``latency`` is a histogram of answered calls: the index of a bin and the calls in it; see ``bin_of``. ``sums`` has
    for each metric and each group of buckets how many values there were, and their sum: ``latency`` in seconds, of
    answered calls; ``error_rate``, 1 for each call that failed; ``output:NAME``; ``reward:NAME``, each event a value;
    and ``units``, whose counts alone mean something, where the trial remembers who was given what.
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

    def add(self, other: ArmFigures) -> None:
        self.calls += other.calls
        self.units += other.units
        self.empty += other.empty
        self.non_finite += other.non_finite
        for mine, theirs in (
            (self.failed, other.failed),
            (self.missing, other.missing),
            (self.latency, other.latency),
        ):
            for key, count in theirs.items():
                mine[key] = mine.get(key, 0) + count  # type: ignore[index, call-overload]
        for name, groups in other.sums.items():
            sums = self.sums.setdefault(name, {})
            for group, (count, total) in groups.items():
                before = sums.get(group)
                sums[group] = (count, total) if before is None else (before[0] + count, before[1] + total)


@dataclass
class Seen:
    """What is new since the last time: figures by trial and arm, and who was given what."""

    figures: dict[str, dict[str, ArmFigures]] = field(default_factory=dict)
    exposures: list[tuple[str, str, str, int]] = field(default_factory=list)  # trial, unit, arm, bucket


class _Arm:
    """One arm's counts since they were last taken."""

    __slots__ = ("empty", "failed", "groups", "latency", "missing", "non_finite", "outputs", "trial")

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        self.groups: dict[int, list[float]] = {}  # answers, their seconds, failures
        self.latency: dict[int, int] = {}
        self.failed: dict[str, int] = {}
        self.empty = self.non_finite = 0
        self.missing: dict[str, int] = {}
        self.outputs: dict[str, dict[int, tuple[float, float]]] = {}

    def output(self, body: bytes, group: int) -> None:
        document = _document(body)
        for name, path in self.trial.outputs:
            key, value = OUTPUT + name, find(document, path)
            if isinstance(value, (int, float)) and abs(value) <= _GREATEST:  # which nan is not either
                sums = self.outputs.setdefault(key, {})
                count, total = sums.get(group, (0, 0.0))
                sums[group] = (count + 1, total + value)
            else:
                self.missing[key] = self.missing.get(key, 0) + 1

    @property
    def figures(self) -> ArmFigures:
        answers, failures = sum(self.latency.values()), sum(self.failed.values())
        sums = {ERROR_RATE: {g: (answered + failed, failed) for g, (answered, _, failed) in self.groups.items()}}
        if answers:
            sums[LATENCY] = {g: (answered, total) for g, (answered, total, _) in self.groups.items() if answered}
        calls = answers + failures
        return ArmFigures(
            calls=calls,
            units=0 if self.trial.exposures else calls,
            failed=self.failed,
            empty=self.empty,
            non_finite=self.non_finite,
            missing=self.missing,
            latency=self.latency,
            sums={**sums, **self.outputs},
        )


class Observations:
    """One for each process, on its event loop. ``exposures`` bounds how many wait, and how many keys are remembered.

    What waits is bounded by the trials that are on, and exposures by number: the oldest are lost while nobody fetches
    them.
    """

    def __init__(self, exposures: int = _EXPOSURES) -> None:
        self._limit = exposures
        self._arms: dict[tuple[str, str], _Arm] = {}
        self._exposures: dict[tuple[str, str], tuple[str, int]] = {}  # (trial, unit) -> (arm, bucket)
        # Keys that were told before, so that a caller who comes again is not: the newer ones, and those before them.
        self._told: set[tuple[str, str]] = set()
        self._told_before: set[tuple[str, str]] = set()
        self._lost = False

    def answered(
        self, choice: Choice, request_id: str, reply: Reply, seconds: float, streamed: bool = False
    ) -> None:
        """A call of ``choice.trial`` was answered, ``seconds`` after it came.

        A status of 500 and above is a failure. Of a reply that was ``streamed`` the head is given: it is at its end,
        and what was in it is not looked at.
        """
        if reply.status >= 500:
            self.failed(choice, request_id, f"status_{reply.status}")
            return
        arm = self._arm(choice, request_id)
        group = choice.bucket % GROUPS
        sums = arm.groups.get(group)
        if sums is None:
            arm.groups[group] = [1, seconds, 0]
        else:
            sums[0] += 1
            sums[1] += seconds
        bin = bin_of(seconds)
        arm.latency[bin] = arm.latency.get(bin, 0) + 1
        trial = arm.trial
        if streamed:
            return
        if trial.checks:
            if _is_empty(reply.body):
                arm.empty += 1
            elif _is_non_finite(reply.body):
                arm.non_finite += 1
        if trial.outputs:
            arm.output(reply.body, group)

    def failed(self, choice: Choice, request_id: str, reason: str) -> None:
        """A call of ``choice.trial`` failed, whoever's fault it is: arms are compared, and callers dealt out evenly.

        Callers that left are not told of here.
        """
        arm = self._arm(choice, request_id)
        sums = arm.groups.setdefault(choice.bucket % GROUPS, [0, 0.0, 0])
        sums[2] += 1
        arm.failed[reason] = arm.failed.get(reason, 0) + 1

    def take(self) -> Seen | None:
        """What is new since the last time; None where nothing is."""
        if not self._arms:
            return None
        seen = Seen(exposures=[(*unit, *given) for unit, given in self._exposures.items()])
        for (trial, name), arm in self._arms.items():
            seen.figures.setdefault(trial, {})[name] = arm.figures
        self._arms, self._exposures, self._lost = {}, {}, False
        return seen

    def _arm(self, choice: Choice, request_id: str) -> _Arm:
        trial = choice.trial
        assert trial is not None
        arm = self._arms.get((trial.id, choice.arm))
        if arm is None:
            arm = self._arms[trial.id, choice.arm] = _Arm(trial)
        if trial.exposures:
            self._expose(trial, choice, request_id)
        return arm

    def _expose(self, trial: Trial, choice: Choice, request_id: str) -> None:
        if trial.key is None:
            self._remember((trial.id, request_id), choice)
            return
        if trial.rewards:
            self._remember((trial.id + CALLS, request_id), choice)
        unit = (trial.id, choice.unit)
        if unit in self._told or unit in self._told_before:
            return
        if len(self._told) >= self._limit:
            self._told_before, self._told = self._told, set()
        self._told.add(unit)
        self._remember(unit, choice)

    def _remember(self, unit: tuple[str, str], choice: Choice) -> None:
        if len(self._exposures) >= self._limit:
            oldest = next(iter(self._exposures))
            del self._exposures[oldest]
            self._told.discard(oldest)
            self._told_before.discard(oldest)
            if not self._lost:
                self._lost = True
                log.warning("Management fetches nothing: who was given which arm is remembered for no more calls")
        self._exposures[unit] = (choice.arm, choice.bucket)


def _is_empty(body: bytes) -> bool:
    return len(body) < 16 and b"".join(body.split()) in _EMPTY


def _is_non_finite(body: bytes) -> bool:
    """Whether a JSON answer has NaN or an infinity among its values; as words in its texts they mean nothing."""
    if b"NaN" not in body and b"Infinity" not in body:
        return False
    found: list[str] = []
    try:
        json.loads(body, parse_constant=found.append)
    except (ValueError, RecursionError):
        return False
    return bool(found)


def _document(body: bytes) -> Any:
    """The answer as JSON, also as Python writes it; None where it is none."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        pass
    if b"NaN" not in body and b"Infinity" not in body:
        return None
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None
