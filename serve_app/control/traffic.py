"""The service that reads and changes the traffic policies of models."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any, cast

from serve_app.control import registry_changes
from serve_app.control.registry import Registry, active_split, find_version, running_experiment
from serve_app.control.state import StateStore
from serve_app.domain import traffic_policy as policies
from serve_app.domain.traffic_policy import BUCKET_COUNT, TrafficDocument, TrafficPolicy
from serve_app.errors import RelayError

log = logging.getLogger(__name__)


class TrafficService:
    """The operations of ``ControlAPI`` on traffic policies."""

    def __init__(self, state: StateStore) -> None:
        self._state = state

    async def get_traffic(self, model: str) -> TrafficDocument:
        find_version(self._state.registry, model, None)
        return to_document(self._state.registry, model)

    async def set_traffic(self, model: str, policy: TrafficPolicy) -> TrafficDocument:
        async with self._state.exclusive():
            await self._state.commit(registry_changes.set_policy(self._state.registry, model, policy))
            return to_document(self._state.registry, model)

    async def apply_declared_policies(self, declared: Mapping[str, Any]) -> None:
        """Apply the traffic policies of the settings where they have changed."""
        for model, policy in declared.items():
            try:
                async with self._state.exclusive():
                    after = registry_changes.apply_declared_policy(
                        self._state.registry, model, policies.read(policy)
                    )
                    if after is not self._state.registry:
                        await self._state.commit_with_status(after)
            except RelayError as error:
                log.error("control.traffic.%s is not in force: %s", model, error)


def to_document(registry: Registry, model: str) -> TrafficDocument:
    """Return a model's policy as JSON, with the active shares in basis points under ``active``."""
    record = registry.models[model]
    split = active_split(registry, model)
    versions: Mapping[str, int]
    if split is None:
        source = {"by": "policy"}
        allocation = record.policy.allocation
        versions = allocation.shares if allocation else {record.default: BUCKET_COUNT}
    else:
        experiment = running_experiment(registry, model)
        kind, owner = ("experiment", experiment) if experiment else ("rollout", registry.rollouts[model])
        source = {"by": kind, "id": owner.id}
        shares = Counter[str]()
        for arm, share in split.allocation.shares.items():
            shares[split.arms[arm]] += share
        versions = shares
    active = {**source, "default": record.default, "versions": dict(sorted(versions.items()))}
    return cast(TrafficDocument, {**policies.write(record.policy), policies.ACTIVE: active})
