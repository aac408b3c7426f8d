"""The desired state as it is stored, and the routing table that every process receives."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from serve_app.control import registry_changes
from serve_app.control.access_keys import ApiKeys
from serve_app.control.audit import AuditTrail
from serve_app.control.cancellation import run_to_end
from serve_app.control.persistence.database import Database
from serve_app.control.registry import Registry, TableBuilder
from serve_app.control.replica_health import HealthTracker
from serve_app.control.table_publisher import TablePublisher
from serve_app.domain.audit import AuditRecord
from serve_app.domain.model import ModelRef, ModelSpec
from serve_app.domain.routing_table import RoutingTable
from serve_app.errors import InProgress, Unavailable

log = logging.getLogger(__name__)

_REFRESH_PERIOD_S = 0.5  # between two looks for changes of other servers; a look takes a millisecond


@dataclass(frozen=True)
class AcknowledgementPolicy:
    """The readers that must have a change before it is acknowledged, and the timeout for it in seconds."""

    live_readers: Callable[[], Awaitable[set[str]]]
    timeout: float


class StateStore:
    """The registry, and the routing table built from it.

    A caller that changes the registry is in ``exclusive`` from reading to committing. ``on_change`` is
    called with the registries before and after each stored change. ``sequence_header`` is the header that
    names a request's sequence.
    """

    def __init__(
        self,
        database: Database,
        registry: Registry,
        publisher: TablePublisher,
        health: HealthTracker,
        keys: ApiKeys | None,
        acknowledgement: AcknowledgementPolicy,
        on_change: Callable[[Registry, Registry], None],
        sequence_header: str = "",
    ) -> None:
        self.registry = registry
        self.write_lock = asyncio.Lock()
        self.audit_trail: AuditTrail | None = None  # None: changes are not recorded
        self.on_loopback = False  # the inference port is reachable from its own machine only
        self.startup_complete = False  # every version that start-up requested is ready or has failed
        self._database = database
        self._publisher = publisher
        self._health = health
        self._keys = keys
        self._acknowledgement = acknowledgement
        self._on_change = on_change
        self._is_outdated = False  # the stored registry has to be loaded
        self.on_reload: Callable[[], Awaitable[None]] = _nothing  # loads what is stored beside the registry
        self._table_builder = TableBuilder(sequence_header)
        # Of what the table was built last, with its generation.
        self._published_registry: Registry | None = None
        self._published: tuple[object, ...] = ()
        # the running hosts of each pool
        self.pool_hosts: Callable[[], Mapping[str, tuple[str, ...]]] = dict

    @property
    def table(self) -> RoutingTable:
        """The routing table that was published last."""
        return self._publisher.table

    @contextlib.asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        """Exclude other changes until the end of the block, after those of other servers are loaded.

        Raises Unavailable.
        """
        async with self.write_lock:
            await run_to_end(self._refresh())
            yield

    async def commit(self, after: Registry) -> None:
        """Store a change, publish it, and return once every live reader has it.

        Raises Unavailable where it could not be stored, InProgress where a live reader does not have it yet.
        """
        await run_to_end(self._store(after, self._save))
        await self.wait_until_applied()

    async def _store(self, after: Registry, save: Callable[[Registry], None]) -> None:
        """Store a change with ``save``, replace the registry, and publish it. Raises Unavailable."""
        try:
            await asyncio.to_thread(save, after)
        except Unavailable:
            # The connection may have been lost after the commit: the stored registry is the valid one. A
            # database that was locked from the start is not waited for twice, 10 s each.
            if self._database.is_uncertain:
                await self._load()
            raise
        self._replace(after)

    async def run(self) -> None:
        """Load the changes of other servers soon after they are stored, until cancelled."""
        is_readable = True
        while True:
            await asyncio.sleep(_REFRESH_PERIOD_S)
            try:
                await self.refresh()
                if not is_readable:
                    log.info("The database can be read again.")
                is_readable = True
            except Unavailable as error:
                if is_readable:  # once: a database may be away for hours
                    log.error(
                        "The database cannot be read; predictions continue, and changes are refused until it "
                        "can: %s",
                        error,
                    )
                is_readable = False
            except Exception:
                log.exception("the changes of other servers could not be loaded; trying again")

    async def refresh(self) -> None:
        """Load what another server has changed, and publish it. Raises Unavailable."""
        # A change of this server may be in progress at the first look.
        if self._is_outdated or await run_to_end(asyncio.to_thread(self._database.has_changed)):
            async with self.exclusive():
                pass

    async def _refresh(self) -> None:
        if self._is_outdated or await asyncio.to_thread(self._database.has_changed):
            log.info("another server has changed the registry, which is loaded again")
            await self._load()

    async def _load(self) -> None:
        """Replace the registry by the stored one. Raises Unavailable."""
        self._is_outdated = True
        registry = await asyncio.to_thread(self._database.load)
        await self.on_reload()
        self._is_outdated = False
        self._replace(registry)

    def _replace(self, after: Registry) -> None:
        """Replace the registry by the stored one, and publish it."""
        before, self.registry = self.registry, after
        self.publish()
        self._on_change(before, after)

    def _save(self, after: Registry) -> None:
        """Store a change with its record of the audit log, in one transaction. Raises Unavailable."""
        trail = self.audit_trail
        if trail is None:
            return self._database.save(self.registry, after)
        records: list[AuditRecord] = []
        opened = trail.open_record()
        self._database.save(
            self.registry,
            after,
            lambda connection, changes: records.append(trail.add(opened, connection, changes)),
        )
        trail.confirm(records[0])

    async def commit_with_status(self, after: Registry) -> str:
        """Commit a change; return its status where a live reader does not have it yet, else nothing.

        Raises Unavailable where it could not be stored.
        """
        try:
            await self.commit(after)
        except InProgress as late:
            return str(late)
        return ""

    async def record_memory(self, ref: ModelRef, digest: str, memory: int) -> None:
        """Store the measured bytes of a replica; no reader of the routing table needs them.

        Raises Unavailable where they could not be stored.
        """
        if registry_changes.record_memory(self.registry, ref, digest, memory) is self.registry:
            return
        async with self.exclusive():
            after = registry_changes.record_memory(self.registry, ref, digest, memory)
            if after is not self.registry:
                await run_to_end(self._store(after, partial(self._database.save, self.registry)))

    async def renew_key(self, kind: str) -> None:
        """Replace one of TorchServe's keys, and return once every live reader refuses the old one."""
        assert self._keys is not None  # without keys no protocol has the route
        async with self.write_lock:
            await run_to_end(self._renew_key(self._keys, kind))
            await self.wait_until_applied()

    async def _renew_key(self, keys: ApiKeys, kind: str) -> None:
        await asyncio.to_thread(keys.renew, kind)
        self.publish()

    def publish(self) -> None:
        """Publish the present routing table where it differs from the last one."""
        current = self._publisher.table
        unhealthy = self._health.find_unhealthy(self._find_spec)
        access = self._keys.access if self._keys is not None else None
        pools = self.pool_hosts()
        sources = (self._health.revision, unhealthy, access, pools, self.on_loopback, self.startup_complete)
        if self._published_registry is self.registry and self._published == (current.generation, sources):
            return
        table = self._table_builder.build(
            self.registry,
            self._health.statuses,
            dict.fromkeys(unhealthy, False),
            current.generation,
            self.startup_complete,
        )
        table = replace(table, access=access, on_loopback=self.on_loopback, pools=pools)
        if table != current or current.generation == 0:
            table = replace(table, generation=self._publisher.next_generation())
            self._publisher.publish(table)
        self._published_registry, self._published = self.registry, (table.generation, sources)

    def _find_spec(self, ref: ModelRef) -> ModelSpec | None:
        record = self.registry.models.get(ref.name)
        return record.versions.get(ref.version) if record is not None else None

    async def wait_until_applied(self) -> None:
        """Wait until every live reader has the published table. Raises InProgress."""
        policy = self._acknowledgement
        late = await self._publisher.wait_until_applied(policy.timeout, policy.live_readers)
        if late:
            raise InProgress(f"Stored, and not yet in force at {len(late)} of the replicas that run.")


async def _nothing() -> None:
    """Load nothing."""
