"""What the control plane asks of a model's traffic: its policy, stored and in force."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any

from serve_app import policy as policies
from serve_app.control import registry as change
from serve_app.control.registry import Registry
from serve_app.deployments.ledger import Ledger
from serve_app.errors import NotYet, RelayError
from serve_app.policy import WHOLE, Policy

log = logging.getLogger("torchrelay.traffic")


class Traffic:
    """The part of ``controlplane.Keeper`` that is about policies."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    async def traffic(self, model: str) -> dict[str, Any]:
        change.find(self._ledger.registry, model, None)
        return document(self._ledger.registry, model)

    async def set_traffic(self, model: str, policy: Policy) -> dict[str, Any]:
        async with self._ledger.writing:
            await self._ledger.commit(change.set_policy(self._ledger.registry, model, policy))
            return document(self._ledger.registry, model)

    async def declare(self, declared: Mapping[str, Any]) -> None:
        """Put in force what the settings say of models' traffic, where they say something new."""
        for model, said in declared.items():
            try:
                async with self._ledger.writing:
                    after = change.declare(self._ledger.registry, model, policies.read(said))
                    if after is not self._ledger.registry:
                        with contextlib.suppress(NotYet):
                            await self._ledger.commit(after)
            except RelayError as error:
                log.error("control.traffic.%s is not in force: %s", model, error)


def document(registry: Registry, model: str) -> dict[str, Any]:
    """A model's policy as it is written, and under ``in_force`` who gets how much now, in basis points."""
    record = registry.models[model]
    trial = change.trial(registry, model)
    if trial is None:
        by = {"by": "policy"}
        versions = record.policy.allocation.shares if record.policy.allocation else {record.default: WHOLE}
    else:
        experiment = change.experiment_of(registry, model)
        kind, owner = ("experiment", experiment) if experiment else ("rollout", registry.rollouts[model])
        by = {"by": kind, "id": owner.id}
        versions = Counter()
        for arm, share in trial.allocation.shares.items():
            versions[trial.arms[arm]] += share
    in_force = {**by, "default": record.default, "versions": dict(sorted(versions.items()))}
    return {**policies.write(record.policy), policies.IN_FORCE: in_force}
