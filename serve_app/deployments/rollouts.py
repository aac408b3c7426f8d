"""Rollouts: begun and steered by an operator, and looked at once a second until they end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable
from typing import Any

from serve_app.control import progression, takeover
from serve_app.control import registry as change
from serve_app.control.guardrails import Figures
from serve_app.control.measurements import Measurements
from serve_app.control.registry import Registry
from serve_app.control.vitals import Vitals
from serve_app.deployments.ledger import Ledger
from serve_app.errors import InUse, NotYet, RelayError, Unavailable
from serve_app.rollout import Plan, Rollout
from serve_app.settings import RuntimeSettings
from serve_app.types import ModelRef, ModelStatus

log = logging.getLogger("torchrelay.rollouts")

Said = dict[str, Any]

_PERIOD = 1.0  # seconds between looks
_LEVELS = {"rolled_back": logging.WARNING}
_PLACEMENT = 30.0  # seconds that a candidate's workers may wait for a place, beyond its startup_timeout


class Rollouts:
    """``controlplane.Keeper`` of rollouts, in the process that keeps the registry.

    Everything about a rollout stands in the registry and in the measurements: whoever runs next goes on with it.
    """

    def __init__(self, ledger: Ledger, vitals: Vitals, measured: Measurements, settings: RuntimeSettings) -> None:
        self._ledger = ledger
        self._vitals = vitals
        self._measured = measured
        self._settings = settings
        self._born = time.time()
        self._known: set[str] = set()  # ids of which there may be figures

    async def begin_rollout(self, model: str, plan: Plan) -> Said:
        async with self._ledger.writing:
            now = time.time()
            after = takeover.begin(self._ledger.registry, model, plan, secrets.token_hex(5), now)
            rollout = after.rollouts[model]
            self._vitals.forgive(ModelRef(model, plan.to))
            late = await self._commit(after)
        log.info("%s", progression.line(rollout, rollout))
        return await self._document(rollout) | late

    async def rollout(self, model: str) -> Said:
        return await self._document(takeover.find(self._ledger.registry, model))

    async def steer_rollout(self, model: str, verb: str) -> Said:
        late: Said = {}
        async with self._ledger.writing:
            before = takeover.find(self._ledger.registry, model)
            try:
                after = progression.steered(before, verb, time.time(), self._figures(before))
            except ValueError as error:
                raise InUse(f"The rollout of model {model} cannot {verb}: {error}") from None
            if after is not before:
                late = await self._commit(takeover.decide(self._ledger.registry, after))
        if after is not before:
            log.info("%s", progression.line(before, after))
        return await self._document(after) | late

    async def run(self) -> None:
        """Look at the rollouts, for good."""
        while True:
            await asyncio.sleep(_PERIOD)
            await self.look()

    async def look(self) -> None:
        """Decide what there is to decide of each rollout, and drop the figures of those that are no more."""
        for rollout in list(self._ledger.registry.rollouts.values()):
            try:
                await self._look(rollout)
            except RelayError as error:
                log.warning("%s: its rollout is looked at again in a second: %s", rollout.model, error)
            except Exception:
                log.exception("%s: a look at its rollout failed; the next one follows", rollout.model)
        await self._forget_old()

    async def _look(self, rollout: Rollout) -> None:
        now = time.time()
        if rollout.under_way:
            after = await self._decided(rollout, now)
            if after is not rollout:
                await self._put(rollout, lambda registry: takeover.decide(registry, after))
        elif rollout.warm is not None and now >= rollout.ended + (rollout.plan.keep_warm_s or 0.0):
            await self._put(rollout, lambda registry: takeover.cool(registry, rollout, now))

    async def _put(self, rollout: Rollout, decide: Callable[[Registry], Registry]) -> None:
        """Put a decision in force that was made by ``rollout`` as it stands, and log it."""
        async with self._ledger.writing:
            if self._ledger.registry.rollouts.get(rollout.model) is not rollout:  # somebody steered it meanwhile
                return
            registry = decide(self._ledger.registry)
            late = await self._commit(registry)
        after = registry.rollouts[rollout.model]
        log.log(_LEVELS.get(after.state, logging.INFO), "%s", progression.line(rollout, after))
        if late:
            log.warning("%s: %s", rollout.model, late["status"])

    async def _decided(self, rollout: Rollout, now: float) -> Rollout:
        """What a rollout that is under way comes to now; the same one where nothing changes."""
        if rollout.state == "starting":
            return self._of_start(rollout, now)
        failure = self._failure(rollout)
        return await asyncio.to_thread(progression.looked_at, rollout, self._figures(rollout), now, failure)

    def _of_start(self, rollout: Rollout, now: float) -> Rollout:
        spec = change.find(self._ledger.registry, rollout.model, rollout.plan.to)
        if (error := self._vitals.failure(spec.ref)) is not None:
            return progression.looked_at(rollout, (), now, _last_line(error.detail or str(error)))
        if self._status(spec.ref).replicas >= spec.min_workers:
            return progression.started(rollout, now)
        patience = spec.startup_timeout + (self._settings.install_timeout if spec.requirements else 0) + _PLACEMENT
        # Who comes back after a long absence gives the workers as long again.
        if now - max(rollout.began, self._born) > patience:
            return progression.looked_at(rollout, (), now, f"after {patience:g} s they are still not ready")
        return rollout

    def _failure(self, rollout: Rollout) -> str:
        """Why no worker of the candidate runs; empty while one does, or may yet."""
        ref = ModelRef(rollout.model, rollout.plan.to)
        status = self._status(ref)
        if status.phase != "failed" or status.replicas:
            return ""
        error = self._vitals.failure(ref)
        return _last_line(status.last_error if error is None else error.detail) or "all that were started have failed"

    def _status(self, ref: ModelRef) -> ModelStatus:
        return self._vitals.statuses.get(ref, ModelStatus())

    def _figures(self, rollout: Rollout) -> Figures:
        return [self._measured.figures(rollout.trial_id(step)) for step in range(rollout.step + 1)]

    async def _document(self, rollout: Rollout) -> Said:
        return await asyncio.to_thread(progression.document, rollout, self._figures(rollout), time.time())

    async def _commit(self, after: Registry) -> Said:
        """Put a change in force; what is to be said where that is not so everywhere yet."""
        try:
            await self._ledger.commit(after)
        except NotYet as late:
            return {"status": str(late)}
        return {}

    async def _forget_old(self) -> None:
        """Drop the figures of rollouts that went with their model, or made room for another."""
        ids = {rollout.id for rollout in self._ledger.registry.rollouts.values()}
        for id in self._known - ids:
            with contextlib.suppress(Unavailable):
                await self._measured.forget(id)
        self._known = ids


def _last_line(traceback: str) -> str:
    lines = traceback.strip().splitlines()
    return lines[-1] if lines else ""
