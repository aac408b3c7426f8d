"""Limits of keys: what one process admits, and the shares of several processes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from serve_app.control.key_shares import KeyShares
from serve_app.dataplane.access_limits import SHARE_PERIOD_S, KeyLimiter, count_tokens
from serve_app.dataplane.data_plane import DataPlane, RoutingTableReader
from serve_app.domain.access import ROLES, KeyDemand, KeyGrant, KeyLimits
from serve_app.domain.request import InferenceRequest, InferenceResponse, InputPart, ResponseStream
from serve_app.domain.routing_table import ModelRoute, RoutingTable, VersionRoute
from serve_app.errors import RateLimited
from serve_app.telemetry.metrics import Meters
from tests.support.coroutine_backend import CoroutineBackend

NOON = 20_000 * 86_400.0 + 43_200


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def wall(self) -> float:
        return NOON + self.now


def table(replicas: int = 0) -> RoutingTable:
    return RoutingTable(1, {"m": ModelRoute("1.0", {"1.0": VersionRoute("1.0", "ready", replicas)})})


def limiter(clock: Clock, replicas: int = 0) -> KeyLimiter:
    return KeyLimiter(lambda: table(replicas), 1, clock, clock.wall)


def key(name: str = "a", **limits: float) -> KeyGrant:
    return KeyGrant(ROLES["infer"], name=name, limits=KeyLimits(**limits).with_default(KeyLimits()))


def admitted(limiter: KeyLimiter, grant: KeyGrant, count: int, rows: int = 1) -> int:
    total = 0
    for _ in range(count):
        try:
            admission = limiter.admit(grant, rows)
        except RateLimited:
            continue
        total += 1
        if admission is not None:
            admission.release()
    return total


def test_rate_and_burst() -> None:
    clock = Clock()
    local = limiter(clock)
    grant = key(requests_per_second=10, burst=20)
    assert admitted(local, grant, 100) == 20
    clock.now = 1.0
    assert admitted(local, grant, 100) == 10
    with pytest.raises(RateLimited) as caught:
        local.admit(grant)
    error = caught.value
    assert (error.reason, error.retry_after) == ("rate_limited", 1)
    assert str(error) == "The key 'a' has reached its limit requests_per_second (10)."


def test_rows_are_charged_even_beyond_the_burst() -> None:
    clock = Clock()
    local = limiter(clock)
    grant = key(rows_per_second=100)
    assert admitted(local, grant, 5, rows=300) == 1
    clock.now = 1.9
    assert admitted(local, grant, 5) == 0
    clock.now = 3.1
    assert admitted(local, grant, 1, rows=100) == 1


def test_concurrency_is_returned_at_the_end() -> None:
    local = limiter(Clock())
    grant = key(concurrency=2)
    running = [local.admit(grant) for _ in range(2)]
    with pytest.raises(RateLimited, match="concurrency"):
        local.admit(grant)
    assert running[0] is not None
    running[0].release()
    assert local.admit(grant) is not None


def test_tokens_of_a_minute() -> None:
    clock = Clock()
    local = limiter(clock)
    grant = key(tokens_per_minute=60)
    admission = local.admit(grant)
    assert admission is not None
    admission.add_tokens(90)
    with pytest.raises(RateLimited, match="tokens_per_minute") as caught:
        local.admit(grant)
    assert caught.value.retry_after == 31
    clock.now = 31.1
    local.admit(grant)


def test_a_day_ends_at_midnight() -> None:
    clock = Clock()
    local = limiter(clock)
    grant = key(requests_per_day=3)
    assert admitted(local, grant, 5) == 3
    with pytest.raises(RateLimited) as caught:
        local.admit(grant)
    assert caught.value.retry_after == 43_200
    clock.now = 43_201
    assert admitted(local, grant, 5) == 3


def test_many_keys_end_no_limit_of_another() -> None:
    clock, meters = Clock(), Meters()
    local = limiter(clock)
    running, daily = key("running", concurrency=1), key("daily", requests_per_day=2)
    spender = key("spender", tokens_per_minute=1)
    admission = local.admit(running)
    assert admission is not None and admitted(local, daily, 3) == 2
    spent = local.admit(spender)
    assert spent is not None
    spent.add_tokens(100)
    spent.release()
    for wave in range(3):
        for number in range(10_000):
            assert admitted(local, key(f"jwt:{wave}-{number}", requests_per_second=1), 1) == 1
        local.report(meters)
        clock.now += 10
    assert len(local._states) < 10_010  # with those in use
    for grant, limit in ((running, "concurrency"), (daily, "requests_per_day"), (spender, "tokens_per")):
        with pytest.raises(RateLimited, match=limit):
            local.admit(grant)
    admission.release()
    assert local.admit(running) is not None
    clock.now = 43_201
    local.report(meters)
    assert admitted(local, daily, 3) == 2


def test_idle_keys_are_dropped_whatever_their_limits() -> None:
    clock, meters = Clock(), Meters()
    local = limiter(clock)
    grants = [key("rate", requests_per_second=5), key("daily", requests_per_day=2)]
    for grant in grants:
        assert admitted(local, grant, 1) == 1
    local.report(meters)
    clock.now = 601
    local.report(meters)
    assert not local._states
    assert [admitted(local, grant, 3) for grant in grants] == [3, 1]


def test_management_drops_what_no_process_uses() -> None:
    clock = Clock()
    shares = KeyShares(clock)
    shares.exchange("first", {f"jwt:{number}": KeyDemand(1.0, 5, 1) for number in range(10)})
    clock.now = 61
    shares.exchange("first", {"a": KeyDemand(1.0, 7, 1)})
    clock.now = 122
    shares.exchange("first", {"a": KeyDemand(1.0, 7, 2)})
    assert set(shares._leases) == set(shares._days) == {"a"}


def test_a_key_without_limits_is_counted_and_never_refused() -> None:
    meters, local = Meters(), limiter(Clock())
    assert all(local.admit(key(), 2) is None for _ in range(1000))
    with pytest.raises(RateLimited):
        for _ in range(2):
            local.admit(key("b", concurrency=1))
    local.report(meters)
    samples = {(name, dict(labels).get("key")): value for name, labels, value in meters.samples()}
    assert samples["torchrelay_key_requests_total", "a"] == 1000
    assert samples["torchrelay_key_rows_total", "a"] == 2000
    assert samples["torchrelay_key_refused_total", "b"] == 1


def test_subjects_of_tokens_have_a_bounded_number_of_labels() -> None:
    meters, local = Meters(), limiter(Clock())
    for number in range(1000):
        local.admit(key(f"jwt:{number}"))
    local.report(meters)
    labels = {
        dict(labels)["key"] for name, labels, _ in meters.samples() if name == "torchrelay_key_rows_total"
    }
    assert len(labels) == 201 and "jwt:other" in labels


def simulate(weights: list[float], rate: float, seconds: float, limit: float) -> list[int]:
    """Return what several processes admit in each second of an open-loop load with Poisson arrivals."""
    clock, shares, rng = Clock(), KeyShares(), random.Random(1)
    shares._clock = clock
    points = [limiter(clock, len(weights) - 1) for _ in weights]
    grant = key(requests_per_second=limit)
    counts = [0] * int(seconds)
    due = [rng.random() * SHARE_PERIOD_S for _ in points]
    while clock.now < seconds - 0.1:
        clock.now += min(0.1, rng.expovariate(rate))
        for index, point in enumerate(points):
            if clock.now >= due[index] or point.demand.is_set():
                point.demand.clear()
                due[index] = clock.now + SHARE_PERIOD_S
                if demands := point.collect_demand():
                    point.apply_shares(shares.exchange(str(index), demands))
        [point] = rng.choices(points, weights)
        counts[int(clock.now)] += admitted(point, grant, 1)
    return counts


@pytest.mark.parametrize("weights", [[1, 0, 0], [1, 1, 1], [8, 1, 1], [1] * 12])
def test_several_processes_admit_the_limit_together(weights: list[float]) -> None:
    counts = simulate(weights, 500, 12, 50)
    assert sum(counts[:2]) <= 50 * 2 + 50 + 25  # the rate, a burst, and an equal share for half a second
    assert all(40 <= count <= 60 for count in counts[2:])
    assert 0.9 * 500 <= sum(counts[2:]) <= 1.02 * 500


def test_a_load_below_the_limit_is_not_refused() -> None:
    counts = simulate([1, 1, 1], 30, 12, 50)
    assert sum(counts) >= 0.99 * 30 * 12 * 0.9


def test_without_management_the_processes_have_equal_shares() -> None:
    clock = Clock()
    points = [limiter(clock, 3) for _ in range(4)]
    grant = key(requests_per_second=40)
    assert sum(admitted(point, grant, 100) for point in points) == 40
    clock.now = 10
    assert sum(admitted(point, grant, 100) for point in points) == 40


def test_shares_never_sum_to_more_than_one() -> None:
    clock, rng = Clock(), random.Random(2)
    shares = KeyShares(clock)
    held: dict[str, float] = {}
    for _ in range(2000):
        clock.now += 0.01
        source = str(rng.randrange(6))
        rate = rng.choice([0.0, 1.0, 100.0])
        held[source] = shares.exchange(source, {"a": KeyDemand(rate, -1, 0)})["a"].share
        assert sum(held.values()) <= 1 + 1e-9


def test_a_process_that_ends_keeps_its_requests_of_the_day() -> None:
    shares = KeyShares()
    shares.exchange("first", {"a": KeyDemand(1.0, 5, 70)})
    assert shares.exchange("second", {"a": KeyDemand(1.0, 5, 20)})["a"].day_requests == 90
    assert shares.exchange("second", {"a": KeyDemand(1.0, 5, 30)})["a"].day_requests == 100
    assert shares.exchange("second", {"a": KeyDemand(1.0, 6, 1)})["a"].day_requests == 1


# In the data plane


def plane(infer: Any) -> DataPlane:
    class Backend(CoroutineBackend):
        async def infer(self, request: InferenceRequest) -> Any:
            return await infer(request)

    return DataPlane(RoutingTableReader(table()), Meters(), lambda ref, row: Backend())


def test_a_stream_holds_its_place_and_is_charged_at_its_end() -> None:
    async def stream(request: InferenceRequest) -> ResponseStream:
        async def chunks() -> AsyncIterator[bytes]:
            for word in ("a", "b"):
                yield f"data: {word}\n\n".encode()
            yield b'data: {"usage": {"total_tokens": 600}}\n\n'

        return ResponseStream(InferenceResponse(b"", version="1.0"), chunks())

    async def run() -> None:
        served = plane(stream)
        grant = key(concurrency=1, tokens_per_minute=100)
        request = InferenceRequest("m", inputs=(InputPart("body", b"x" * 400),))
        first = await served.infer(request, grant)
        assert isinstance(first, ResponseStream)
        with pytest.raises(RateLimited, match="concurrency"):
            await served.infer(request, grant)
        assert len([chunk async for chunk in first]) == 3
        with pytest.raises(RateLimited, match="tokens_per_minute"):
            await served.infer(request, grant)
        await served.infer(request, replace(grant, name="b"))  # another key

    asyncio.run(run())


def test_a_failure_returns_the_place() -> None:
    async def fail(request: InferenceRequest) -> InferenceResponse:
        raise ValueError

    async def run() -> None:
        served = plane(fail)
        for _ in range(3):
            with pytest.raises(ValueError):
                await served.infer(InferenceRequest("m"), key(concurrency=1))

    asyncio.run(run())


def test_rows_of_a_tensor_are_its_first_dimension() -> None:
    async def answer(request: InferenceRequest) -> InferenceResponse:
        return InferenceResponse(b"", version="1.0")

    async def run() -> None:
        served = plane(answer)
        part = InputPart("a", b"", "application/x-tensor;FP32;4,3")
        request = InferenceRequest("m", inputs=(part,), kind="tensors")
        grant = key(rows_per_second=8)
        for _ in range(2):
            await served.infer(request, grant)
        with pytest.raises(RateLimited, match="rows_per_second"):
            await served.infer(request, grant)

    asyncio.run(run())


def test_total_tokens_of_a_body() -> None:
    assert count_tokens(b'{"usage": {"prompt_tokens": 3, "total_tokens" : 12}}') == 12
    assert count_tokens(b'{"total_tokens": "many"}') == count_tokens(b"x") == 0


@pytest.mark.parametrize(
    ("limits", "own", "wider"),
    [
        ({"requests_per_second": 5}, {"requests_per_second": 10}, False),
        ({"requests_per_second": 20}, {"requests_per_second": 10}, True),
        ({}, {"requests_per_second": 10}, True),
        ({"concurrency": 1}, {}, False),
        ({"requests_per_second": 10, "burst": 50}, {"requests_per_second": 10}, True),
        ({"requests_per_second": 0}, {"requests_per_second": 10}, True),
    ],
)
def test_limits_that_are_wider(limits: dict[str, float], own: dict[str, float], wider: bool) -> None:
    assert KeyLimits(**limits).exceeds(KeyLimits(**own).with_default(KeyLimits())) is wider


def test_a_backend_that_cannot_be_found_returns_the_place() -> None:
    def fail(ref: Any, route: Any) -> Any:
        raise ValueError("a fault of this server")

    async def run() -> None:
        served = DataPlane(RoutingTableReader(table()), Meters(), fail)
        for _ in range(3):
            with pytest.raises(ValueError, match="a fault of this server"):
                await served.infer(InferenceRequest("m"), key(concurrency=1))

    asyncio.run(run())
