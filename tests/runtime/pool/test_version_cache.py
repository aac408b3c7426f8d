"""The cache of loaded versions: budget, order of eviction, shared loads and failures."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from serve_app.domain.model import ModelRef, ModelSpec
from serve_app.errors import PoolBusy, PoolTooSmall, StartFailed
from serve_app.runtime.pool.memory import MemoryUse
from serve_app.runtime.pool.version_cache import CacheLimits, VersionCache


class Version:
    """A loaded version of a known size, which is idle unless ``ongoing`` is set."""

    def __init__(self, process: Process, spec: ModelSpec) -> None:
        self.process, self.spec, self.revision = process, spec, spec.revision
        self.memory, self.last_used, self.ongoing, self.busy_seconds = MemoryUse(), 0.0, 0, 0.0

    async def close(self) -> None:
        self.process.use -= self.process.sizes[self.spec.name]
        self.process.closed.append(self.spec.name)


class Process:
    """A process whose memory grows by the size of each version that it loads."""

    def __init__(self, budget: int, sizes: dict[str, int], busy_timeout: float = 30.0) -> None:
        self.sizes, self.use, self.closed, self.opened = sizes, 1000, list[str](), list[str]()
        self.estimates: dict[str, int] = {}
        self.error: Exception | None = None
        self.specs: dict[str, ModelSpec] = {}  # by revision
        self.gate = asyncio.Event()
        self.gate.set()
        self.cache: VersionCache[Version] = VersionCache(
            self._open,
            self._find_spec,
            CacheLimits("p", MemoryUse(budget), busy_timeout),
            measure=lambda: MemoryUse(self.use),
        )

    async def _open(self, spec: ModelSpec) -> Version:
        await self.gate.wait()
        self.opened.append(spec.name)
        if self.error is not None:
            raise self.error
        self.use += self.sizes[spec.name]
        return Version(self, spec)

    async def _find_spec(self, ref: ModelRef, revision: str) -> ModelSpec:
        if revision in self.specs:
            return self.specs[revision]
        memory = self.estimates.get(ref.name, 0)
        return ModelSpec(ref.name, ref.version, "", "d", "", memory=memory, pool="p")

    async def get(self, name: str) -> Version:
        return await self.cache.get(ModelRef(name, "1.0"))

    @property
    def loaded(self) -> list[str]:
        return sorted(name for name, _ in self.cache.loaded)


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 30))


def test_the_least_recently_used_versions_are_evicted_beyond_the_budget() -> None:
    async def test() -> None:
        process = Process(100, {"a": 40, "b": 40, "c": 40, "d": 90})
        for name in "abc":
            (await process.get(name)).last_used = {"a": 2.0, "b": 1.0, "c": 3.0}[name]
        assert process.loaded == ["a", "c"]
        assert process.closed == ["b"]
        assert process.cache.used == MemoryUse(80)
        await process.get("d")
        assert process.loaded == ["d"]
        assert process.cache.evictions == 3

    run(test)


def test_a_loaded_version_is_returned_and_callers_share_a_load() -> None:
    async def test() -> None:
        process = Process(100, {"a": 40})
        process.gate.clear()
        calls = [asyncio.ensure_future(process.get("a")) for _ in range(3)]
        await asyncio.sleep(0)
        assert process.cache.loading == 1
        calls[0].cancel()  # the others still get it
        process.gate.set()
        first, second = await asyncio.gather(*calls[1:])
        assert first is second is await process.get("a")
        assert process.opened == ["a"]

    run(test)


def test_no_caller_gets_the_load_of_another_revision() -> None:
    async def test() -> None:
        process = Process(100, {"a": 40})
        older, newer = (ModelSpec("a", "1.0", "", digest, "", pool="p") for digest in ("older", "newer"))
        process.specs = {spec.revision: spec for spec in (older, newer)}
        process.gate.clear()
        calls = [
            asyncio.ensure_future(process.cache.get(older.ref, spec.revision))
            for spec in (older, newer, newer)
        ]
        await asyncio.sleep(0)
        process.gate.set()
        loaded = await asyncio.gather(*calls)
        assert [version.spec for version in loaded] == [older, newer, newer]
        assert process.opened == ["a", "a"] and process.closed == ["a"]
        assert process.cache.find(newer.ref, newer.revision) is loaded[1]
        assert (await process.cache.get(newer.ref)) is loaded[1]

    run(test)


def test_a_version_in_use_or_pinned_is_not_evicted() -> None:
    async def test() -> None:
        process = Process(100, {"a": 60, "b": 60, "c": 60})
        a = await process.get("a")
        a.ongoing = 1
        load = asyncio.ensure_future(process.get("b"))
        await asyncio.sleep(0.05)
        assert process.loaded == ["a"]
        a.ongoing = 0
        await load
        assert process.loaded == ["b"]
        process.cache.pinned = frozenset([ModelRef("b", "1.0")])
        with pytest.raises(PoolBusy, match="pinned or in use"):
            await process.get("c")
        assert process.loaded == ["b"]

    run(test)


def test_a_version_is_not_evicted_before_its_callers_have_it() -> None:
    async def test() -> None:
        process = Process(100, dict.fromkeys("abcdefgh", 60))
        used = []

        async def call(name: str) -> None:
            version = await process.get(name)
            assert process.cache.find(version.spec.ref, "") is version
            version.ongoing += 1
            await asyncio.sleep(0)
            version.ongoing -= 1
            used.append(name)

        await asyncio.gather(*(call(name) for name in "abcdefgh" * 3))
        assert sorted(used) == sorted("abcdefgh" * 3)

    run(test)


def test_a_wait_for_busy_versions_ends() -> None:
    async def test() -> None:
        process = Process(100, {"a": 60, "b": 60}, busy_timeout=0.05)
        (await process.get("a")).ongoing = 1
        with pytest.raises(PoolBusy):
            await process.get("b")

    run(test)


def test_a_version_larger_than_the_budget_is_refused_and_nothing_is_lost() -> None:
    async def test() -> None:
        process = Process(100 << 20, {"a": 40 << 20, "b": 200 << 20})
        await process.get("a")
        with pytest.raises(PoolTooSmall) as refused:
            await process.get("b")
        assert "needs 200 MiB of memory, and a host has 100 MiB in the pool p" in refused.value.detail
        assert process.use == 1000 + (40 << 20)
        assert process.loaded == ["a"]
        process.estimates["b"] = 200 << 20
        process.cache.forget_failure(ModelRef("b", "1.0"))
        with pytest.raises(PoolTooSmall):  # as measured before: it is not loaded to find out
            await process.get("b")
        assert process.opened == ["a", "b"]

    run(test)


def test_an_estimate_evicts_before_the_load_and_a_measurement_is_not_below_it() -> None:
    async def test() -> None:
        process = Process(100, {"a": 60, "b": 10})
        await process.get("a")
        process.estimates["b"] = 60
        await process.get("b")
        assert process.loaded == ["b"]
        assert process.cache.used == MemoryUse(60)

    run(test)


def test_a_failed_load_is_not_repeated_for_each_request() -> None:
    async def test() -> None:
        process = Process(100, {"a": 40})
        process.error = StartFailed("a", "1.0", "broken")
        for _ in range(3):
            with pytest.raises(StartFailed):
                await process.get("a")
        assert process.opened == ["a"]
        process.error = None
        process.cache.forget_failure(ModelRef("a", "1.0"))
        await process.get("a")
        assert process.loaded == ["a"]

    run(test)


def test_removed_and_replaced_versions_are_evicted() -> None:
    async def test() -> None:
        process = Process(100, {"a": 10, "b": 10})
        a, b = await process.get("a"), await process.get("b")
        process.cache.retain({a.spec.ref: a.revision, b.spec.ref: "another"})
        await process.cache.close()
        assert process.closed[0] == "b"
        assert process.use == 1000
        assert process.cache.find(a.spec.ref, "") is None

    run(test)


def test_a_version_of_another_revision_is_loaded_again() -> None:
    async def test() -> None:
        process = Process(100, {"a": 10})
        a = await process.get("a")
        assert process.cache.find(a.spec.ref, "another") is None
        process.specs["another"] = ModelSpec("a", "1.0", "", "another", "", pool="p")
        again = await process.cache.get(a.spec.ref, "another")
        assert again is not a
        assert process.closed == ["a"]
        assert process.loaded == ["a"]

    run(test)
