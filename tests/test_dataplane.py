"""One call in, one answer out: the version, the target, the waiting and the counting."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from serve_app import tensors
from serve_app.dataplane import DataPlane, TableReader
from serve_app.errors import (
    CannotMeetDeadline,
    ClientTimeout,
    DeadlineExceeded,
    HandlerFailed,
    InvalidInput,
    Loading,
    ModelNotFound,
    NoWorker,
    OutOfResources,
    QueueFull,
    QuotaExceeded,
    RelayError,
    VersionNotFound,
    WorkerDied,
)
from serve_app.policy import Key, Trial, allocate
from serve_app.signature import Port, Signature
from serve_app.telemetry.metrics import Meters
from serve_app.types import Call, Input, ModelRef, ModelRow, Reply, ReplyStream, Table, VersionRow


class Echo:
    """A target that says which version it is."""

    def __init__(self, name: str) -> None:
        self.name = name

    async def infer(self, call: Call) -> Reply | ReplyStream:
        return Reply(self.name.encode())


class Pieces:
    async def infer(self, call: Call) -> Reply | ReplyStream:
        async def bodies():
            for piece in (b"a", b"b", b"c"):
                yield piece

        return ReplyStream(Reply(b""), bodies())


def table(generation: int = 1, **phases: str) -> Table:
    versions = {v: VersionRow(v, p, replicas=int(p == "ready"), job_queue_size=2) for v, p in phases.items()}
    return Table(generation, {"m": ModelRow(next(iter(phases)), versions)}, settled=True)


def plane(reader: TableReader, meters: Meters | None = None, **more) -> DataPlane:
    return DataPlane(reader, meters or Meters(), remote=lambda ref, row: Echo(f"remote {ref.version}"), **more)


def test_the_default_version_answers_and_a_named_one_when_named() -> None:
    async def main() -> None:
        p = plane(TableReader(table(v1="ready", v2="ready")))
        assert (await p.infer(Call("m"))).body == b"remote v1"
        assert (await p.infer(Call("m", "v2"))).body == b"remote v2"
        with pytest.raises(ModelNotFound):
            await p.infer(Call("other"))
        with pytest.raises(VersionNotFound):
            await p.infer(Call("m", "v9"))

    asyncio.run(main())


def test_tensors_are_held_against_the_signature_of_the_version_that_answers() -> None:
    async def main() -> None:
        versions = {
            version: VersionRow(version, "ready", 1, signature=Signature((Port("x", "FP32", (width,)),)))
            for version, width in (("v1", 2), ("v2", 3))
        }
        meters = Meters()
        p = plane(TableReader(Table(1, {"m": ModelRow("v1", versions)})), meters)
        x = tensors.of("x", np.zeros(3, np.float32))
        inputs = (Input(x.name, bytes(x.data), x.content_type),)
        assert (await p.infer(Call("m", "v2", inputs, kind="tensors"))).body == b"remote v2"
        with pytest.raises(InvalidInput, match=r"x is FP32 \[3\], and is to be FP32 \[2\]") as refused:
            await p.infer(Call("m", None, inputs, kind="tensors"))
        assert refused.value.version == "v1"
        assert (await p.infer(Call("m", None, inputs))).body == b"remote v1"  # no tensors, whatever they look like
        counted = {labels: value for name, labels, value in meters.samples() if name == "torchrelay_requests_total"}
        assert counted[(("model", "m"), ("status", "invalid_input"), ("version", "v1"))] == 1

    asyncio.run(main())


def test_a_replica_answers_for_its_own_version_and_forwards_the_rest() -> None:
    async def main() -> None:
        reader = TableReader(table(v1="ready", v2="ready"))
        p = plane(reader, local=(ModelRef("m", "v1"), Echo("local v1")))
        assert (await p.infer(Call("m"))).body == b"local v1"
        reader.put(Table(2, {"m": replace(reader.table.models["m"], default="v2")}))
        assert (await p.infer(Call("m"))).body == b"remote v2", "the default moved: the table decides, not the route"
        assert (await p.infer(Call("m", "v1"))).body == b"local v1"

    asyncio.run(main())


def test_a_call_waits_for_a_version_that_loads() -> None:
    async def main() -> None:
        reader = TableReader(table(v1="loading"))
        p = plane(reader)
        waiting = asyncio.create_task(p.infer(Call("m")))
        await asyncio.sleep(0)
        reader.put(table(2, v1="ready"))
        assert (await waiting).body == b"remote v1"

    asyncio.run(main())


def test_waiting_is_bounded_in_time_in_number_and_by_failure() -> None:
    async def main() -> None:
        reader = TableReader(table(v1="loading"))
        with pytest.raises(Loading) as loading:
            await plane(reader, patience=0.02).infer(Call("m"))
        assert loading.value.retry_after == 1, "nobody has seen it start: the patience, rounded up"
        with pytest.raises(DeadlineExceeded):
            await plane(reader).infer(Call("m", deadline=time.time() + 0.02))
        p = plane(reader)
        waiting = [asyncio.create_task(p.infer(Call("m"))) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFull):
            await p.infer(Call("m"))
        failed = replace(table(v1="failed").models["m"].versions["v1"], last_error="no such weights")
        reader.put(Table(3, {"m": ModelRow("v1", {"v1": failed})}))
        for task in waiting:
            with pytest.raises(NoWorker) as caught:
                await task
            assert caught.value.detail == "no such weights"
        with pytest.raises(NoWorker):
            await plane(TableReader(table(v1="stopped"))).infer(Call("m"))

    asyncio.run(main())


def test_a_version_that_starts_says_how_long_that_took_the_last_time() -> None:
    async def main() -> None:
        row = replace(table(v1="loading").models["m"].versions["v1"], start_seconds=11.2, job_queue_size=1)
        reader = TableReader(Table(1, {"m": ModelRow("v1", {"v1": row})}))
        p = plane(reader, patience=0.5)
        waiting = asyncio.create_task(p.infer(Call("m")))
        await asyncio.sleep(0)
        with pytest.raises(QueueFull) as full:
            await p.infer(Call("m"))
        with pytest.raises(Loading) as loading:
            await waiting
        assert full.value.retry_after == loading.value.retry_after == 12

    asyncio.run(main())


def test_the_models_own_limit_keeps_what_the_batcher_measured() -> None:
    class Busy(Echo):
        async def infer(self, call: Call) -> Reply | ReplyStream:
            error = CannotMeetDeadline(call.model, 0.0, 7.5, 0.5)
            error.retry_after = 7
            raise error

    async def main() -> None:
        row = replace(table(v1="ready").models["m"].versions["v1"], client_timeout=500)
        p = DataPlane(TableReader(Table(1, {"m": ModelRow("v1", {"v1": row})})), Meters(), lambda ref, row: Busy("v1"))
        with pytest.raises(ClientTimeout) as caught:
            await p.infer(Call("m"))
        assert (caught.value.reason, caught.value.retry_after) == ("client_timeout", 7)

    asyncio.run(main())


def test_everybody_who_wants_to_hears_of_each_table() -> None:
    async def main() -> None:
        heard: list[int] = []
        reader = TableReader(on_table=lambda table: heard.append(table.generation))
        reader.put(table(1, v1="ready"))
        reader.put(table(2, v1="ready"))
        assert heard == [1, 2]

    asyncio.run(main())


def test_what_is_not_there_is_not_late() -> None:
    p = plane(TableReader(table(v1="ready")))
    for call, error in ((Call("nobody"), ModelNotFound), (Call("m", "9.9"), VersionNotFound)):
        with pytest.raises(error):
            asyncio.run(p.infer(replace(call, deadline=time.time() - 1)))


def test_a_deadline_that_passed_is_answered_at_once() -> None:
    async def main() -> None:
        with pytest.raises(DeadlineExceeded):
            await plane(TableReader(table(v1="ready"))).infer(Call("m", deadline=time.time() - 1))

    asyncio.run(main())


def test_every_call_is_counted_once_whatever_becomes_of_it() -> None:
    async def main() -> None:
        meters = Meters()
        reader = TableReader(table(v1="ready"))
        p = plane(reader, meters)
        await p.infer(Call("m"))
        with pytest.raises(ModelNotFound):
            await p.infer(Call("x" * 50))
        streaming = DataPlane(reader, meters, remote=lambda ref, row: Pieces())
        stream = await streaming.infer(Call("m"))
        assert [piece async for piece in stream] == [b"a", b"b", b"c"]
        left = await streaming.infer(Call("m"))
        await left.__aiter__().__anext__()
        await left.aclose()
        counts = {dict(labels)["status"]: v for n, labels, v in meters.samples() if n == "torchrelay_requests_total"}
        assert counts == {"ok": 2, "model_not_found": 1, "caller_left": 1}
        assert not any("x" * 50 in str(labels) for _, labels, _ in meters.samples())

    asyncio.run(main())


def test_a_stream_that_nobody_began_to_read_is_closed_and_counted() -> None:
    class Held(Pieces):
        closed = False

        async def infer(self, call: Call) -> ReplyStream:
            held = self

            class Bodies:
                def __aiter__(self):
                    return self

                async def __anext__(self):
                    return b"more"

                async def aclose(self):
                    held.closed = True

            return ReplyStream(Reply(b""), Bodies())

    async def main() -> None:
        meters, target = Meters(), Held()
        p = DataPlane(TableReader(table(v1="ready")), meters, remote=lambda ref, row: target)
        await (await p.infer(Call("m"))).aclose()
        assert target.closed
        assert ("torchrelay_requests_total", (("model", "m"), ("status", "caller_left"), ("version", "v1")), 1.0) in (
            meters.samples()
        )

    asyncio.run(main())


def test_a_model_may_bound_how_long_its_callers_wait() -> None:
    seen: list[float | None] = []

    class Note(Echo):
        async def infer(self, call: Call) -> Reply | ReplyStream:
            seen.append(call.deadline)
            return await super().infer(call)

    async def main() -> None:
        row = replace(table(v1="ready").models["m"].versions["v1"], client_timeout=50_000)
        reader = TableReader(Table(1, {"m": ModelRow("v1", {"v1": row})}))
        p = DataPlane(reader, Meters(), remote=lambda ref, row: Note("v1"))
        now = time.time()
        await p.infer(Call("m"))
        await p.infer(Call("m", deadline=now + 30))
        await p.infer(Call("m", deadline=now + 600))
        default, own, bounded = (d - now for d in seen if d)
        assert 50 <= default <= bounded < 90 and own == pytest.approx(30, abs=0.01)

    asyncio.run(main())


def test_health_follows_the_default_versions() -> None:
    rows = table(v1="ready", v2="failed").models["m"].versions
    sick = replace(rows["v2"], healthy=False)
    assert plane(TableReader(Table(1, {"m": ModelRow("v1", {"v1": rows["v1"], "v2": sick})}))).healthy
    assert not plane(TableReader(Table(1, {"m": ModelRow("v2", {"v1": rows["v1"], "v2": sick})}))).healthy
    assert not plane(TableReader()).ready
    assert plane(TableReader(table(v1="ready"))).ready


class TestTrials:
    """What the calls of a trial came to is told to the process's observations, and of other calls nothing is."""

    TRIAL = Trial("t", {"a": "v1", "b": "v2"}, allocate({"a": 5000, "b": 5000}), baseline="a", exposures=True)

    def plane(self, answer, trial: Trial = TRIAL) -> DataPlane:
        """``answer`` gives a call's reply, for each version; an error is raised."""

        class Answering:
            def __init__(self, version: str) -> None:
                self.version = version

            async def infer(self, call: Call) -> Reply | ReplyStream:
                reply = answer(self.version)
                if isinstance(reply, Exception):
                    raise reply
                return reply if isinstance(reply, (Reply, ReplyStream)) else await reply

        model = replace(table(v1="ready", v2="ready").models["m"], trial=trial)
        reader = TableReader(Table(1, {"m": model}))
        return DataPlane(reader, Meters(), remote=lambda ref, row: Answering(ref.version))

    def test_calls_count_for_the_arm_whose_version_answers(self) -> None:
        async def main() -> None:
            p = self.plane(lambda version: Reply(version.encode()))
            bodies = [(await p.infer(Call("m", request_id=f"r{n}"))).body for n in range(100)]
            seen = p.observations.take()
            for arm, version in self.TRIAL.arms.items():
                figures = seen.figures["t"][arm]
                assert figures.calls == bodies.count(version.encode()) >= 45
                assert sum(figures.latency.values()) == figures.calls
                assert figures.failures == 0
            given = {unit: (arm, bucket) for _, unit, arm, bucket in seen.exposures}
            assert [given[f"r{n}"][0] for n in range(100)] == [{b"v1": "a", b"v2": "b"}[body] for body in bodies]
            assert all(self.TRIAL.allocation.of(bucket) == arm for arm, bucket in given.values())

        asyncio.run(main())

    def test_a_key_decides_and_who_shows_none_or_names_a_version_does_not_count(self) -> None:
        async def main() -> None:
            p = self.plane(lambda version: Reply(version.encode()), replace(self.TRIAL, key=Key(header="x-user")))
            assert (await p.infer(Call("m"))).body == b"v1", "the baseline's"
            await p.infer(Call("m", "v2", headers={"x-user": "ann"}))
            assert p.observations.take() is None
            for _ in range(3):
                await p.infer(Call("m", headers={"x-user": "ann"}))
            seen = p.observations.take()
            assert [unit for _, unit, _, _ in seen.exposures] == ["ann"]
            assert [figures.calls for figures in seen.figures["t"].values()] == [3]

        asyncio.run(main())

    @pytest.mark.parametrize(
        ("answer", "reason"),
        [
            (QueueFull("m", None, ""), "queue_full"),
            (QuotaExceeded("m", "v1", 2), "quota"),
            (DeadlineExceeded("m", 1.0), "deadline"),
            (HandlerFailed("traceback"), "handler_failed"),
            (OutOfResources("traceback"), "out_of_memory"),
            (Reply(b"", status=507), "status_507"),
        ],
    )
    def test_failures_are_the_arms_with_their_reason(self, answer: RelayError | Reply, reason: str) -> None:
        async def main() -> None:
            p = self.plane(lambda version: answer, replace(self.TRIAL, allocation=allocate({"b": 10_000})))
            if isinstance(answer, Reply):
                assert (await p.infer(Call("m"))).status == answer.status
            else:
                with pytest.raises(type(answer)):
                    await p.infer(Call("m"))
            figures = p.observations.take().figures["t"]["b"]
            assert (figures.calls, figures.failed, figures.latency) == (1, {reason: 1}, {})

        asyncio.run(main())

    def test_a_version_that_was_never_ready_is_a_failure_too(self) -> None:
        async def main() -> None:
            p = self.plane(lambda version: Reply(b""))
            rows = table(v1="ready", v2="stopped").models["m"].versions
            trial = replace(self.TRIAL, allocation=allocate({"b": 10_000}))
            p._reader.put(Table(2, {"m": ModelRow("v1", rows, trial=trial)}))
            with pytest.raises(NoWorker):
                await p.infer(Call("m"))
            assert p.observations.take().figures["t"]["b"].failed == {"no_replica": 1}

        asyncio.run(main())

    def test_a_stream_counts_at_its_end_and_an_error_in_it_is_a_failure(self) -> None:
        async def pieces(error: Exception | None):
            yield b"a"
            if error is not None:
                raise error
            yield b"b"

        async def main() -> None:
            for error, failed in ((None, {}), (WorkerDied("killed"), {"worker_died": 1})):
                p = self.plane(lambda version: ReplyStream(Reply(b""), pieces(error)))  # noqa: B023
                stream = await p.infer(Call("m"))
                assert p.observations.take() is None, "it is not at its end"
                with pytest.raises(WorkerDied) if error else contextlib.nullcontext():
                    _ = [piece async for piece in stream]
                await stream.aclose()
                (figures,) = p.observations.take().figures["t"].values()
                assert (figures.calls, figures.failed) == (1, failed)
                assert p.observations.take() is None

        asyncio.run(main())

    def test_a_caller_that_left_counts_for_nobody(self) -> None:
        async def main() -> None:
            never = asyncio.get_running_loop().create_future()
            p = self.plane(lambda version: never)
            leaving = asyncio.create_task(p.infer(Call("m")))
            await asyncio.sleep(0)
            leaving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await leaving
            streaming = DataPlane(p._reader, Meters(), remote=lambda ref, row: Pieces())
            stream = await streaming.infer(Call("m"))
            await stream.__aiter__().__anext__()
            await stream.aclose()
            assert p.observations.take() is None
            assert streaming.observations.take() is None

        asyncio.run(main())


def sleeping(generation: int = 1, phase: str = "idle", replicas: int = 0, **more: Any) -> Table:
    row = VersionRow("v1", phase, replicas, job_queue_size=2, **{"wake_timeout": 5.0, **more})
    return Table(generation, {"m": ModelRow("v1", {"v1": row})}, settled=True)


def test_a_call_wakes_a_version_that_sleeps_and_waits_for_it() -> None:
    async def main() -> None:
        reader = TableReader(sleeping())
        woken: list[ModelRef] = []

        def wake(ref: ModelRef, row: VersionRow) -> None:
            woken.append(ref)
            if len(woken) == 1:
                raise Loading("m", "v1", "its application is not there yet")

        p = plane(reader, wake=wake, patience=0.01)
        calls = [asyncio.ensure_future(p.infer(Call("m"))) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFull):
            await p.infer(Call("m"))
        for generation, phase in ((2, "loading"), (3, "idle"), (4, "loading")):
            reader.put(sleeping(generation, phase))
            for _ in range(9):  # turns of the loop, in which those that wait look at it
                await asyncio.sleep(0)
        reader.put(sleeping(5, "ready", 1))
        assert [(await call).body for call in calls] == [b"remote v1"] * 2
        assert woken == [ModelRef("m", "v1")] * 4, "each that waits asks anew when it has gone to sleep again"

    asyncio.run(main())


def test_a_version_that_does_not_wake_up_in_time() -> None:
    async def main() -> None:
        p = plane(TableReader(sleeping(wake_timeout=0.02)))
        with pytest.raises(Loading):
            await p.infer(Call("m"))
        with pytest.raises(DeadlineExceeded):
            await p.infer(Call("m", deadline=time.time() + 0.005))
        p = plane(TableReader(sleeping(phase="failed", last_error="Traceback")))
        with pytest.raises(NoWorker):
            await p.infer(Call("m"))

    asyncio.run(main())
