"""The service of rollouts: operators start and steer them, and each is evaluated once a second."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable

from serve_app.control.metric_store import MetricStore
from serve_app.control.operations import RolloutAction
from serve_app.control.registry import Registry, find_version
from serve_app.control.replica_health import HealthTracker
from serve_app.control.rollouts import gauges, registry_changes, state_machine
from serve_app.control.rollouts.guardrails import Figures
from serve_app.control.state import StateStore
from serve_app.domain.model import ModelRef, ModelStatus
from serve_app.domain.rollout import Rollout, RolloutDocument, RolloutPlan
from serve_app.errors import Conflict, RelayError, Unavailable
from serve_app.settings import RuntimeSettings
from serve_app.telemetry.metrics import Meters

log = logging.getLogger(__name__)

_PERIOD = 1.0  # seconds between looks
_LEVELS = {"rolled_back": logging.WARNING}
_ENDS = ("promoted", "rolled_back", "aborted")
# Seconds that a candidate's workers may wait for a place, beyond its startup_timeout.
_PLACEMENT_TIMEOUT = 30.0


class RolloutService:
    """The operations of ``ControlAPI`` on rollouts, in the process that owns the registry.

    The registry and the metric store hold a rollout's whole state, so that the next process continues it.
    """

    def __init__(
        self,
        state: StateStore,
        health: HealthTracker,
        metric_store: MetricStore,
        settings: RuntimeSettings,
        meters: Meters,
    ) -> None:
        self._state = state
        self._health = health
        self._metric_store = metric_store
        self._settings = settings
        self._meters = meters
        self._process_started_at = time.time()
        self._ids_with_metrics: set[str] = set()  # ids of which there may be figures

    async def start_rollout(self, model: str, plan: RolloutPlan) -> RolloutDocument:
        async with self._state.exclusive():
            now = time.time()
            after = registry_changes.start(self._state.registry, model, plan, secrets.token_hex(5), now)
            rollout = after.rollouts[model]
            self._health.reset_backoff(ModelRef(model, plan.to))
            late = await self._state.commit_with_status(after)
        log.info("%s", state_machine.format_decision(rollout, rollout))
        for state in _ENDS:
            self._meters.rollout_ended(model, state, 0)
        return await self._document(rollout, late)

    async def get_rollout(self, model: str) -> RolloutDocument:
        return await self._document(registry_changes.find(self._state.registry, model))

    async def update_rollout(self, model: str, action: RolloutAction) -> RolloutDocument:
        late = ""
        async with self._state.exclusive():
            before = registry_changes.find(self._state.registry, model)
            try:
                after = state_machine.apply_action(before, action, time.time(), self._figures(before))
            except ValueError as error:
                raise Conflict(f"The rollout of model {model} cannot {action}: {error}") from None
            if after is not before:
                late = await self._state.commit_with_status(
                    registry_changes.apply_decision(self._state.registry, after)
                )
        if after is not before:
            log.info("%s", state_machine.format_decision(before, after))
            self._count_end(before, after)
        return await self._document(after, late)

    async def run(self) -> None:
        """Evaluate all rollouts once a second until cancelled."""
        while True:
            await asyncio.sleep(_PERIOD)
            await self.evaluate()

    async def evaluate(self) -> None:
        """Evaluate each rollout, and delete the metrics of removed ones."""
        for rollout in list(self._state.registry.rollouts.values()):
            try:
                await self._evaluate(rollout)
            except RelayError as error:
                log.warning(
                    "The rollout of %s could not be advanced; trying again in a second: %s",
                    rollout.model,
                    error,
                )
            except Exception:
                log.exception(
                    "The rollout of %s could not be advanced; trying again in a second", rollout.model
                )
        await self._delete_old_metrics()

    async def export(self) -> None:
        """Set the gauges of the active rollouts, and of those that ended lately."""
        selected = gauges.select_exported(self._state.registry.rollouts.values(), time.time())
        figures = [(rollout, self._figures(rollout)) for rollout in selected]
        for gauge, values in (await asyncio.to_thread(gauges.read_gauges, figures)).items():
            self._meters.replace_gauge(gauge, values)

    async def _evaluate(self, rollout: Rollout) -> None:
        now = time.time()
        if rollout.active:
            after = await self._next_state(rollout, now)
            if after is not rollout:
                await self._apply(rollout, lambda registry: registry_changes.apply_decision(registry, after))
        elif rollout.previous_workers is not None and now >= rollout.ended_at + (
            rollout.plan.keep_warm_s or 0.0
        ):
            await self._apply(
                rollout, lambda registry: registry_changes.scale_down_previous(registry, rollout, now)
            )

    async def _apply(self, rollout: Rollout, decide: Callable[[Registry], Registry]) -> None:
        """Commit and log a decision that is based on ``rollout``, unless that was changed meanwhile."""
        async with self._state.exclusive():
            if self._state.registry.rollouts.get(rollout.model) is not rollout:
                return  # an operator changed it meanwhile
            registry = decide(self._state.registry)
            late = await self._state.commit_with_status(registry)
        after = registry.rollouts[rollout.model]
        log.log(_LEVELS.get(after.state, logging.INFO), "%s", state_machine.format_decision(rollout, after))
        self._count_end(rollout, after)
        if late:
            log.warning("%s: %s", rollout.model, late)

    def _count_end(self, before: Rollout, after: Rollout) -> None:
        if before.active and not after.active:
            self._meters.rollout_ended(after.model, after.state)

    async def _next_state(self, rollout: Rollout, now: float) -> Rollout:
        """Return an active rollout after its evaluation; the same one where nothing changes."""
        if rollout.state == "starting":
            return self._evaluate_start(rollout, now)
        failure = self._failure(rollout)
        return await asyncio.to_thread(state_machine.evaluate, rollout, self._figures(rollout), now, failure)

    def _evaluate_start(self, rollout: Rollout, now: float) -> Rollout:
        spec = find_version(self._state.registry, rollout.model, rollout.plan.to)
        if (error := self._health.get_failure(spec.ref)) is not None:
            return state_machine.evaluate(rollout, (), now, _last_line(error.detail or str(error)))
        if self._status(spec.ref).replicas >= spec.min_workers:
            return state_machine.enter_first_step(rollout, now)
        timeout = (
            spec.startup_timeout
            + (self._settings.install_timeout if spec.requirements else 0)
            + _PLACEMENT_TIMEOUT
        )
        # After a restart of this process the workers get the whole timeout again.
        if now - max(rollout.started_at, self._process_started_at) > timeout:
            return state_machine.evaluate(rollout, (), now, f"after {timeout:g} s they are still not ready")
        return rollout

    def _failure(self, rollout: Rollout) -> str:
        """Return why no worker of the candidate runs; empty while one does, or still may."""
        ref = ModelRef(rollout.model, rollout.plan.to)
        status = self._status(ref)
        if status.phase != "failed" or status.replicas:
            return ""
        error = self._health.get_failure(ref)
        return (
            _last_line(status.last_error if error is None else error.detail)
            or "all that were started have failed"
        )

    def _status(self, ref: ModelRef) -> ModelStatus:
        return self._health.statuses.get(ref, ModelStatus())

    def _figures(self, rollout: Rollout) -> Figures:
        return [self._metric_store.arm_stats(rollout.split_id(step)) for step in range(rollout.step + 1)]

    async def _document(self, rollout: Rollout, late: str = "") -> RolloutDocument:
        """Return a rollout as JSON; ``late`` is the status of a change."""
        document = await asyncio.to_thread(
            state_machine.to_document, rollout, self._figures(rollout), time.time()
        )
        if late:
            document["status"] = late
        return document

    async def _delete_old_metrics(self) -> None:
        """Delete the metrics of rollouts that were removed with their model or replaced."""
        ids = {rollout.id for rollout in self._state.registry.rollouts.values()}
        for id in self._ids_with_metrics - ids:
            with contextlib.suppress(Unavailable):
                await self._metric_store.delete(id)
        self._ids_with_metrics = ids


def _last_line(traceback: str) -> str:
    lines = traceback.strip().splitlines()
    return lines[-1] if lines else ""
