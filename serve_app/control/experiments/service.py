"""The service of experiments: start, stop, results and rewards."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from serve_app.control.experiments import gauges, registry_changes
from serve_app.control.experiments.analysis import ALARM, ArmTotals, assess
from serve_app.control.metric_store import MetricStore
from serve_app.control.registry import find_experiment, find_version
from serve_app.control.result_history import ResultHistory
from serve_app.control.state import StateStore
from serve_app.dataplane.experiment_collector import OUTPUT, REWARD, UNITS, ArmStats
from serve_app.domain import validation
from serve_app.domain.access import matches
from serve_app.domain.experiment import (
    Experiment,
    ExperimentDocument,
    ExperimentHistory,
    ExperimentMetric,
    ExperimentSummary,
    Reward,
    RewardCounts,
)
from serve_app.domain.sequential_statistics import Groups
from serve_app.errors import BadRequest, ExposureNotFound, ModelNotAllowed, Unavailable
from serve_app.telemetry.metrics import Meters

_PERIOD = 10.0  # seconds


class ExperimentService:
    """The operations of ``ControlAPI`` on experiments, in the process that owns the registry."""

    def __init__(
        self, state: StateStore, metric_store: MetricStore, history: ResultHistory, meters: Meters
    ) -> None:
        self._state = state
        self._metric_store = metric_store
        self._history = history
        self._meters = meters
        # The lowest p-values that were returned for sample ratios; the history has them after a restart.
        self._p_values: dict[str, float] = {}

    async def run(self) -> None:
        """Record the results of running experiments, and delete what removed ones left, until cancelled.

        An experiment is removed with its model.
        """
        with contextlib.suppress(Unavailable):
            await self._history.delete_others(set(self._state.registry.experiments))
        while True:
            await self.delete_orphans()
            for experiment in list(self._state.registry.experiments.values()):
                if experiment.running and self._history.is_due(experiment.id, experiment.started_at):
                    await self._results(experiment)
            await asyncio.sleep(_PERIOD)

    async def delete_orphans(self) -> None:
        for id in self._p_values.keys() - self._state.registry.experiments.keys():
            del self._p_values[id]
        for trial in self._metric_store.splits:
            # The id of a rollout's split has a colon in it.
            if ":" not in trial and trial not in self._state.registry.experiments:
                with contextlib.suppress(Unavailable):  # the next time, then
                    await self._metric_store.delete(trial)
                    await self._history.delete(trial)

    async def export(self) -> None:
        """Set the gauges of the running experiments, and of those that ended lately."""
        selected = gauges.select_exported(self._state.registry.experiments.values(), time.time())
        documents = [await self._results(experiment) for experiment in selected]
        for gauge, values in gauges.read_gauges(documents).items():
            self._meters.replace_gauge(gauge, values)

    async def start_experiment(self, experiment: Experiment) -> ExperimentDocument:
        begun = replace(experiment, id=secrets.token_hex(5), started_at=time.time())
        async with self._state.exclusive():
            after = registry_changes.start(self._state.registry, begun)
            late = await self._state.commit_with_status(after)
        return await self._results(begun, late)

    async def stop_experiment(self, id: str, allowed_models: tuple[str, ...]) -> ExperimentDocument:
        self._find(id, allowed_models)
        async with self._state.exclusive():
            after = registry_changes.stop(self._state.registry, id, time.time())
            late = await self._state.commit_with_status(after) if after is not self._state.registry else ""
        return await self._results(self._find(id, allowed_models), late)

    async def delete_experiment(self, id: str, allowed_models: tuple[str, ...]) -> None:
        self._find(id, allowed_models)
        async with self._state.exclusive():
            await self._state.commit_with_status(registry_changes.delete(self._state.registry, id))
        await self.delete_orphans()

    async def list_experiments(self, model: str | None) -> list[ExperimentSummary]:
        registry = self._state.registry
        if model is not None:
            find_version(registry, model, None)
        found = [e for e in registry.experiments.values() if model in (None, e.model)]
        return [_to_document(e) for e in sorted(found, key=lambda e: e.started_at, reverse=True)]

    async def get_experiment(self, id: str, allowed_models: tuple[str, ...]) -> ExperimentDocument:
        return await self._results(self._find(id, allowed_models))

    async def get_experiment_history(self, id: str, allowed_models: tuple[str, ...]) -> ExperimentHistory:
        self._find(id, allowed_models)
        return {"id": id, "points": await self._history.get_points(id)}  # type: ignore[typeddict-item]

    async def record_rewards(
        self, id: str, rewards: list[Reward], allowed_models: tuple[str, ...]
    ) -> RewardCounts:
        experiment = self._find(id, allowed_models)
        answers = await self._metric_store.record_rewards(
            id, [_with_metric(experiment, reward) for reward in rewards]
        )
        for reward, answer in zip(rewards, answers):
            if answer is None:
                raise ExposureNotFound(reward.unit, id)
        return {"counted": answers.count(True), "repeated": answers.count(False)}

    def _find(self, id: str, allowed_models: tuple[str, ...]) -> Experiment:
        """Return an experiment. Raises ExperimentNotFound and ModelNotAllowed."""
        experiment = find_experiment(self._state.registry, id)
        if not matches(experiment.model, allowed_models):
            raise ModelNotAllowed(experiment.model)
        return experiment

    async def _find_lowest_p_value(self, id: str) -> float | None:
        """Return the lowest p-value of an experiment's sample ratio so far.

        Return None where the history cannot be read now.
        """
        if id not in self._p_values:
            try:
                points = await self._history.get_points(id)
            except Unavailable:
                return None
            self._p_values.setdefault(id, min((point["p_value"] for point in points), default=1.0))
        return self._p_values[id]

    async def _results(self, experiment: Experiment, late: str = "") -> ExperimentDocument:
        """Return an experiment with its results, which are recorded in its history.

        ``late`` is the status of a change.
        """
        figures = self._metric_store.arm_stats(experiment.id)
        tallies = [
            ArmTotals(
                name,
                arm.version,
                arm.weight,
                seen.units,
                seen.calls,
                _metric_groups(experiment.metrics, seen),
            )
            for name, arm in experiment.arms.items()
            for seen in [figures.get(name, ArmStats())]
        ]
        least = await self._find_lowest_p_value(experiment.id)
        found = await asyncio.to_thread(
            assess, tallies, experiment.metrics, experiment.baseline, p_value=1.0 if least is None else least
        )
        ratio = found["sample_ratio"]
        begins_alarm = ratio["alarm"] and least is not None and least > ALARM
        if least is not None:  # else a later call reads the history
            self._p_values[experiment.id] = min(ratio["p_value"], self._p_values.get(experiment.id, least))
        for name, seen in figures.items():
            found["arms"][name]["failed"] = seen.failed
        for metric in experiment.metrics:
            if metric.kind == "output":
                for name, seen in figures.items():
                    found["metrics"][metric.name]["arms"][name]["missing"] = seen.missing.get(
                        OUTPUT + metric.name, 0
                    )
        is_due = self._history.is_due(experiment.id, experiment.started_at)
        if not experiment.running or is_due or begins_alarm:
            await self._history.append(experiment.id, _to_point(found))
        document: ExperimentDocument = {**_to_document(experiment), **found}  # type: ignore[typeddict-item]
        if late:
            document["status"] = late
        return document


def _to_document(experiment: Experiment) -> ExperimentSummary:
    """Return an experiment without its results as JSON."""
    key = validation.write(experiment.key) if experiment.key is not None else None
    return {
        "id": experiment.id,
        "name": experiment.name,
        "model": experiment.model,
        "state": experiment.state,
        "started_at": experiment.started_at,
        "ended": experiment.ended_at or None,
        "key": key and {source: where for source, where in key.items() if where},
        "arms": validation.write(experiment)["arms"],
        "baseline": experiment.baseline,
    }


def _to_point(results: Mapping[str, Any]) -> dict[str, Any]:
    """Return the results that the history keeps."""
    return {
        "units": {name: arm["units"] for name, arm in results["arms"].items()},
        "p_value": results["sample_ratio"]["p_value"],
        "metrics": {
            name: {
                arm: {key: found[key] for key in ("difference", "low", "high")}
                for arm, found in metric["differences"].items()
            }
            for name, metric in results["metrics"].items()
        },
    }


def _metric_groups(metrics: tuple[ExperimentMetric, ...], seen: ArmStats) -> Mapping[str, Groups]:
    """Return each metric's values in one arm, by groups of buckets."""
    found: dict[str, Groups] = {}
    for metric in metrics:
        # The sums of latency and error_rate have the names of these kinds.
        names = {"output": OUTPUT + metric.name, "reward": REWARD + metric.name}
        values = seen.sums.get(names.get(metric.kind, metric.kind), {})
        if metric.kind == "reward" and metric.per == "exposure":  # a unit without a reward counts as zero
            exposed = seen.sums.get(UNITS, {})
            values = {group: (count, values.get(group, (0, 0.0))[1]) for group, (count, _) in exposed.items()}
        found[metric.name] = values
    return found


def _with_metric(experiment: Experiment, reward: Reward) -> Reward:
    """Return a reward with its metric. Raises BadRequest for a metric that the experiment lacks."""
    rewards = [metric.name for metric in experiment.metrics if metric.kind == "reward"]
    metric = reward.metric or (rewards[0] if len(rewards) == 1 else "")
    if metric not in rewards:
        known = f"its rewards are {', '.join(map(repr, rewards))}" if rewards else "it measures no reward"
        problem = (
            f"has no reward {metric!r}"
            if metric
            else "cannot tell which reward an event is for; name its metric"
        )
        raise BadRequest(f"Events: experiment {experiment.id} {problem}: {known}.")
    if reward.key and experiment.key is None:
        raise BadRequest(
            f"Events: experiment {experiment.id} assigns each request by itself, so no "
            f"exposure has the key {reward.key!r}; send the request_id of a request."
        )
    return replace(reward, metric=metric)
