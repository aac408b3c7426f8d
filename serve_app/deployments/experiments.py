"""What is asked of experiments: begun, stopped, what is known by now, and what became of calls later."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from serve_app import documents
from serve_app.control import registry as change
from serve_app.control.assessment import Tally, assess
from serve_app.control.measurements import Measurements
from serve_app.control.registry import Registry
from serve_app.control.statistics import Groups
from serve_app.deployments.ledger import Ledger
from serve_app.errors import BadRequest, NotYet, Unavailable, UnknownUnit, WrongModel
from serve_app.experiment import Experiment, Metric, Reward
from serve_app.telemetry.observations import ERROR_RATE, LATENCY, OUTPUT, REWARD, UNITS, ArmFigures
from serve_app.types import matches

Said = dict[str, Any]

_PERIOD = 60.0  # seconds


class Experiments:
    """``controlplane.Keeper`` of experiments, in the process that keeps the registry."""

    def __init__(self, ledger: Ledger, measured: Measurements) -> None:
        self._ledger = ledger
        self._measured = measured
        self._p_values: dict[str, float] = {}  # the least that was answered for an experiment's sample ratio

    async def run(self) -> None:
        """Now and then, drop what was measured of experiments that are gone: they went with their model."""
        while True:
            await self.tidy()
            await asyncio.sleep(_PERIOD)

    async def tidy(self) -> None:
        for id in self._p_values.keys() - self._ledger.registry.experiments.keys():
            del self._p_values[id]
        for trial in self._measured.trials:
            if ":" not in trial and trial not in self._ledger.registry.experiments:  # a rollout's have one in it
                with contextlib.suppress(Unavailable):  # the next time, then
                    await self._measured.forget(trial)

    async def begin_experiment(self, experiment: Experiment) -> Said:
        begun = replace(experiment, id=secrets.token_hex(5), began=time.time())
        async with self._ledger.writing:
            late = await self._commit(change.begin_experiment(self._ledger.registry, begun))
        return await self._known(begun) | late

    async def stop_experiment(self, id: str, within: tuple[str, ...]) -> Said:
        self._find(id, within)
        async with self._ledger.writing:
            late = await self._commit(change.stop_experiment(self._ledger.registry, id, time.time()))
        return await self._known(self._find(id, within)) | late

    async def forget_experiment(self, id: str, within: tuple[str, ...]) -> None:
        self._find(id, within)
        async with self._ledger.writing:
            await self._commit(change.forget_experiment(self._ledger.registry, id))
        await self.tidy()

    async def _commit(self, after: Registry) -> Said:
        """Put a change in force; what is to be said where that is not so everywhere yet."""
        if after is not self._ledger.registry:
            try:
                await self._ledger.commit(after)
            except NotYet as late:
                return {"status": str(late)}
        return {}

    async def experiments(self, model: str | None) -> list[Said]:
        registry = self._ledger.registry
        if model is not None:
            change.find(registry, model, None)
        found = [e for e in registry.experiments.values() if model in (None, e.model)]
        return [_words(e) for e in sorted(found, key=lambda e: e.began, reverse=True)]

    async def experiment(self, id: str, within: tuple[str, ...]) -> Said:
        return await self._known(self._find(id, within))

    async def reward(self, id: str, rewards: list[Reward], within: tuple[str, ...]) -> Said:
        experiment = self._find(id, within)
        answers = await self._measured.rewards(id, [_named(experiment, reward) for reward in rewards])
        for reward, answer in zip(rewards, answers):
            if answer is None:
                raise UnknownUnit(reward.unit, id)
        return {"counted": answers.count(True), "repeated": answers.count(False)}

    def _find(self, id: str, within: tuple[str, ...]) -> Experiment:
        """Raises ExperimentNotFound and WrongModel."""
        experiment = change.find_experiment(self._ledger.registry, id)
        if not matches(experiment.model, within):
            raise WrongModel(experiment.model)
        return experiment

    async def _known(self, experiment: Experiment) -> Said:
        figures = self._measured.figures(experiment.id)
        tallies = [
            Tally(name, arm.version, arm.weight, seen.units, seen.calls, _groups(experiment.metrics, seen))
            for name, arm in experiment.arms.items()
            for seen in [figures.get(name, ArmFigures())]
        ]
        least = self._p_values.get(experiment.id, 1.0)
        found = await asyncio.to_thread(
            assess, tallies, experiment.metrics, experiment.baseline, p_value=least
        )
        self._p_values[experiment.id] = min(least, found["sample_ratio"]["p_value"])
        for name, seen in figures.items():
            found["arms"][name]["failed"] = seen.failed
        for metric in experiment.metrics:
            if metric.kind == "output":
                for name, seen in figures.items():
                    found["metrics"][metric.name]["arms"][name]["missing"] = seen.missing.get(OUTPUT + metric.name, 0)
        return _words(experiment) | found


def _words(experiment: Experiment) -> Said:
    """What was asked for, and how far it is, without figures."""
    key = experiment.key
    return {
        "id": experiment.id,
        "name": experiment.name,
        "model": experiment.model,
        "state": experiment.state,
        "began": experiment.began,
        "ended": experiment.ended or None,
        "key": key and {source: where for source, where in documents.write(key).items() if where},
        "arms": documents.write(experiment)["arms"],
        "baseline": experiment.baseline,
    }


def _groups(metrics: tuple[Metric, ...], seen: ArmFigures) -> Mapping[str, Groups]:
    """Each metric's values in one arm, by groups of buckets."""
    found: dict[str, Groups] = {}
    for metric in metrics:
        if metric.kind == "latency":
            found[metric.name] = seen.sums.get(LATENCY, {})
        elif metric.kind == "error_rate":
            found[metric.name] = seen.sums.get(ERROR_RATE, {})
        elif metric.kind == "output":
            found[metric.name] = seen.sums.get(OUTPUT + metric.name, {})
        else:
            values = seen.sums.get(REWARD + metric.name, {})
            if metric.per == "exposure":  # whoever nothing was posted of counts as zero
                exposed = seen.sums.get(UNITS, {})
                values = {group: (count, values.get(group, (0, 0.0))[1]) for group, (count, _) in exposed.items()}
            found[metric.name] = values
    return found


def _named(experiment: Experiment, reward: Reward) -> Reward:
    """A reward with its metric. Raises BadRequest where the experiment measures none such."""
    rewards = [metric.name for metric in experiment.metrics if metric.kind == "reward"]
    metric = reward.metric or (rewards[0] if len(rewards) == 1 else "")
    if metric not in rewards:
        known = f"its rewards are {', '.join(map(repr, rewards))}" if rewards else "it measures no reward"
        said = f"has no reward {metric!r}" if metric else "cannot tell which reward an event is for; name its metric"
        raise BadRequest(f"Events: experiment {experiment.id} {said}: {known}.")
    if reward.key and experiment.key is None:
        raise BadRequest(
            f"Events: experiment {experiment.id} deals out each call by itself, so that nobody is known by the key "
            f"{reward.key!r}; name the request_id of a call."
        )
    return replace(reward, metric=metric)
