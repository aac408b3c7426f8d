"""The search for the highest rate of arrivals at which a server keeps a latency limit."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_GOOD_SHARE = 0.99  # of the requests must succeed within the limit
_MIN_UTILIZATION = 0.02  # the lowest rate, relative to one client's closed loop
_MAX_STEPS = 10
_NARROW = 2.0  # times the limit: a p99 above it is no disturbance of the machine
_MAX_LAG = 0.25  # of the limit: a generator that is later itself has measured the machine


@dataclass(frozen=True)
class LoadStep:
    """The figures of one load. Latencies are seconds, of the first token for text generation.

    ``rate`` is None in a closed loop of ``connections``. ``generation`` has ttft, itl (seconds) and
    tokens_per_second of text generation.
    """

    rate: float | None
    connections: int
    seconds: float
    requests: int
    completed: int
    within: int
    failed: int
    p50: float
    p99: float
    mean: float = math.nan  # of the whole request
    lag: float = 0.0  # p99 of the generator's own delay
    errors: Mapping[str, int] = field(default_factory=dict)
    generation: Mapping[str, float] | None = None

    @property
    def throughput(self) -> float:
        return self.completed / self.seconds

    @property
    def goodput(self) -> float:
        return self.within / self.seconds

    @property
    def in_flight(self) -> float:
        """Return the mean number of requests in the server, by Little's law."""
        return self.throughput * self.mean

    def meets(self, limit: float) -> bool:
        """Return whether 99 % of the requests succeeded within the limit, failures counting as late."""
        good = self.within / (self.completed + self.failed) if self.completed + self.failed else 0.0
        return self.requests > 0 and self.p99 <= limit and good >= _GOOD_SHARE

    @classmethod
    def parse(cls, document: Mapping[str, Any]) -> LoadStep:
        """Return a step of a JSON object, in which null is NaN."""
        times = {key: math.nan if document[key] is None else document[key] for key in ("p50", "p99", "mean")}
        return cls(**{**document, **times})


@dataclass(frozen=True)
class RateOptions:
    """The options of a search: the ratio of bounds at which it ends, and the first factor between rates."""

    precision: float = 1.1
    growth: float = 1.5
    max_steps: int = _MAX_STEPS
    repeats: bool = True  # whether a step that misses the limit narrowly is repeated


def find_rate(
    send: Callable[[float], LoadStep],
    limit: float,
    start: float,
    options: RateOptions,
    floor: float | None = None,
) -> list[LoadStep]:
    """Return the steps of a search for the highest rate that meets the limit.

    The rate grows by a factor until a step misses the limit, or falls until one meets it; then the geometric
    mean of the two bounds is tried until they are within the precision. ``floor`` is the rate of the best
    candidate so far: one that misses the limit there gets one more step, at half the rate, and is given up.
    A step that misses the limit narrowly, or with a late generator, is repeated once.
    """
    steps: list[LoadStep] = []
    low, high, rate, most = 0.0, math.inf, start, options.max_steps
    lowest = start * _MIN_UTILIZATION
    while len(steps) < most and rate >= lowest:
        step = send(rate)
        steps.append(step)
        if not step.meets(limit) and len(steps) < most and _may_be_noise(step, limit, options):
            step = send(rate)
            steps.append(step)
        if step.meets(limit):
            low = max(low, rate)
        else:
            high = min(high, rate)
            if floor is not None and low == 0 and rate == start:
                most = min(most, len(steps) + 1)
        if high <= low * options.precision:
            break
        between = math.sqrt(low * high) if low else high / 2
        rate = low * options.growth if math.isinf(high) else between
    return steps


def _may_be_noise(step: LoadStep, limit: float, options: RateOptions) -> bool:
    is_narrow = step.p99 <= limit * _NARROW
    return step.lag > limit * _MAX_LAG or (options.repeats and is_narrow)


def best_step(steps: Sequence[LoadStep], limit: float) -> LoadStep | None:
    """Return the step with the highest goodput of those that meet the limit."""
    good = [step for step in steps if step.rate is not None and step.meets(limit)]
    return max(good, key=lambda step: step.goodput, default=None)
