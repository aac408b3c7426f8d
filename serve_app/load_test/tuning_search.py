"""The search over configurations: coordinate search, then successive halving.

1. *Coordinate search with hill climbing.* From the current configuration, one axis after another is changed
   while the others stay; an ordered axis is followed in a direction as long as the goodput grows by 3 %.
   The axes are repeated until none improves. Triton's Model Analyzer has the same as its quick search
   (https://github.com/triton-inference-server/model_analyzer/blob/main/docs/config_search.md). A candidate
   starts at the rate of the best one, and is given up after two steps where it misses the limit there. The
   baseline is measured again every few trials, and goodputs are compared relative to it: the machine's
   speed may change.
2. *Successive halving* (Jamieson and Talwalkar, "Non-stochastic best arm identification and hyperparameter
   optimization", AISTATS 2016). The best four candidates are measured again with longer loads; the better
   half stays, until one is left. Each round begins with the baseline, so that a change of the machine's
   speed affects both. The winner replaces the baseline if the median of the rounds' ratios is above 1.03.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from serve_app.load_test.candidate import Candidate, SearchSpace
from serve_app.load_test.rate_search import RateOptions
from serve_app.load_test.trials import Trial

MIN_GAIN = 1.03  # a smaller difference is noise
SEARCH, HALVING = "search", "halving"
_FINALISTS = 4
_ROUNDS = 3  # of the last finalist
_BASELINE_PERIOD = 4  # trials after which the baseline is measured again
_SEARCH_SHARE = 0.6  # of the budget
_OPTIONS = {
    SEARCH: RateOptions(precision=1.12),
    HALVING: RateOptions(precision=1.05, growth=1.15, max_steps=7),
}


@dataclass(frozen=True)
class TrialRequest:
    """A trial to run: ``start`` is the first rate, None for an estimate; ``length`` multiplies the loads."""

    candidate: Candidate
    phase: str
    round: int
    options: RateOptions
    start: float | None = None
    floor: float | None = None
    length: int = 1


@dataclass
class SearchBudget:
    """The seconds or the trials of a search; what finished trials took is counted, also after a restart."""

    seconds: float | None = None
    trials: int | None = None
    spent_seconds: float = 0.0
    spent_trials: int = 0

    def count(self, trial: Trial) -> None:
        self.spent_seconds += trial.seconds
        self.spent_trials += 1

    @property
    def fraction(self) -> float:
        """Return the used part, 0 to 1."""
        parts = [self.spent_seconds / self.seconds] if self.seconds else []
        parts += [self.spent_trials / self.trials] if self.trials else []
        return min(1.0, max(parts, default=0.0))


@dataclass(frozen=True)
class SearchOutcome:
    """The chosen candidate with all trials; ``ratios`` are its goodputs over the baseline's by round."""

    baseline: Candidate
    chosen: Candidate
    trials: Sequence[Trial]
    ratios: Sequence[float] = field(default_factory=tuple)

    def of(self, candidate: Candidate) -> list[Trial]:
        """Return a candidate's trials with the longest loads that it had."""
        own = [t for t in self.trials if t.candidate == candidate and t.phase in (SEARCH, HALVING)]
        return [trial for trial in own if trial.phase == HALVING] or own

    def goodput(self, candidate: Candidate) -> float:
        """Return the median goodput of a candidate."""
        return statistics.median([trial.goodput for trial in self.of(candidate)] or [0.0])

    @property
    def meets_limit(self) -> bool:
        return self.goodput(self.chosen) > 0


class TuningSearch:
    """A search from ``baseline``; ``run_trial`` measures a candidate, or returns the stored trial."""

    def __init__(
        self,
        space: SearchSpace,
        baseline: Candidate,
        run_trial: Callable[[TrialRequest], Trial],
        budget: SearchBudget,
    ) -> None:
        self._space = space
        self._baseline = baseline
        self._run_trial = run_trial
        self._budget = budget
        self._trials: list[Trial] = []
        self._seen: dict[Candidate, Trial] = {}
        self._baselines: list[Trial] = []  # of the search
        self._references: dict[Candidate, Trial] = {}  # the baseline's trial before a candidate's
        self._since_baseline = 0

    def run(self) -> SearchOutcome:
        """Return the outcome; the baseline is measured at least once."""
        best = self._measure_baseline()
        improved = True
        while improved and self._has_budget(_SEARCH_SHARE):
            before = best
            for axis in self._space.axes:
                best = self._climb(axis, best)
            improved = best is not before
        return self._halve()

    # Coordinate search

    def _climb(self, axis: str, best: Trial) -> Trial:
        ladder = self._space.ladder(axis, best.candidate)
        if axis == "variant":
            for candidate in ladder:
                best = self._better(candidate, best) or best
            return best
        here = ladder.index(best.candidate)
        for direction in (ladder[here + 1 :], ladder[:here][::-1]):
            before = best
            for candidate in direction:
                if (better := self._better(candidate, best)) is None:
                    break
                best = better
            if best is not before:
                break
        return best

    def _better(self, candidate: Candidate, best: Trial) -> Trial | None:
        """Measure a candidate; return its trial where it is better than the best one."""
        if candidate == best.candidate or not self._has_budget(_SEARCH_SHARE):
            return None
        if candidate not in self._seen:
            if self._since_baseline >= _BASELINE_PERIOD:
                self._measure_baseline()
            floor = best.best.rate * self._drift(best) if best.best is not None and best.best.rate else None
            start = floor * MIN_GAIN if floor else None
            self._seen[candidate] = self._measure(
                TrialRequest(candidate, SEARCH, 0, _OPTIONS[SEARCH], start, floor)
            )
            self._references[candidate] = self._baselines[-1]
            self._since_baseline += 1
        trial = self._seen[candidate]
        return trial if self._is_better(trial, best) else None

    def _drift(self, trial: Trial) -> float:
        """Return how much faster the machine is now than at a trial, by the baseline's goodputs."""
        before, now = self._references[trial.candidate].goodput, self._baselines[-1].goodput
        return now / before if before and now else 1.0

    def _score(self, trial: Trial) -> tuple[float, float]:
        """Return the order of candidates: by goodput, and without one by the lowest p99."""
        return trial.goodput * self._drift(trial), -trial.lowest_p99

    def _is_better(self, trial: Trial, other: Trial) -> bool:
        """Return whether a trial has more goodput beyond the noise, or without any a lower latency."""
        (mine, latency), (others, other_latency) = self._score(trial), self._score(other)
        if mine or others:
            return mine > others * MIN_GAIN
        return -latency * MIN_GAIN < -other_latency

    def _measure_baseline(self) -> Trial:
        first = self._seen.get(self._baseline)
        start = first.best.rate if first is not None and first.best is not None else None
        number = len(self._baselines)
        trial = self._measure(TrialRequest(self._baseline, SEARCH, number, _OPTIONS[SEARCH], start))
        self._baselines.append(trial)
        self._since_baseline = 0
        self._references.setdefault(self._baseline, trial)
        return self._seen.setdefault(self._baseline, trial)

    # Successive halving

    def _halve(self) -> SearchOutcome:
        ranked = sorted(self._seen.values(), key=self._score, reverse=True)
        baseline = self._seen[self._baseline]
        finalists = [trial for trial in ranked if self._is_better(trial, baseline)][:_FINALISTS]
        if not finalists:
            return SearchOutcome(self._baseline, self._baseline, self._trials)
        ratios: dict[Candidate, list[float]] = {}
        rounds: dict[Candidate, list[Trial]] = {}
        number = 0
        # The first round confirms the best candidate, whatever the budget.
        while number == 0 or (number < _ROUNDS and self._has_budget(1.0)):
            reference = self._measure_long(baseline, number)
            for trial in finalists:
                if trial is not finalists[0] and not self._has_budget(1.0):
                    break
                again = self._measure_long(trial, number)
                rounds.setdefault(trial.candidate, []).append(again)
                if reference.goodput:
                    ratios.setdefault(trial.candidate, []).append(again.goodput / reference.goodput)
            finalists = _rank(finalists, rounds)[: max(1, len(finalists) // 2)]
            number += 1
        chosen = finalists[0].candidate
        own = ratios.get(chosen, [])
        if own and statistics.median(own) < MIN_GAIN:
            chosen = self._baseline
        return SearchOutcome(self._baseline, chosen, self._trials, own)

    def _measure_long(self, trial: Trial, number: int) -> Trial:
        start = trial.best.rate if trial.best is not None else None
        request = TrialRequest(trial.candidate, HALVING, number, _OPTIONS[HALVING], start, length=2)
        return self._measure(request)

    def _measure(self, request: TrialRequest) -> Trial:
        trial = self._run_trial(request)
        self._trials.append(trial)
        self._budget.count(trial)
        return trial

    def _has_budget(self, share: float) -> bool:
        return self._budget.fraction < share


def _rank(finalists: list[Trial], rounds: dict[Candidate, list[Trial]]) -> list[Trial]:
    """Return the finalists by the median goodput of their rounds; those without a round are last."""

    def median(trial: Trial) -> tuple[bool, float, float]:
        own = rounds.get(trial.candidate)
        return (True, statistics.median(t.goodput for t in own), 0.0) if own else (False, trial.goodput, 0.0)

    return sorted(finalists, key=median, reverse=True)
