"""Copies of live calls: which, how many, and that nobody who is live is ever held up by them."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace

import orjson
import pytest

from serve_app.dataplane.shadow import mirror as limits
from serve_app.dataplane.shadow.mirror import ShadowMirror
from serve_app.dataplane.shadow.stats import ShadowStats
from serve_app.domain.request import InferenceRequest, InferenceResponse, InputPart, ResponseStream
from serve_app.domain.routing_table import ModelRoute, RoutingTable, VersionRoute
from serve_app.domain.traffic_policy import ComparisonRule, ShadowPolicy, TrafficPolicy
from serve_app.errors import HandlerFailed, RelayError
from serve_app.telemetry.metrics import Meters
from tests.support.coroutine_backend import CoroutineBackend

SHADOW = ShadowPolicy("2.0")
ONE = InferenceResponse(b"1")
Answer = Callable[[InferenceRequest], Awaitable["InferenceResponse | ResponseStream"]]


def table(shadow: ShadowPolicy | None = SHADOW, replicas: int = 1) -> RoutingTable:
    rows = {"1.0": VersionRoute("1.0", "ready", 1), "2.0": VersionRoute("2.0", "ready", replicas)}
    return RoutingTable(
        1,
        {
            "m": ModelRoute(
                "1.0", {**rows, "3.0": VersionRoute("3.0", "ready", 1)}, TrafficPolicy(shadow=shadow)
            )
        },
    )


def call(value: object = 1, **more: object) -> InferenceRequest:
    return replace(
        InferenceRequest("m", None, (InputPart("body", orjson.dumps(value)),), request_id="r"), **more
    )  # type: ignore[arg-type]


class Parts(CoroutineBackend):
    """A mirror before a version that answers as the test says; ``table`` may change."""

    def __init__(self, answer: Answer, table: RoutingTable) -> None:
        self.table = table
        self.meters = Meters()
        self.calls: list[InferenceRequest] = []
        self.refs: set[tuple[str, str]] = set()
        self._answer = answer
        self.mirror = ShadowMirror(lambda: self.table, self._remote, self.meters)

    def _remote(self, ref, row):
        self.refs.add((ref.name, ref.version))
        return self

    async def infer(self, call: InferenceRequest) -> InferenceResponse | ResponseStream:
        self.calls.append(call)
        return await self._answer(call)

    def offer(
        self, value: object = 1, live: InferenceResponse | ResponseStream | None = ONE, version: str = "1.0"
    ) -> None:
        self.mirror.offer(call(value), version, live, 0.01)

    async def sent(self, count: int) -> None:
        """Until so many copies are with the shadow, and time for more."""
        while len(self.calls) < count:
            await asyncio.sleep(0)
        for _ in range(10):
            await asyncio.sleep(0)

    async def rest(self) -> None:
        """Until every copy has come to its end."""
        while self.mirror._tasks:
            await asyncio.wait(self.mirror._tasks)

    async def settle(self) -> ShadowStats:
        """Return the statistics so far of the only pair."""
        await self.rest()
        taken = self.mirror.drain()
        assert taken is not None
        [(pair, figures)] = taken
        assert (pair.model, pair.live) == ("m", "1.0")
        return figures

    def metric(self, outcome: str) -> float:
        wanted = (("model", "m"), ("outcome", outcome), ("version", "2.0"))
        return sum(
            v for name, labels, v in self.meters.samples() if "shadow_requests" in name and labels == wanted
        )


class Clock:
    """The clock of deadlines in the queue, which a test moves; a copy that was sent has real time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        clocks = {"time": time.time, "perf_counter": time.perf_counter, "monotonic": lambda: self.now}
        monkeypatch.setattr(limits, "time", SimpleNamespace(**clocks))


@asynccontextmanager
async def parts(answer: Answer | None = None, table: RoutingTable = table()):
    async def same(call: InferenceRequest) -> InferenceResponse:
        return InferenceResponse(b"1")

    made = Parts(answer or same, table)
    try:
        yield made
    finally:
        await made.mirror.close()


def test_a_copy_goes_to_the_shadow_and_what_it_says_is_compared() -> None:
    async def main() -> None:
        async def answers(call: InferenceRequest) -> InferenceResponse:
            return InferenceResponse(orjson.dumps(orjson.loads(call.inputs[0].value) % 3))

        async with parts(answers) as p:
            for value in range(9):
                p.offer(value, InferenceResponse(b"0"))
            figures = await p.settle()
            assert figures.counts == {"agreed": {"": 3}, "disagreed": {"numbers": 6}}
            count, total = figures.measures["max_abs_difference"]
            assert total / count == pytest.approx(1.0)
            assert [kept.document["inputs"][0]["json"] for kept in figures.worst_mismatches] == [
                2,
                5,
                8,
                1,
                4,
                7,
            ]
            assert [sum(figures.latency[version].values()) for version in ("live", "shadow")] == [9, 9]
            assert p.refs == {("m", "2.0")}
            assert (p.metric("agreed"), p.metric("disagreed")) == (3, 6)
            assert p.mirror.drain() is None, "each is told once"
            samples = {name: value for name, _, value in p.meters.samples()}
            assert samples["torchrelay_shadow_latency_seconds_count"] == 9
            assert not any(name.startswith("torchrelay_requests") for name in samples)

    asyncio.run(main())


def test_a_copy_is_marked_as_one_and_has_its_own_time() -> None:
    async def main() -> None:
        async with parts(table=table(replace(SHADOW, timeout_s=600))) as p:
            p.mirror.offer(
                call(deadline=time.time() - 1, headers={"x-user": "7"}), "1.0", InferenceResponse(b"1"), 0.1
            )
            await p.settle()
            [copy] = p.calls
            assert (copy.version, copy.request_id, copy.priority) == ("2.0", "r-shadow", "shadow")
            assert copy.headers == {"x-user": "7"}
            assert copy.deadline == pytest.approx(time.time() + 600, abs=60), (
                "its caller has its answer by now"
            )

    asyncio.run(main())


@pytest.mark.parametrize("percent", [0.01, 3, 10, 33.33, 100])
def test_the_share_is_met_and_spread_evenly(percent: float) -> None:
    async def main() -> None:
        async with parts(table=table(replace(SHADOW, percent=percent))) as p:
            drawn = []
            for _ in range(10_000):
                p.offer(live=None)  # failed: counted, and not sent
                drawn.append(sum(p.mirror._queues["m", "1.0"].stats.counts.get("skipped", {}).values()))
            assert drawn[-1] == round(percent * 100)
            assert all(abs(done - i * percent / 100) < 4 for i, done in enumerate(drawn, 1))

    asyncio.run(main())


def test_each_live_version_has_lots_of_its_own() -> None:
    """Where versions take turns, the copies come from all of them: the lots that chose them choose no
    copies.
    """

    async def main() -> None:
        async with parts(table=table(replace(SHADOW, percent=10))) as p:
            for i in range(1000):
                p.offer(live=None, version=("1.0", "3.0")[i % 2])
            counted = Counter(
                {pair.live: figures.calls["skipped"] for pair, figures in p.mirror.drain() or ()}
            )
            assert counted == {"1.0": pytest.approx(50, abs=3), "3.0": pytest.approx(50, abs=3)}

    asyncio.run(main())


def test_nothing_is_copied_that_has_no_shadow() -> None:
    async def main() -> None:
        async with parts() as p:
            p.offer(version="2.0")  # the shadow itself answered
            p.table = table(None)
            p.offer()
            p.table = RoutingTable()
            p.offer()
            assert p.mirror.drain() is None
            assert not p.calls

    asyncio.run(main())


def test_what_cannot_be_compared_is_skipped_and_counted() -> None:
    async def main() -> None:
        async def pieces():
            yield b"a"

        async with parts() as p:
            p.offer(live=None)
            p.offer(live=ResponseStream(InferenceResponse(b""), pieces()))
            p.table = table(replicas=0)
            p.offer()
            assert (await p.settle()).counts == {"skipped": {"live_failed": 1, "stream": 1, "no_replica": 1}}
            assert p.metric("skipped") == 3
            p.table = table()
            p.offer()
            p.table = table(replicas=0)  # the replica went while the copy waited
            assert (await p.settle()).counts == {"skipped": {"no_replica": 1}}
            assert not p.calls

    asyncio.run(main())


def test_errors_of_the_shadow_are_counted_by_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch)

    async def main() -> None:
        async def pieces():
            yield b"a"

        async def answers(call: InferenceRequest) -> InferenceResponse | ResponseStream:
            match orjson.loads(call.inputs[0].value):
                case 0:
                    raise HandlerFailed("traceback")
                case 1:
                    raise RelayError
                case 2:
                    await asyncio.sleep(60)
                case 3:
                    return ResponseStream(InferenceResponse(b""), pieces())
            raise KeyError("a bug")

        async with parts(answers) as p:
            for value in (0, 1, 3, 4):
                p.offer(value)
            await p.rest()
            p.table = table(replace(SHADOW, timeout_s=0.1))
            p.offer(2)
            figures = await p.settle()
            assert figures.counts == {
                "error": {"handler_failed": 1, "error": 1, "deadline": 1, "stream": 1, "internal": 1}
            }
            assert p.metric("error") == 5
            assert len(figures.worst_mismatches) == 0
            assert p.mirror._bytes == 0

    asyncio.run(main())


def test_a_shadow_that_hangs_holds_nobody_up_and_takes_bounded_memory() -> None:
    async def main() -> None:
        free = asyncio.Event()

        async def hangs(call: InferenceRequest) -> InferenceResponse:
            await free.wait()
            return InferenceResponse(b"1")

        async with parts(hangs) as p:
            times = []
            for _ in range(1000):
                started = time.perf_counter()
                p.offer("x" * 1000)
                times.append(time.perf_counter() - started)
            await p.sent(limits.MAX_IN_FLIGHT)
            assert len(p.calls) == limits.MAX_IN_FLIGHT, "few are under way"
            assert sorted(times)[500] < 100e-6
            assert p.metric("dropped") == 1000 - limits.MAX_QUEUED
            free.set()
            figures = await p.settle()
            assert figures.calls == {
                "agreed": limits.MAX_QUEUED,
                "disagreed": 0,
                "error": 0,
                "skipped": 0,
                "dropped": 872,
            }
            assert figures.counts["dropped"] == {"queue_full": 872}
            p.offer("x" * limits.MAX_BYTES)
            assert (await p.settle()).counts == {"dropped": {"queue_full": 1}}, "bytes are bounded as well"
            p.offer()
            assert (await p.settle()).counts == {"agreed": {"": 1}}

    asyncio.run(main())


def test_a_copy_that_has_waited_too_long_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)

    async def main() -> None:
        async def hangs(call: InferenceRequest) -> InferenceResponse:
            clock.now = 1.0
            await asyncio.sleep(60)
            return ONE

        async with parts(hangs, table(replace(SHADOW, timeout_s=0.5))) as p:
            for _ in range(20 * limits.MAX_IN_FLIGHT):
                p.offer()
            figures = await p.settle()
            assert figures.counts.keys() == {"error", "dropped"}
            assert set(figures.counts["error"]) == set(figures.counts["dropped"]) == {"deadline"}
            assert sum(figures.calls.values()) == 20 * limits.MAX_IN_FLIGHT
            assert len(p.calls) == figures.calls["error"], "what was dropped was not sent"

    asyncio.run(main())


def test_offering_raises_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with parts() as p:
            p.mirror.offer(call(), "1.0", "no reply", 0.1)  # type: ignore[arg-type]
            assert "could not be made" in caplog.text

    asyncio.run(main())


def test_figures_begin_anew_when_something_else_is_compared() -> None:
    async def main() -> None:
        async def other(call: InferenceRequest) -> InferenceResponse:
            return InferenceResponse(b"1.5")

        async with parts(other) as p:
            p.offer()
            await p.rest()
            p.table = table(replace(SHADOW, timeout_s=5))  # the same comparison goes on
            p.offer()
            await p.rest()
            p.table = table(replace(SHADOW, compare=ComparisonRule("allclose", atol=1)))
            p.offer()
            await p.rest()
            taken = {pair.shadow.compare.atol: figures.counts for pair, figures in p.mirror.drain() or ()}
            assert taken == {1e-6: {"disagreed": {"numbers": 2}}, 1: {"agreed": {"": 1}}}
            p.table = table(None)
            assert p.mirror.drain() is None
            assert not p.mirror._queues
            assert p.mirror._bytes == 0

    asyncio.run(main())


def test_what_waits_for_a_shadow_that_is_no_more_goes_with_it() -> None:
    async def main() -> None:
        free = asyncio.Event()

        async def hangs(call: InferenceRequest) -> InferenceResponse:
            await free.wait()
            return ONE

        async with parts(hangs) as p:
            for _ in range(20):
                p.offer()
            await p.sent(limits.MAX_IN_FLIGHT)
            p.table = table(None)
            p.mirror.drain()
            free.set()
            assert (await p.settle()).counts == {"agreed": {"": limits.MAX_IN_FLIGHT}}, (
                "those that were under way"
            )
            assert p.mirror._bytes == 0
            assert not p.mirror._retired

    asyncio.run(main())


def test_a_mirror_that_ends_drops_what_it_has() -> None:
    async def main() -> None:
        async def hangs(call: InferenceRequest) -> InferenceResponse:
            await asyncio.sleep(60)
            return InferenceResponse(b"1")

        async with parts(hangs) as p:
            for _ in range(20):
                p.offer()
            await p.sent(limits.MAX_IN_FLIGHT)
            await p.mirror.close()
            assert not p.mirror._tasks
            p.offer()
            assert not p.mirror._tasks
            assert len(p.calls) == limits.MAX_IN_FLIGHT

    asyncio.run(main())
