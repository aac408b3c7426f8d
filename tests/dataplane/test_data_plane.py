"""One call in, one answer out: the version, the target, the waiting and the counting."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from serve_app.dataplane.data_plane import DataPlane, DataPlaneLimits, RoutingTableReader
from serve_app.domain import tensors
from serve_app.domain.model import ModelRef
from serve_app.domain.request import InferenceRequest, InferenceResponse, InputPart, ResponseStream
from serve_app.domain.routing_table import ModelRoute, RoutingTable, VersionRoute
from serve_app.domain.signature import Signature, TensorSpec
from serve_app.errors import (
    CannotMeetDeadline,
    ClientTimeout,
    DeadlineExceeded,
    InvalidInput,
    ModelLoading,
    ModelNotFound,
    NoReplica,
    QueueFull,
    VersionNotFound,
)
from serve_app.telemetry.metrics import Meters
from tests.support.coroutine_backend import CoroutineBackend, Pieces, table


class Echo(CoroutineBackend):
    """A target that says which version it is."""

    def __init__(self, name: str) -> None:
        self.name = name

    async def infer(self, call: InferenceRequest) -> InferenceResponse | ResponseStream:
        return InferenceResponse(self.name.encode())


def plane(reader: RoutingTableReader, meters: Meters | None = None, **more) -> DataPlane:
    return DataPlane(
        reader, meters or Meters(), remote=lambda ref, row: Echo(f"remote {ref.version}"), **more
    )


def test_the_default_version_answers_and_a_named_one_when_named() -> None:
    async def main() -> None:
        p = plane(RoutingTableReader(table(v1="ready", v2="ready")))
        assert (await p.infer(InferenceRequest("m"))).body == b"remote v1"
        assert (await p.infer(InferenceRequest("m", "v2"))).body == b"remote v2"
        with pytest.raises(ModelNotFound):
            await p.infer(InferenceRequest("other"))
        with pytest.raises(VersionNotFound):
            await p.infer(InferenceRequest("m", "v9"))

    asyncio.run(main())


def test_tensors_are_held_against_the_signature_of_the_version_that_answers() -> None:
    async def main() -> None:
        versions = {
            version: VersionRoute(
                version, "ready", 1, signature=Signature((TensorSpec("x", "FP32", (width,)),))
            )
            for version, width in (("v1", 2), ("v2", 3))
        }
        meters = Meters()
        p = plane(RoutingTableReader(RoutingTable(1, {"m": ModelRoute("v1", versions)})), meters)
        x = tensors.from_array("x", np.zeros(3, np.float32))
        inputs = (InputPart(x.name, bytes(x.data), x.content_type),)
        assert (await p.infer(InferenceRequest("m", "v2", inputs, kind="tensors"))).body == b"remote v2"
        with pytest.raises(InvalidInput, match=r"x is FP32 \[3\], and is to be FP32 \[2\]") as refused:
            await p.infer(InferenceRequest("m", None, inputs, kind="tensors"))
        assert refused.value.selected_version == "v1"
        assert (
            await p.infer(InferenceRequest("m", None, inputs))
        ).body == b"remote v1"  # no tensors, whatever they look like
        counted = {
            labels: value for name, labels, value in meters.samples() if name == "torchrelay_requests_total"
        }
        assert counted[(("model", "m"), ("status", "invalid_input"), ("version", "v1"))] == 1

    asyncio.run(main())


def test_a_replica_answers_for_its_own_version_and_forwards_the_rest() -> None:
    async def main() -> None:
        reader = RoutingTableReader(table(v1="ready", v2="ready"))
        p = plane(reader, local={("m", "v1"): Echo("local v1")})
        assert (await p.infer(InferenceRequest("m"))).body == b"local v1"
        reader.update(RoutingTable(2, {"m": replace(reader.table.models["m"], default="v2")}))
        assert (await p.infer(InferenceRequest("m"))).body == b"remote v2", (
            "the default moved: the table decides, not the route"
        )
        assert (await p.infer(InferenceRequest("m", "v1"))).body == b"local v1"

    asyncio.run(main())


def test_a_replica_that_drains_refuses_requests_once_its_version_is_scaled_to_zero() -> None:
    async def main() -> None:
        reader = RoutingTableReader(table(v1="ready"))
        p = plane(reader, local={("m", "v1"): Echo("local v1")})
        assert (await p.infer(InferenceRequest("m"))).body == b"local v1"
        reader.update(table(2, v1="stopped"))
        for version in (None, "v1"):
            with pytest.raises(NoReplica):
                await p.infer(InferenceRequest("m", version))

    asyncio.run(main())


def test_a_call_waits_for_a_version_that_loads() -> None:
    async def main() -> None:
        reader = RoutingTableReader(table(v1="loading"))
        p = plane(reader)
        waiting = asyncio.create_task(p.infer(InferenceRequest("m")))
        await asyncio.sleep(0)
        reader.update(table(2, v1="ready"))
        assert (await waiting).body == b"remote v1"

    asyncio.run(main())


def test_waiting_is_bounded_in_time_in_number_and_by_failure() -> None:
    async def main() -> None:
        reader = RoutingTableReader(table(v1="loading"))
        with pytest.raises(ModelLoading) as loading:
            await plane(reader, limits=DataPlaneLimits(loading_timeout=0.02)).infer(InferenceRequest("m"))
        assert loading.value.retry_after == 1, "nobody has seen it start: the patience, rounded up"
        with pytest.raises(DeadlineExceeded):
            await plane(reader).infer(InferenceRequest("m", deadline=time.time() + 0.02))
        p = plane(reader)
        waiting = [asyncio.create_task(p.infer(InferenceRequest("m"))) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFull):
            await p.infer(InferenceRequest("m"))
        failed = replace(table(v1="failed").models["m"].versions["v1"], last_error="no such weights")
        reader.update(RoutingTable(3, {"m": ModelRoute("v1", {"v1": failed})}))
        for task in waiting:
            with pytest.raises(NoReplica) as caught:
                await task
            assert caught.value.detail == "no such weights"
        with pytest.raises(NoReplica):
            await plane(RoutingTableReader(table(v1="stopped"))).infer(InferenceRequest("m"))

    asyncio.run(main())


def test_a_clock_that_is_set_back_holds_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        reader = RoutingTableReader(table(v1="loading"))
        p = plane(reader, limits=DataPlaneLimits(loading_timeout=0.05))
        waiting = asyncio.create_task(p.infer(InferenceRequest("m")))
        await asyncio.sleep(0)
        now = time.time
        monkeypatch.setattr(time, "time", lambda: now() - 3600)
        reader.update(table(2, v1="loading"))
        with pytest.raises(ModelLoading):
            await asyncio.wait_for(waiting, 30)

    asyncio.run(main())


def test_a_version_that_starts_says_how_long_that_took_the_last_time() -> None:
    async def main() -> None:
        row = replace(table(v1="loading").models["m"].versions["v1"], start_seconds=11.2, job_queue_size=1)
        reader = RoutingTableReader(RoutingTable(1, {"m": ModelRoute("v1", {"v1": row})}))
        p = plane(reader, limits=DataPlaneLimits(loading_timeout=0.5))
        waiting = asyncio.create_task(p.infer(InferenceRequest("m")))
        await asyncio.sleep(0)
        with pytest.raises(QueueFull) as full:
            await p.infer(InferenceRequest("m"))
        with pytest.raises(ModelLoading) as loading:
            await waiting
        assert full.value.retry_after == loading.value.retry_after == 12

    asyncio.run(main())


def test_the_models_own_limit_keeps_what_the_batcher_measured() -> None:
    class Busy(Echo):
        async def infer(self, call: InferenceRequest) -> InferenceResponse | ResponseStream:
            error = CannotMeetDeadline(call.model, 0.0, 7.5, 0.5)
            error.retry_after = 7
            raise error

    async def main() -> None:
        row = replace(table(v1="ready").models["m"].versions["v1"], client_timeout=500)
        p = DataPlane(
            RoutingTableReader(RoutingTable(1, {"m": ModelRoute("v1", {"v1": row})})),
            Meters(),
            lambda ref, row: Busy("v1"),
        )
        with pytest.raises(ClientTimeout) as caught:
            await p.infer(InferenceRequest("m"))
        assert (caught.value.reason, caught.value.retry_after) == ("client_timeout", 7)

    asyncio.run(main())


def test_everybody_who_wants_to_hears_of_each_table() -> None:
    async def main() -> None:
        received: list[int] = []
        reader = RoutingTableReader(on_table=lambda table: received.append(table.generation))
        reader.update(table(1, v1="ready"))
        reader.update(table(2, v1="ready"))
        assert received == [1, 2]

    asyncio.run(main())


def test_what_is_not_there_is_not_late() -> None:
    p = plane(RoutingTableReader(table(v1="ready")))
    for call, error in (
        (InferenceRequest("nobody"), ModelNotFound),
        (InferenceRequest("m", "9.9"), VersionNotFound),
    ):
        with pytest.raises(error):
            asyncio.run(p.infer(replace(call, deadline=time.time() - 1)))


def test_a_deadline_that_passed_is_answered_at_once() -> None:
    async def main() -> None:
        with pytest.raises(DeadlineExceeded):
            await plane(RoutingTableReader(table(v1="ready"))).infer(
                InferenceRequest("m", deadline=time.time() - 1)
            )

    asyncio.run(main())


def test_every_call_is_counted_once_whatever_becomes_of_it() -> None:
    async def main() -> None:
        meters = Meters()
        reader = RoutingTableReader(table(v1="ready"))
        p = plane(reader, meters)
        await p.infer(InferenceRequest("m"))
        with pytest.raises(ModelNotFound):
            await p.infer(InferenceRequest("x" * 50))
        streaming = DataPlane(reader, meters, remote=lambda ref, row: Pieces())
        stream = await streaming.infer(InferenceRequest("m"))
        assert [piece async for piece in stream] == [b"a", b"b", b"c"]
        left = await streaming.infer(InferenceRequest("m"))
        await left.__aiter__().__anext__()
        await left.aclose()
        counts = {
            dict(labels)["status"]: v for n, labels, v in meters.samples() if n == "torchrelay_requests_total"
        }
        assert counts == {"ok": 2, "model_not_found": 1, "caller_left": 1}
        assert not any("x" * 50 in str(labels) for _, labels, _ in meters.samples())

    asyncio.run(main())


def test_a_stream_that_nobody_began_to_read_is_closed_and_counted() -> None:
    class Held(Pieces):
        closed = False

        async def infer(self, call: InferenceRequest) -> ResponseStream:
            held = self

            class Bodies:
                def __aiter__(self):
                    return self

                async def __anext__(self):
                    return b"more"

                async def aclose(self):
                    held.closed = True

            return ResponseStream(InferenceResponse(b""), Bodies())

    async def main() -> None:
        meters, target = Meters(), Held()
        p = DataPlane(RoutingTableReader(table(v1="ready")), meters, remote=lambda ref, row: target)
        await (await p.infer(InferenceRequest("m"))).aclose()
        assert target.closed
        assert (
            "torchrelay_requests_total",
            (("model", "m"), ("status", "caller_left"), ("version", "v1")),
            1.0,
        ) in (meters.samples())

    asyncio.run(main())


def test_a_model_may_bound_how_long_its_callers_wait() -> None:
    seen: list[float | None] = []

    class Note(Echo):
        async def infer(self, call: InferenceRequest) -> InferenceResponse | ResponseStream:
            seen.append(call.deadline)
            return await super().infer(call)

    async def main() -> None:
        row = replace(table(v1="ready").models["m"].versions["v1"], client_timeout=50_000)
        reader = RoutingTableReader(RoutingTable(1, {"m": ModelRoute("v1", {"v1": row})}))
        p = DataPlane(reader, Meters(), remote=lambda ref, row: Note("v1"))
        now = time.time()
        await p.infer(InferenceRequest("m"))
        await p.infer(InferenceRequest("m", deadline=now + 30))
        await p.infer(InferenceRequest("m", deadline=now + 600))
        default, own, bounded = (d - now for d in seen if d)
        assert 50 <= default <= bounded < 90 and own == pytest.approx(30, abs=0.01)

    asyncio.run(main())


def test_health_follows_the_default_versions() -> None:
    rows = table(v1="ready", v2="failed").models["m"].versions
    sick = replace(rows["v2"], healthy=False)
    assert plane(
        RoutingTableReader(RoutingTable(1, {"m": ModelRoute("v1", {"v1": rows["v1"], "v2": sick})}))
    ).healthy
    assert not plane(
        RoutingTableReader(RoutingTable(1, {"m": ModelRoute("v2", {"v1": rows["v1"], "v2": sick})}))
    ).healthy
    assert not plane(RoutingTableReader()).ready
    assert plane(RoutingTableReader(table(v1="ready"))).ready


def sleeping(generation: int = 1, phase: str = "idle", replicas: int = 0, **more: Any) -> RoutingTable:
    row = VersionRoute("v1", phase, replicas, job_queue_size=2, **{"wake_timeout": 60.0, **more})
    return RoutingTable(generation, {"m": ModelRoute("v1", {"v1": row})}, startup_complete=True)


def test_a_call_wakes_a_version_that_sleeps_and_waits_for_it() -> None:
    async def main() -> None:
        reader = RoutingTableReader(sleeping())
        woken: list[ModelRef] = []

        def wake(ref: ModelRef, row: VersionRoute) -> None:
            woken.append(ref)
            if len(woken) == 1:
                raise ModelLoading("m", "v1", "its application is not there yet")

        p = plane(reader, wake=wake, limits=DataPlaneLimits(loading_timeout=0.01))
        calls = [asyncio.ensure_future(p.infer(InferenceRequest("m"))) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFull):
            await p.infer(InferenceRequest("m"))
        for generation, phase in ((2, "loading"), (3, "idle"), (4, "loading")):
            reader.update(sleeping(generation, phase))
            for _ in range(9):  # turns of the loop, in which those that wait look at it
                await asyncio.sleep(0)
        reader.update(sleeping(5, "ready", 1))
        assert [(await call).body for call in calls] == [b"remote v1"] * 2
        assert woken == [ModelRef("m", "v1")] * 4, "each that waits asks anew when it has gone to sleep again"

    asyncio.run(main())


def test_a_version_that_does_not_wake_up_in_time() -> None:
    async def main() -> None:
        p = plane(RoutingTableReader(sleeping(wake_timeout=0.02)))
        with pytest.raises(ModelLoading):
            await p.infer(InferenceRequest("m"))
        with pytest.raises(DeadlineExceeded):
            await p.infer(InferenceRequest("m", deadline=time.time() + 0.005))
        p = plane(RoutingTableReader(sleeping(phase="failed", last_error="Traceback")))
        with pytest.raises(NoReplica):
            await p.infer(InferenceRequest("m"))

    asyncio.run(main())
