"""The routing table: the snapshot by which the data plane selects versions and replicas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from serve_app.domain.access import AccessTable
from serve_app.domain.adapter import AdapterSpec
from serve_app.domain.model import Phase
from serve_app.domain.response_cache import CachePolicy
from serve_app.domain.signature import Signature
from serve_app.domain.traffic_policy import ActiveSplit, TrafficPolicy
from serve_app.domain.workflow_graph import WorkflowGraph


@dataclass(frozen=True, slots=True)
class VersionRoute:
    """One version in the table: the fields that the data plane needs to select and to call it."""

    version: str
    phase: Phase
    replicas: int
    job_queue_size: int = 100
    max_batch_size: int = 1
    client_timeout: int = 0  # milliseconds, 0: none
    max_concurrent_requests: int = 0  # 0: no limit
    start_seconds: float = 0.0  # of the replicas' last start; 0: unknown
    retries: bool = True
    replica_ids: tuple[str, ...] = ()  # of the running replicas
    healthy: bool = True  # it has its replicas, or still has time to recover them
    last_error: str = ""
    loaded_at_startup: bool = False
    wake_timeout: float = 0.0  # seconds that a request waits for a version at zero replicas
    stateful: bool = False  # its requests belong to sequences
    routing: Literal["load", "prefix"] = "load"  # by which a replica is chosen
    pool: str = ""  # whose hosts load and run it; replica_ids are then the hosts that have loaded it
    pool_hosts: int = 0  # which should have it loaded; others load it only where these are lost
    pin_loaded: bool = False
    revision: str = ""  # of what the hosts load, and of what stored responses depend on
    response_cache: CachePolicy | None = None
    graph: WorkflowGraph | None = None  # of a workflow, whose replicas, if any, run its functions
    adapters: tuple[AdapterSpec, ...] = ()  # LoRA adapters, those of its archive too
    signature: Signature | None = None  # from the model-config.yaml or the handler, where they have one
    schemas: Mapping[str, Any] | None = (
        None  # the JSON schemas of input and output, where the handler has them
    )


@dataclass(frozen=True, slots=True)
class ModelRoute:
    """One model in the table."""

    default: str
    versions: Mapping[str, VersionRoute]
    policy: TrafficPolicy = field(default_factory=TrafficPolicy)
    active_split: ActiveSplit | None = None  # of a running experiment or rollout
    sequence_header: str = ""  # names a sequence; empty where no version is stateful


@dataclass(frozen=True, slots=True)
class RoutingTable:
    """The routing table that the data plane reads. A higher generation is newer."""

    generation: int = 0
    models: Mapping[str, ModelRoute] = field(default_factory=dict)
    startup_complete: bool = False  # every version loaded at startup is ready or has failed
    access: AccessTable | None = None  # None: no key is required
    on_loopback: bool = False  # the inference port is reachable from its own machine only
    pools: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # the running hosts of each pool

    def accepts_requests(self, route: VersionRoute) -> bool:
        """Return whether requests need not wait: for a replica, or for the first host of a pool.

        A host loads a version that has none at its first request.
        """
        if route.pool and route.phase == "idle":
            return bool(self.pools.get(route.pool))
        return route.replicas > 0 or route.phase == "ready"


@dataclass(frozen=True, slots=True)
class TableDelta:
    """The difference between the table of the generation ``base`` and a later one."""

    base: int
    rest: RoutingTable  # the later table without its models, and without access rules that have not changed
    changed: Mapping[str, ModelRoute]
    removed: tuple[str, ...]
    keeps_access: bool

    @classmethod
    def between(cls, before: RoutingTable, after: RoutingTable) -> TableDelta:
        """Return the difference of two tables; routes that are the same object have not changed."""
        known = before.models
        keeps_access = before.access is after.access
        return cls(
            before.generation,
            replace(after, models={}, access=None if keeps_access else after.access),
            {name: route for name, route in after.models.items() if known.get(name) is not route},
            tuple(known.keys() - after.models.keys()),
            keeps_access,
        )

    def apply(self, table: RoutingTable) -> RoutingTable:
        """Return the later table; ``table`` is that of the generation ``base``."""
        models = {**table.models, **self.changed}
        for name in self.removed:
            del models[name]
        access = table.access if self.keeps_access else self.rest.access
        return replace(self.rest, models=models, access=access)
