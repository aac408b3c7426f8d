"""Servers whose latencies follow from a formula, for tests of the search without a clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from serve_app.load_test.candidate import Candidate
from serve_app.load_test.rate_search import LoadStep, find_rate
from serve_app.load_test.trials import Trial
from serve_app.load_test.tuning_search import TrialRequest

SECONDS = 10.0


def load_step(rate: float, capacity: float, service: float, limit: float, lag: float = 0.0) -> LoadStep:
    """Return the step of a queue: its p99 grows without bound as the rate approaches the capacity."""
    requests = round(rate * SECONDS)
    p99 = service / (1 - rate / capacity) if rate < capacity else 1000.0
    within = requests if p99 <= limit else 0
    return LoadStep(rate, 256, SECONDS, requests, requests, within, 0, p99 / 2, p99, p99 / 2, lag)


@dataclass
class SimulatedServer:
    """Trials of candidates with the ``capacity`` of a function; the service takes a millisecond."""

    capacity: Callable[[Candidate], float]
    limit: float = 0.02
    service: float = 0.001
    requests: list[TrialRequest] = field(default_factory=list)

    def run_trial(self, request: TrialRequest) -> Trial:
        self.requests.append(request)
        capacity = self.capacity(request.candidate)
        start = request.start or 0.6 * capacity

        def send(rate: float) -> LoadStep:
            return load_step(rate, capacity, self.service, self.limit)

        steps = tuple(find_rate(send, self.limit, start, request.options, request.floor))
        return Trial(
            request.candidate, request.phase, request.round, steps, self.limit, memory=1 << 28, seconds=5.0
        )
