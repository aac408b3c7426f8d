"""The loaded versions of one process of a pool, within a budget of memory, evicted by least recent use."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Generic, Protocol, TypeVar

from serve_app.domain.model import ModelRef, ModelSpec
from serve_app.errors import PoolBusy, PoolTooSmall, RelayError, StartFailed
from serve_app.runtime.host import malloc
from serve_app.runtime.pool import memory
from serve_app.runtime.pool.memory import MemoryUse

log = logging.getLogger(__name__)

# Seconds for which the error of a failed load is returned before the next attempt.
_BACKOFF_S = (1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_IDLE_POLL_S = 0.005  # seconds between looks for a version that can be evicted
_MIB = 1 << 20


class HostedVersion(Protocol):
    """A loaded version."""

    spec: ModelSpec
    revision: str  # of the spec
    memory: MemoryUse
    last_used: float  # in seconds of time.monotonic()

    @property
    def ongoing(self) -> int:
        """Requests that wait or run."""

    @property
    def busy_seconds(self) -> float:
        """The seconds in which its handler has run."""

    async def close(self) -> None:
        """Answer the admitted requests, and free the version's memory."""


Hosted = TypeVar("Hosted", bound=HostedVersion)


@dataclass
class _Failure:
    error: RelayError
    revision: str
    count: int
    retry_at: float


@dataclass(frozen=True)
class CacheLimits:
    """The budget of a cache, and how long a load waits until a version can be evicted, in seconds."""

    pool: str
    budget: MemoryUse
    busy_timeout: float = 30.0


class VersionCache(Generic[Hosted]):
    """The loaded versions, by name and version; loads follow one another.

    ``open_version`` loads a spec. ``find_spec`` returns the spec of a version with a revision, an empty one
    being any. ``on_change`` is called when the loaded versions have changed, ``on_failure`` after a load
    that has failed.
    """

    def __init__(
        self,
        open_version: Callable[[ModelSpec], Awaitable[Hosted]],
        find_spec: Callable[[ModelRef, str], Awaitable[ModelSpec]],
        limits: CacheLimits,
        on_change: Callable[[], None] = lambda: None,
        on_failure: Callable[[ModelSpec, StartFailed], None] = lambda spec, error: None,
        measure: Callable[[], MemoryUse] = memory.measure,
    ) -> None:
        self.loaded: dict[tuple[str, str], Hosted] = {}
        self.pinned: frozenset[ModelRef] = frozenset()
        self.evictions = 0
        self._open_version = open_version
        self._find_spec = find_spec
        self._limits = limits
        self._on_change = on_change
        self._on_failure = on_failure
        self._measure = measure
        self._lock = asyncio.Lock()
        self._loads: dict[tuple[ModelRef, str], asyncio.Task[Hosted]] = {}  # by version and revision
        self._waiting: Counter[ModelRef] = Counter()  # callers of a load that have not resumed yet
        self._failures: dict[ModelRef, _Failure] = {}
        self._closing: set[asyncio.Task[None]] = set()  # the event loop keeps only weak references

    @property
    def used(self) -> MemoryUse:
        """The memory of all loaded versions, as it was measured when they were loaded."""
        return reduce(MemoryUse.__add__, (hosted.memory for hosted in self.loaded.values()), MemoryUse())

    @property
    def loading(self) -> int:
        """The number of versions that are loaded or wait for that."""
        return len(self._loads)

    def find(self, ref: ModelRef, revision: str) -> Hosted | None:
        """Return a version if it is loaded with this revision; an empty one matches each."""
        hosted = self.loaded.get((ref.name, ref.version))
        return hosted if hosted is None or revision in ("", hosted.revision) else None

    async def get(self, ref: ModelRef, revision: str = "") -> Hosted:
        """Return a version, which is loaded first where it is not; callers of one revision share a load.

        A cancelled caller does not end it. Raises RelayError: StartFailed where it cannot be loaded, for a
        while without another attempt; PoolTooSmall, PoolBusy.
        """
        if (hosted := self.find(ref, revision)) is not None:
            return hosted
        failure = self._failures.get(ref)
        if failure is not None and time.monotonic() < failure.retry_at and revision in ("", failure.revision):
            raise failure.error.with_traceback(None)
        load = self._loads.get((ref, revision))
        if load is None:
            load = self._loads[ref, revision] = asyncio.ensure_future(self._load(ref, revision))
            load.add_done_callback(lambda done: self._end_load(ref, revision, done))
        self._waiting[ref] += 1
        try:
            return await asyncio.shield(load)
        finally:
            self._waiting[ref] -= 1
            if not self._waiting[ref]:
                del self._waiting[ref]

    def forget_failure(self, ref: ModelRef) -> None:
        """Let the next request load a version whose load has failed."""
        self._failures.pop(ref, None)

    def retain(self, revisions: Mapping[ModelRef, str]) -> None:
        """Evict every version that is not in ``revisions``, or has another revision there."""
        for hosted in list(self.loaded.values()):
            if revisions.get(hosted.spec.ref) != hosted.revision:
                self._close_later(hosted)
        for ref, failure in list(self._failures.items()):
            if revisions.get(ref) != failure.revision:
                del self._failures[ref]

    async def evict(self, ref: ModelRef) -> None:
        """Evict a version if it is loaded; its admitted requests are answered first."""
        if (hosted := self.loaded.get((ref.name, ref.version))) is not None:
            await self._close(hosted)

    async def close(self) -> None:
        """Evict every version."""
        for load in list(self._loads.values()):
            load.cancel()
        await asyncio.gather(*map(self._close, list(self.loaded.values())), *self._closing)

    def _end_load(self, ref: ModelRef, revision: str, load: asyncio.Task[Hosted]) -> None:
        del self._loads[ref, revision]
        if not load.cancelled():
            load.exception()  # it is not reported as never retrieved where every caller has left

    async def _load(self, ref: ModelRef, revision: str) -> Hosted:
        async with self._lock:
            spec = await self._find_spec(ref, revision)
            if (old := self.loaded.get((ref.name, ref.version))) is not None:
                if old.revision == spec.revision:  # another caller's load has ended meanwhile
                    return old
                await self._close(old)
            try:
                hosted = await self._load_within_budget(spec)
            except StartFailed as error:
                self._record_failure(spec, error)
                raise
            self._failures.pop(ref, None)
            self.loaded[ref.name, ref.version] = hosted
            self._on_change()
            return hosted

    async def _load_within_budget(self, spec: ModelSpec) -> Hosted:
        """Load a version, and evict others until it fits: before by its estimate, then as measured."""
        await self._make_room(spec, MemoryUse(spec.claimed_memory))
        before = self._measure()
        hosted = await self._open_version(spec)
        used = self._measure() - before
        # Pages that an evicted version has left are used again, so a measurement may be too small.
        hosted.memory = MemoryUse(max(used.host, spec.memory, 0), max(used.device, 0))
        try:
            await self._make_room(spec, hosted.memory)
        except BaseException:
            await hosted.close()
            raise
        hosted.last_used = time.monotonic()
        return hosted

    async def _make_room(self, spec: ModelSpec, need: MemoryUse) -> None:
        """Evict idle versions until ``need`` fits. Raises PoolTooSmall and PoolBusy."""
        limits = self._limits
        if need.exceeds(limits.budget):
            raise PoolTooSmall(spec.name, spec.version, _explain(limits, need))
        deadline = time.monotonic() + limits.busy_timeout
        evicted = False
        while (self.used + need).exceeds(limits.budget):
            idle = [
                hosted
                for hosted in self.loaded.values()
                if not (hosted.ongoing or self._waiting[hosted.spec.ref])
                and hosted.spec.ref not in self.pinned
            ]
            if idle:
                evicted = True
                self.evictions += 1
                await self._close(min(idle, key=lambda hosted: hosted.last_used))
            elif time.monotonic() < deadline and any(
                hosted.spec.ref not in self.pinned for hosted in self.loaded.values()
            ):
                await asyncio.sleep(_IDLE_POLL_S)
            else:
                raise PoolBusy(spec.name, limits.pool)
        if evicted:
            await asyncio.to_thread(malloc.trim)

    def _close_later(self, hosted: Hosted) -> None:
        if self._remove(hosted):
            task = asyncio.ensure_future(hosted.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def _close(self, hosted: Hosted) -> None:
        if self._remove(hosted):
            await hosted.close()

    def _remove(self, hosted: Hosted) -> bool:
        """Let no further request find a version; return False where it is closed already."""
        key = hosted.spec.name, hosted.spec.version
        if self.loaded.get(key) is not hosted:
            return False
        del self.loaded[key]
        self._on_change()
        return True

    def _record_failure(self, spec: ModelSpec, error: StartFailed) -> None:
        revision, failure = spec.revision, self._failures.get(spec.ref)
        count = failure.count + 1 if failure is not None and failure.revision == revision else 0
        pause = _BACKOFF_S[min(count, len(_BACKOFF_S) - 1)]
        self._failures[spec.ref] = _Failure(error, revision, count, time.monotonic() + pause)
        self._on_failure(spec, error)


def _explain(limits: CacheLimits, need: MemoryUse) -> str:
    needs = [
        f"{need.host / _MIB:.0f} MiB of memory, and a host has {limits.budget.host / _MIB:.0f} MiB"
        if need.host > limits.budget.host > 0
        else "",
        f"{need.device / _MIB:.0f} MiB on the device, and a host has {limits.budget.device / _MIB:.0f} MiB"
        if need.device > limits.budget.device > 0
        else "",
    ]
    return (
        f"it needs {' and '.join(filter(None, needs))} in the pool {limits.pool}. Raise pools.{limits.pool}."
        "memory or num_gpus in app.yaml, or take pool out of its model-config.yaml."
    )
