"""Which requests the response cache answers, and which run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from serve_app.dataplane.data_plane import DataPlane, RoutingTableReader
from serve_app.dataplane.response_cache import HEADER, ResponseCache
from serve_app.domain import response_cache
from serve_app.domain.request import (
    Cancel,
    InferenceRequest,
    InferenceResponse,
    InputPart,
    OnDone,
    Outcome,
    ResponseStream,
)
from serve_app.domain.response_cache import CachePolicy
from serve_app.domain.routing_table import ModelRoute, RoutingTable, VersionRoute
from serve_app.domain.traffic_policy import ActiveSplit, BucketAllocation, ShadowPolicy, TrafficPolicy
from serve_app.errors import BadRequest, HandlerFailed
from serve_app.telemetry.metrics import Meters
from tests.support.coroutine_backend import CoroutineBackend


class Handler(CoroutineBackend):
    """A handler that numbers its responses; while ``gate`` is closed, it waits."""

    def __init__(self) -> None:
        self.runs = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.respond: Callable[[int], InferenceResponse | ResponseStream] = lambda n: InferenceResponse(
            b"%d" % n
        )

    async def infer(self, request: InferenceRequest) -> InferenceResponse | ResponseStream:
        self.runs += 1
        number = self.runs
        await self.gate.wait()
        return self.respond(number)


DEFAULT = CachePolicy()


class Plane:
    """A data plane with one version, ``m`` 1, and its handler. ``seconds`` is the cache's clock."""

    def __init__(self, cached: CachePolicy | None = DEFAULT, max_bytes: int = 1 << 20, **route: Any) -> None:
        self.handler, self.meters, self.seconds = Handler(), Meters(), 0.0
        self.route = VersionRoute("1", "ready", 1, response_cache=cached, **route)
        self.reader = RoutingTableReader()
        self.update()
        self.plane = DataPlane(self.reader, self.meters, lambda ref, route: self.handler)
        self.plane._response_cache = ResponseCache(self.meters, max_bytes, lambda: self.seconds)

    def update(self, model: ModelRoute | None = None, **changes: Any) -> None:
        self.route = replace(self.route, **changes)
        model = model or ModelRoute("1", {"1": self.route})
        self.reader.update(RoutingTable(self.reader.table.generation + 1, {"m": model}))

    async def ask(self, body: bytes = b"x", type: str | None = None, **options: Any) -> tuple[bytes, str]:
        """Return the body of a response, and its header of the cache."""
        request = InferenceRequest("m", inputs=(InputPart("body", body, type),), **options)
        response = await self.plane.infer(request)
        assert isinstance(response, InferenceResponse)
        return response.body, dict(response.headers).get(HEADER, "")

    def count(self, outcome: str) -> float:
        labels = (("model", "m"), ("outcome", outcome), ("version", "1"))
        return sum(
            value
            for name, found, value in self.meters.samples()
            if name == "torchrelay_cache_requests_total" and found == labels
        )

    @property
    def stored_bytes(self) -> float:
        return sum(v for name, _, v in self.meters.samples() if name == "torchrelay_cache_bytes")


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))  # type: ignore[arg-type]


def test_an_equal_request_gets_the_stored_response_until_it_expires() -> None:
    async def main() -> None:
        plane = Plane(CachePolicy(ttl_s=10))
        assert [await plane.ask() for _ in range(3)] == [(b"1", "miss"), (b"1", "hit"), (b"1", "hit")]
        assert (plane.count("hit"), plane.count("miss")) == (2, 1)
        plane.seconds = 10
        assert await plane.ask() == (b"2", "miss")
        assert plane.stored_bytes == 601

    run(main)


def test_whatever_a_handler_reads_is_part_of_the_key() -> None:
    async def main() -> None:
        plane = Plane(CachePolicy(vary=("X-Tenant",)))
        await plane.ask()
        for other in (
            plane.ask(b"y"),
            plane.ask(type="text/plain"),
            plane.ask(headers={"accept": "text/csv"}),
            plane.ask(headers={"x-tenant": "a"}),
            plane.ask(headers={"adapter": "french"}),
            plane.ask(kind="tensors"),
        ):
            assert (await other)[1] == "miss"
        assert await plane.ask(headers={"user-agent": "another", "x-request-id": "7"}) == (b"1", "hit")
        query = InferenceRequest("m", inputs=(InputPart("body", b"x"), InputPart("top_k", b"3")))
        split = InferenceRequest("m", inputs=(InputPart("body", b"xt"), InputPart("op_k", b"3")))
        for request in (query, split):
            response = await plane.plane.infer(request)
            assert isinstance(response, InferenceResponse) and response.headers == ((HEADER, "miss"),)

    run(main)


@pytest.mark.parametrize(
    ("control", "first", "second"),
    [
        ("no-store", "", "miss"),  # neither read nor stored
        ("no-cache", "miss", "hit"),  # stored, and not read
        ("max-age=0, foo", "miss", "hit"),
        ("max-age=60", "miss", "hit"),
    ],
)
def test_cache_control_of_the_request_is_honoured(control: str, first: str, second: str) -> None:
    async def main() -> None:
        plane = Plane()
        headers = {"cache-control": control}
        assert await plane.ask(headers=headers) == (b"1", first)
        assert (await plane.ask())[1] == second
        runs = plane.handler.runs
        await plane.ask(headers=headers)
        assert plane.handler.runs == runs + (control != "max-age=60")

    run(main)


def test_errors_streams_and_excluded_responses_are_not_stored() -> None:
    async def chunks() -> Any:
        yield b"a"

    async def main() -> None:
        plane = Plane()
        for respond in (
            lambda n: InferenceResponse(b"", status=404),
            lambda n: InferenceResponse(b"", headers=(("Set-Cookie", "a=b"),)),
            lambda n: InferenceResponse(b"", headers=(("Cache-Control", "private"),)),
            lambda n: InferenceResponse(b"", headers=(("Cache-Control", "no-cache"),)),
            lambda n: ResponseStream(InferenceResponse(b""), chunks()),
        ):
            plane.handler.respond = respond
            for _ in range(2):
                response = await plane.plane.infer(InferenceRequest("m"))
                if isinstance(response, ResponseStream):
                    assert [chunk async for chunk in response] == [b"a"]

        def fail(number: int) -> InferenceResponse:
            raise HandlerFailed("m", "1", "broken")

        plane.handler.respond = fail
        for _ in range(2):
            with pytest.raises(HandlerFailed):
                await plane.ask()
        assert plane.handler.runs == 12
        assert plane.stored_bytes == 0

    run(main)


def test_versions_and_requests_without_a_cache_have_no_header() -> None:
    async def main() -> None:
        for plane, options in (
            (Plane(None), {}),
            (Plane(stateful=True), {}),
            (Plane(), {"kind": "explain"}),
            (Plane(), {"kind": "describe"}),
        ):
            assert [await plane.ask(**options) for _ in range(2)] == [(b"1", ""), (b"2", "")]

    run(main)


def test_requests_that_are_measured_run() -> None:
    async def main() -> None:
        plane = Plane()
        versions = {"1": plane.route}
        split = ActiveSplit("e", {"a": "1"}, BucketAllocation((10_000,), ("a",)), "a")
        plane.update(ModelRoute("1", versions, active_split=split))
        assert [await plane.ask() for _ in range(2)] == [(b"1", ""), (b"2", "")]
        shadowed = TrafficPolicy(shadow=ShadowPolicy("2"))
        plane.update(ModelRoute("1", versions, policy=shadowed))
        assert [await plane.ask() for _ in range(2)] == [(b"3", ""), (b"4", "")]
        assert [await plane.ask(version="1") for _ in range(2)] == [(b"5", "miss"), (b"5", "hit")]

    run(main)


def test_the_least_recently_used_responses_make_room() -> None:
    async def main() -> None:
        plane = Plane(CachePolicy(max_bytes=1300))
        for body in (b"a", b"b", b"a", b"c"):
            await plane.ask(body)
        assert await plane.ask(b"a") == (b"1", "hit")
        assert (await plane.ask(b"b"))[1] == "miss"
        assert plane.stored_bytes == 1202
        plane.handler.respond = lambda n: InferenceResponse(bytes(2000))
        assert [(await plane.ask(b"large"))[1] for _ in range(2)] == ["miss", "miss"]
        assert plane.stored_bytes == 1202

    run(main)


def test_the_versions_of_a_process_share_its_limit() -> None:
    async def main() -> None:
        plane = Plane(max_bytes=1900)
        two = replace(plane.route, version="2")
        plane.update(ModelRoute("1", {"1": plane.route, "2": two}))
        for body in (b"a", b"b", b"c"):
            await plane.ask(body, version="1")
        await plane.ask(b"d", version="2")  # in the place of the oldest response of the larger store
        assert plane.stored_bytes == 3 * 601
        assert (await plane.ask(b"d", version="2"))[1] == "hit"
        assert (await plane.ask(b"b", version="1"))[1] == "hit"
        assert (await plane.ask(b"a", version="1"))[1] == "miss"
        nothing = Plane(max_bytes=0)
        assert [await nothing.ask() for _ in range(2)] == [(b"1", ""), (b"2", "")]

    run(main)


def test_responses_of_a_replaced_or_removed_version_are_dropped() -> None:
    async def main() -> None:
        plane = Plane(revision="a")
        await plane.ask()
        plane.update(replicas=2)
        assert await plane.ask() == (b"1", "hit")
        plane.update(revision="b")
        assert await plane.ask() == (b"2", "miss")
        other = VersionRoute("2", "ready", 1, response_cache=DEFAULT)
        plane.update(ModelRoute("2", {"2": other}))
        assert (await plane.ask())[1] == "miss"
        assert plane.stored_bytes == 601

    run(main)


def test_a_version_without_workers_answers_nothing_from_the_cache() -> None:
    async def main() -> None:
        plane = Plane()
        await plane.ask()
        plane.update(phase="stopped")
        assert (await plane.ask())[1] == ""

    run(main)


async def _start(plane: Plane, count: int, **options: Any) -> list[asyncio.Task[tuple[bytes, str]]]:
    """Start equal requests, and return when all of them wait."""
    plane.handler.gate.clear()
    tasks = [asyncio.ensure_future(plane.ask(**options)) for _ in range(count)]
    for _ in range(3):
        await asyncio.sleep(0)
    return tasks


def test_equal_requests_at_the_same_time_run_once() -> None:
    async def main() -> None:
        plane = Plane()
        tasks = await _start(plane, 3)
        assert plane.handler.runs == 1
        plane.handler.gate.set()
        assert await asyncio.gather(*tasks) == [(b"1", "miss"), (b"1", "hit"), (b"1", "hit")]

    run(main)


def test_a_failure_of_the_first_makes_each_of_the_others_run() -> None:
    async def main() -> None:
        plane = Plane()

        def respond(number: int) -> InferenceResponse:
            if number < 3:
                raise HandlerFailed("m", "1", f"run {number}")
            return InferenceResponse(b"%d" % number)

        plane.handler.respond = respond
        tasks = await _start(plane, 3)
        plane.handler.gate.set()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(outcome).__name__ for outcome in outcomes] == ["HandlerFailed", "HandlerFailed", "tuple"]

    run(main)


def test_a_fault_of_one_request_keeps_no_other_waiting() -> None:
    async def main() -> None:
        plane = Plane()

        def refuse(request: InferenceRequest, on_done: OnDone) -> Cancel:
            raise ConnectionResetError

        submit, plane.handler.submit = plane.handler.submit, refuse  # type: ignore[method-assign]
        with pytest.raises(ConnectionResetError):
            await plane.ask()
        plane.handler.submit = submit  # type: ignore[method-assign]
        assert await plane.ask() == (b"1", "miss")

        def disconnect(outcome: Outcome) -> None:
            raise ConnectionResetError

        request = InferenceRequest("m", inputs=(InputPart("body", b"y"),))
        plane.handler.gate.clear()
        plane.plane.submit(request, lambda outcome: None)
        plane.plane.submit(request, disconnect)
        last = asyncio.ensure_future(plane.ask(b"y"))
        await asyncio.sleep(0)
        plane.handler.gate.set()
        assert await last == (b"2", "hit")

    run(main)


def test_a_workflow_runs_a_version_that_was_removed_after_its_start() -> None:
    async def main() -> None:
        plane = Plane()
        before = plane.reader.table
        for models in ({}, {"m": ModelRoute("2", {"2": replace(plane.route, version="2")})}):
            plane.reader.update(RoutingTable(plane.reader.table.generation + 1, models))
            version = "1" if models else None
            response = await plane.plane.infer(InferenceRequest("m", version), workflow_table=before)
            assert isinstance(response, InferenceResponse) and response.headers == ()
        assert plane.stored_bytes == 0

    run(main)


def test_clients_that_leave_change_nothing_for_the_others() -> None:
    async def main() -> None:
        plane = Plane()
        first, second, third = await _start(plane, 3)
        second.cancel()  # it waited
        first.cancel()  # it ran
        await asyncio.wait({first, second})
        plane.handler.gate.set()
        assert await third == (b"2", "miss")
        assert await plane.ask() == (b"2", "hit")

    run(main)


def test_a_request_with_an_earlier_deadline_does_not_wait_for_another() -> None:
    async def main() -> None:
        plane = Plane()
        [patient] = await _start(plane, 1, deadline=time.time() + 1000)
        [urgent] = await _start(plane, 1, deadline=time.time() + 500)
        [high] = await _start(plane, 1, deadline=time.time() + 2000, priority="high")
        assert plane.handler.runs == 3
        [waiting] = await _start(plane, 1, deadline=time.time() + 2000)
        assert plane.handler.runs == 3
        plane.handler.gate.set()
        assert [(await each)[1] for each in (patient, urgent, high, waiting)] == ["miss"] * 3 + ["hit"]

    run(main)


def test_a_response_of_a_version_that_is_replaced_meanwhile_is_not_stored() -> None:
    async def main() -> None:
        plane = Plane(revision="a")
        [first] = await _start(plane, 1)
        plane.update(revision="b")
        [second] = await _start(plane, 1)
        plane.handler.gate.set()
        assert await first == (b"1", "miss")
        assert await second == (b"2", "miss")
        assert await plane.ask() == (b"2", "hit")
        assert plane.stored_bytes == 601

    run(main)


@pytest.mark.parametrize(
    ("document", "why"),
    [
        (True, "response_cache: it: Input should be a dictionary"),
        ({"max_bytes": 0}, "max_bytes: Input should be greater than or equal to 1"),
        ({"ttl_s": 0}, "ttl_s: Input should be greater than 0"),
        ({"ttl": 5}, "unknown key 'ttl'; did you mean 'ttl_s'"),
        ({"vary": "x"}, "vary: Input should be a valid tuple"),
    ],
)
def test_invalid_policies_are_refused(document: Any, why: str) -> None:
    with pytest.raises(BadRequest, match=why):
        response_cache.read(document)
