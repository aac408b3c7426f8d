"""A tuning run: trials on a server, stored as they finish, with progress."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from serve_app.client import Client, ServerError
from serve_app.load_test.candidate import Candidate, SearchSpace
from serve_app.load_test.candidate_deployments import CandidateDeployments, TuningError
from serve_app.load_test.rate_search import LoadStep, find_rate
from serve_app.load_test.trial_load import TrialLoad
from serve_app.load_test.trials import Trial, TrialStore
from serve_app.load_test.tuning_search import SearchBudget, SearchOutcome, TrialRequest, TuningSearch

CONCURRENCY = "concurrency"  # the phase of closed loops after the search
CONCURRENCIES = (1, 2, 4, 8, 16, 32)
_START_SHARE = 0.6  # of the throughput of a closed loop: the first rate of the baseline
_TRAFFIC_WINDOW = 2.0  # seconds in which a model has live traffic or not


class TrafficMonitor:
    """The requests that clients send to a model, by the server's statistics of it."""

    def __init__(self, client: Client, model: str) -> None:
        self._client = client
        self._model = model
        self._count = self._read()

    def new_requests(self) -> int:
        """Return the requests since the last call."""
        before, self._count = self._count, self._read()
        return max(0, self._count - before)

    def check(self, wait: float = 0.0) -> None:
        """Raise TuningError where the model has live traffic."""
        time.sleep(wait)
        if count := self.new_requests():
            raise TuningError(
                f"{self._model} has live traffic: {count} requests since the last check. Candidates take "
                "cores of the same machine and would slow it down. Tune on another server, or pass "
                "--allow-traffic."
            )

    def _read(self) -> int:
        stats = [version["inference_stats"] for version in self._client.statistics(self._model)]
        return sum(version["success"]["count"] + version["fail"]["count"] for version in stats)


@dataclass
class Tuner:
    """The trials of a run.

    ``report`` is called with the current measurement, and the used part of the budget.
    """

    store: TrialStore
    deployments: CandidateDeployments
    load: TrialLoad[Any]
    limit: float
    report: Callable[[str, float], None]
    traffic: TrafficMonitor | None = None  # of the production model; None where it does not matter

    def run(self, space: SearchSpace, baseline: Candidate, budget: SearchBudget) -> SearchOutcome:
        """Search, then measure the chosen candidate and the baseline by concurrency.

        Raises TuningError where the baseline cannot be measured.
        """
        self._budget = budget
        outcome = TuningSearch(space, baseline, self._run_trial, budget).run()
        trials = [*outcome.trials]
        for candidate in dict.fromkeys([baseline, outcome.chosen]):
            trials.append(self._measure_concurrency(candidate))
        return replace(outcome, trials=trials)

    def _run_trial(self, request: TrialRequest) -> Trial:
        candidate = request.candidate
        stored = self.store.find(candidate, request.phase, request.round)
        if stored is not None:
            return stored

        def measure(model: str) -> list[LoadStep]:
            start = request.start or self._capacity(model) * _START_SHARE

            def send(rate: float) -> LoadStep:
                self._report(f"{candidate.label}: {rate:,.0f} requests/s")
                return self.load.send_open(model, rate, request.length)

            return find_rate(send, self.limit, start, request.options, request.floor)

        return self._measure(candidate, request.phase, request.round, measure)

    def _measure_concurrency(self, candidate: Candidate) -> Trial:
        def measure(model: str) -> list[LoadStep]:
            steps = []
            for count in CONCURRENCIES:
                self._report(f"{candidate.label}: {count} clients")
                steps.append(self.load.send_closed(model, count))
            return steps

        stored = self.store.find(candidate, CONCURRENCY, 0)
        return stored or self._measure(candidate, CONCURRENCY, 0, measure)

    def _measure(
        self, candidate: Candidate, phase: str, number: int, measure: Callable[[str], list[LoadStep]]
    ) -> Trial:
        if self.traffic is not None:
            self.traffic.check()
        self._report(f"{candidate.label}: starting")
        began = time.monotonic()
        trial = Trial(candidate, phase, number, limit=self.limit)
        try:
            with self.deployments.deploy(candidate) as model:
                steps = tuple(measure(model))
                trial = replace(trial, steps=steps, memory=self.deployments.memory(model))
        except ServerError as error:
            trial = replace(trial, error=str(error).splitlines()[0])
        trial = replace(trial, seconds=round(time.monotonic() - began, 3))
        if trial.error and not any(t.steps for t in self.store.trials):
            raise TuningError(f"The current configuration cannot be measured: {trial.error}")
        self.store.add(trial)
        return trial

    def _capacity(self, model: str) -> float:
        """Return the requests/s of a closed loop, which the first trial measures."""
        if self.store.capacity is None:
            self._report("estimating the throughput")
            steps = [self.load.send_closed(model, count) for count in (1, 16)]
            best = max(steps, key=lambda step: step.throughput)
            if not best.requests:
                errors = ", ".join(f"{n} × {kind}" for kind, n in steps[0].errors.items()) or "no response"
                raise TuningError(
                    f"The model answers no sample with success ({errors}). Pass a request that it accepts "
                    "with --data."
                )
            self.store.capacity = max(best.throughput, 1 / best.mean)
        return self.store.capacity

    def _report(self, text: str) -> None:
        self.report(text, self._budget.fraction)


def check_traffic(client: Client, model: str) -> TrafficMonitor:
    """Return a monitor of a model without live traffic. Raises TuningError where it has some."""
    monitor = TrafficMonitor(client, model)
    monitor.check(_TRAFFIC_WINDOW)
    return monitor
