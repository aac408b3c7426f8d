"""The search over configurations, on servers that follow a formula."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from serve_app.load_test.candidate import Candidate, SearchSpace
from serve_app.load_test.rate_search import RateOptions
from serve_app.load_test.trials import Trial, TrialStore
from serve_app.load_test.tuning_search import HALVING, SearchBudget, TrialRequest, TuningSearch
from tests.support.simulated_server import SimulatedServer

SPACE = SearchSpace(4, ("plain", "int8", "onnx"), max_workers=4, max_batch_size=32, limit=0.02)
BASELINE = Candidate(batch_size=8)


def capacity(c: Candidate) -> float:
    """Return requests/s with one best configuration: onnx, 4 workers, one thread, batch 16."""
    found = 300.0 * {"plain": 1.0, "int8": 0.8, "onnx": 1.5}[c.variant]
    found *= c.workers * c.thread_count**0.2
    found *= {1: 0.4, 2: 0.5, 4: 0.7, 8: 1.0, 16: 1.2, 32: 1.1}[c.batch_size]
    return found * (0.9 if c.max_batch_delay else 1.0)


def test_the_best_configuration_is_found_and_confirmed() -> None:
    server = SimulatedServer(capacity)
    outcome = TuningSearch(SPACE, BASELINE, server.run_trial, SearchBudget()).run()
    assert outcome.chosen == Candidate("onnx", 4, None, 16)
    assert outcome.goodput(outcome.chosen) == pytest.approx(300 * 1.5 * 4 * 1.2 * 0.95, rel=0.1)
    assert len(outcome.ratios) == 3 and all(6 < ratio < 8 for ratio in outcome.ratios)
    rounds = [r.candidate for r in server.requests if r.phase == HALVING]
    assert [i for i, candidate in enumerate(rounds) if candidate == BASELINE] == [
        0,
        5,
        8,
    ]  # 4, 2 and 1 finalists
    assert len(server.requests) < 40


def test_without_a_better_one_the_baseline_stays() -> None:
    server = SimulatedServer(lambda candidate: 400.0)
    outcome = TuningSearch(SPACE, BASELINE, server.run_trial, SearchBudget()).run()
    assert outcome.chosen == BASELINE and outcome.meets_limit and outcome.ratios == ()


def test_a_machine_that_slows_down_costs_little() -> None:
    class SlowingServer(SimulatedServer):
        def run_trial(self, request: TrialRequest) -> Trial:
            speed = 1.0 if len(self.requests) < 4 else 0.5
            slowed = SimulatedServer(lambda c: capacity(c) * speed, requests=self.requests)
            return slowed.run_trial(request)

    server = SlowingServer(capacity)
    outcome = TuningSearch(SPACE, BASELINE, server.run_trial, SearchBudget()).run()
    assert capacity(outcome.chosen) > 0.8 * capacity(Candidate("onnx", 4, None, 16))


def test_the_fastest_is_reported_where_none_meets_the_limit() -> None:
    server = SimulatedServer(capacity, limit=0.0005)
    outcome = TuningSearch(SPACE, BASELINE, server.run_trial, SearchBudget()).run()
    assert not outcome.meets_limit


@pytest.mark.parametrize("budget", [SearchBudget(trials=5), SearchBudget(seconds=25.0)])
def test_a_budget_ends_the_search_and_leaves_a_confirmed_choice(budget: SearchBudget) -> None:
    server = SimulatedServer(capacity)
    outcome = TuningSearch(SPACE, BASELINE, server.run_trial, budget).run()
    assert len(server.requests) <= 6
    assert outcome.chosen != BASELINE and len(outcome.ratios) == 1


def test_an_interrupted_search_goes_on_where_it_was(tmp_path: Path) -> None:
    whole = SimulatedServer(capacity)
    expected = TuningSearch(SPACE, BASELINE, whole.run_trial, SearchBudget(trials=20)).run()
    key = {"model": "digest"}
    for limit in (7, 100):  # the first run ends in its eighth trial
        store, reason = TrialStore.open(tmp_path / "state.json", key)
        assert reason == ""
        server = SimulatedServer(capacity)

        def run_trial(
            request: TrialRequest, store: TrialStore = store, server: SimulatedServer = server
        ) -> Trial:
            if stored := store.find(request.candidate, request.phase, request.round):
                return stored
            if len(server.requests) == limit:  # noqa: B023
                raise KeyboardInterrupt
            trial = server.run_trial(request)
            store.add(trial)
            return trial

        search = TuningSearch(SPACE, BASELINE, run_trial, SearchBudget(trials=20))
        if limit == 7:
            with pytest.raises(KeyboardInterrupt):
                search.run()
            continue
        outcome = search.run()
        assert len(server.requests) == len(whole.requests) - 7
        assert (outcome.chosen, outcome.ratios) == (expected.chosen, expected.ratios)
        assert list(outcome.trials) == list(expected.trials)


def test_another_model_or_option_starts_anew(tmp_path: Path) -> None:
    file = tmp_path / "state.json"
    store, _ = TrialStore.open(file, {"model": "a", "p99": 0.1})
    store.add(SimulatedServer(capacity).run_trial(TrialRequest(BASELINE, "search", 0, RateOptions())))
    same, reason = TrialStore.open(file, {"model": "a", "p99": 0.1})
    assert reason == "" and same.trials == store.trials and same.run == store.run
    other, reason = TrialStore.open(file, {"model": "b", "p99": 0.1})
    assert reason == "changed since then: model" and other.trials == [] and other.run != store.run
    file.write_text("{")
    broken, reason = TrialStore.open(file, {"model": "a"})
    assert "cannot be read" in reason and broken.trials == []


def test_ladders_stay_within_the_cores() -> None:
    two = Candidate(workers=2)
    assert [c.threads for c in SPACE.ladder("threads", two)] == [None, 2]
    wide = Candidate(workers=1, threads=4)
    assert [(c.workers, c.threads) for c in SPACE.ladder("workers", wide)] == [(1, 4), (2, 2), (3, 1), (4, 1)]
    assert SPACE.ladder("max_batch_delay", two) == [two]  # without batches there is no delay
    delays = [c.max_batch_delay for c in SPACE.ladder("max_batch_delay", replace(two, batch_size=4))]
    assert delays == [None, 1, 2, 5, 10]  # at most half of the limit
    odd = Candidate(batch_size=12)
    assert [c.batch_size for c in SPACE.ladder("batch_size", odd)] == [1, 2, 4, 8, 12, 16, 32]


def test_a_candidate_replaces_only_its_keys() -> None:
    config = {"batchSize": 2, "autoscaling": {}, "responseTimeout": 3, "optimize": {"compile": True}}
    assert Candidate("int8", 2, 1, 8, 5).configure(config) == {
        "minWorkers": 2, "maxWorkers": 2, "batchSize": 8, "maxBatchDelay": 5, "threads": 1,
        "responseTimeout": 3, "optimize": {"compile": True},
    }  # fmt: skip
