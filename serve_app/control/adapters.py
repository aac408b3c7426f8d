"""LoRA adapters at run time: a replica checks an adapter by loading it, then it is stored and published."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator

from serve_app.control import registry_changes
from serve_app.control.archive_ingestion import ArchiveIngestor
from serve_app.control.cancellation import run_to_end
from serve_app.control.reconcile_loop import ReconcileLoop
from serve_app.control.registry import find_version
from serve_app.control.state import StateStore
from serve_app.domain import adapter as adapters
from serve_app.domain.adapter import AdapterDocument, AdapterRequest, AdapterSpec
from serve_app.domain.model import ModelRef, ModelSpec
from serve_app.errors import NoReplica, NotFound

# Loads an adapter in one of a version's replicas. Raises AdapterRejected and Unavailable.
LoadAdapter = Callable[[ModelRef, AdapterSpec], Awaitable[None]]


class AdapterService:
    """The operations of ``ControlAPI`` on adapters.

    The routing table has the adapters of each version. A replica loads those that it lacks as soon as it has
    the table, and keeps requests for them waiting, so an acknowledged adapter is served by all replicas.
    """

    def __init__(
        self,
        state: StateStore,
        reconcile_loop: ReconcileLoop,
        ingestor: ArchiveIngestor,
        load_adapter: LoadAdapter,
    ) -> None:
        self._state = state
        self._reconcile_loop = reconcile_loop
        self._ingestor = ingestor
        self._load_adapter = load_adapter
        self._lock = asyncio.Lock()
        self._offered: dict[tuple[ModelRef, str], AdapterSpec] = {}  # stored, and not in the registry yet

    async def add_adapter(self, model: str, version: str | None, request: AdapterRequest) -> AdapterDocument:
        spec = find_version(self._state.registry, model, version)
        registry_changes.check_adapter(self._state.registry, spec, request.name)
        if not self._reconcile_loop.count_running(spec.ref):
            raise NoReplica(spec.name, spec.version, "no replica runs that could load the adapter")
        async with self._lock, self._reconcile_loop.hold_archives():
            adapter = await run_to_end(asyncio.to_thread(self._ingestor.ingest_adapter, request, spec))
            with self._offering(spec.ref, adapter):
                await self._load_adapter(spec.ref, adapter)
            async with self._state.exclusive():
                after = registry_changes.add_adapter(self._state.registry, spec, adapter)
                pending = await self._state.commit_with_status(after)
        [document] = adapters.describe([adapter], spec.name, spec.version)
        return {**document, "status": pending} if pending else document

    @contextlib.contextmanager
    def _offering(self, ref: ModelRef, adapter: AdapterSpec) -> Iterator[None]:
        """Let a replica on another node fetch an adapter that is not in the registry yet."""
        self._offered[ref, adapter.name] = adapter
        try:
            yield
        finally:
            del self._offered[ref, adapter.name]

    def find_stored(self, spec: ModelSpec, name: str) -> AdapterSpec:
        """Return an adapter whose archive is stored. Raises NotFound."""
        adapter = self._offered.get((spec.ref, name))
        adapter = adapter or next((known for known in spec.adapters if known.name == name), None)
        if adapter is None:
            raise NotFound(f"Model {spec.name} has no adapter {name} any more.")
        return adapter

    async def list_adapters(self, model: str, version: str | None) -> list[AdapterDocument]:
        spec = find_version(self._state.registry, model, version)
        return adapters.describe(spec.all_adapters, spec.name, spec.version)

    async def remove_adapter(self, model: str, version: str | None, name: str) -> None:
        async with self._state.exclusive():
            spec = find_version(self._state.registry, model, version)
            await self._state.commit(registry_changes.remove_adapter(self._state.registry, spec, name))
