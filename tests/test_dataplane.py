"""One call in, one answer out: the version, the target, the waiting and the counting."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest

from serve_app.dataplane import DataPlane, TableReader
from serve_app.errors import DeadlineExceeded, Loading, ModelNotFound, NoWorker, QueueFull, VersionNotFound
from serve_app.telemetry.metrics import Meters
from serve_app.types import Call, ModelRef, ModelRow, Reply, ReplyStream, Table, VersionRow


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
        with pytest.raises(Loading):
            await plane(reader, patience=0.02).infer(Call("m"))
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
        row = replace(table(v1="ready").models["m"].versions["v1"], client_timeout=500)
        reader = TableReader(Table(1, {"m": ModelRow("v1", {"v1": row})}))
        p = DataPlane(reader, Meters(), remote=lambda ref, row: Note("v1"))
        now = time.time()
        await p.infer(Call("m"))
        await p.infer(Call("m", deadline=now + 0.1))
        await p.infer(Call("m", deadline=now + 60))
        assert [round(d - now, 1) for d in seen if d] == [0.5, 0.1, 0.5]

    asyncio.run(main())


def test_health_follows_the_default_versions() -> None:
    rows = table(v1="ready", v2="failed").models["m"].versions
    sick = replace(rows["v2"], healthy=False)
    assert plane(TableReader(Table(1, {"m": ModelRow("v1", {"v1": rows["v1"], "v2": sick})}))).healthy
    assert not plane(TableReader(Table(1, {"m": ModelRow("v2", {"v1": rows["v1"], "v2": sick})}))).healthy
    assert not plane(TableReader()).ready
    assert plane(TableReader(table(v1="ready"))).ready
