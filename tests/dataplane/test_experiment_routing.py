"""Requests of experiments and rollouts in the data plane."""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import replace

import pytest

from serve_app.dataplane.data_plane import DataPlane, RoutingTableReader
from serve_app.domain.experiment import Reward
from serve_app.domain.request import InferenceRequest, InferenceResponse, InputPart, ResponseStream
from serve_app.domain.routing_table import ModelRoute, RoutingTable
from serve_app.domain.traffic_policy import ActiveSplit, StickyKey, allocate
from serve_app.errors import (
    DeadlineExceeded,
    HandlerFailed,
    HandlerOutOfMemory,
    NoReplica,
    QueueFull,
    QuotaExceeded,
    RelayError,
    ReplicaDied,
)
from serve_app.telemetry.metrics import Meters
from tests.support.coroutine_backend import CoroutineBackend, Pieces, table


class TestTrials:
    """The outcomes of a trial's requests reach the process's experiment collector; others do not
    is.
    """

    TRIAL = ActiveSplit(
        "t", {"a": "v1", "b": "v2"}, allocate({"a": 5000, "b": 5000}), baseline="a", exposures=True
    )

    def plane(self, answer, trial: ActiveSplit = TRIAL) -> DataPlane:
        """``answer`` gives a call's reply, for each version; an error is raised."""

        class Answering(CoroutineBackend):
            def __init__(self, version: str) -> None:
                self.version = version

            async def infer(self, call: InferenceRequest) -> InferenceResponse | ResponseStream:
                reply = answer(self.version)
                if isinstance(reply, Exception):
                    raise reply
                return reply if isinstance(reply, (InferenceResponse, ResponseStream)) else await reply

        model = replace(table(v1="ready", v2="ready").models["m"], active_split=trial)
        reader = RoutingTableReader(RoutingTable(1, {"m": model}))
        return DataPlane(reader, Meters(), remote=lambda ref, row: Answering(ref.version))

    def test_calls_count_for_the_arm_whose_version_answers(self) -> None:
        async def main() -> None:
            p = self.plane(lambda version: InferenceResponse(version.encode()))
            bodies = [(await p.infer(InferenceRequest("m", request_id=f"r{n}"))).body for n in range(100)]
            seen = p.experiment_collector.drain()
            for arm, version in self.TRIAL.arms.items():
                figures = seen.figures["t"][arm]
                assert figures.calls == bodies.count(version.encode()) >= 45
                assert sum(figures.latency.values()) == figures.calls
                assert figures.failures == 0
            given = {unit: (arm, bucket) for _, unit, arm, bucket in seen.exposures}
            assert [given[f"r{n}"][0] for n in range(100)] == [
                {b"v1": "a", b"v2": "b"}[body] for body in bodies
            ]
            assert all(self.TRIAL.allocation.owner_of(bucket) == arm for arm, bucket in given.values())

        asyncio.run(main())

    def test_a_key_decides_and_who_shows_none_or_names_a_version_does_not_count(self) -> None:
        async def main() -> None:
            p = self.plane(
                lambda version: InferenceResponse(version.encode()),
                replace(self.TRIAL, key=StickyKey(header="x-user")),
            )
            assert (await p.infer(InferenceRequest("m"))).body == b"v1", "the baseline's"
            await p.infer(InferenceRequest("m", "v2", headers={"x-user": "ann"}))
            assert p.experiment_collector.drain() is None
            for _ in range(3):
                await p.infer(InferenceRequest("m", headers={"x-user": "ann"}))
            seen = p.experiment_collector.drain()
            assert [unit for _, unit, _, _ in seen.exposures] == ["ann"]
            assert [figures.calls for figures in seen.figures["t"].values()] == [3]

        asyncio.run(main())

    def test_a_long_key_is_remembered_by_its_digest(self) -> None:
        """A reward that names the key finds the exposure."""

        async def main() -> None:
            key = "é" * 100_000
            p = self.plane(
                lambda version: InferenceResponse(b""), replace(self.TRIAL, key=StickyKey(json="$.user"))
            )
            body = json.dumps({"user": key}).encode()
            await p.infer(InferenceRequest("m", inputs=(InputPart("body", body),)))
            [(_, unit, _, _)] = p.experiment_collector.drain().exposures
            assert len(unit) == 32 and unit == Reward(1.0, key=key).unit

        asyncio.run(main())

    @pytest.mark.parametrize(
        ("answer", "reason"),
        [
            (QueueFull("m", None, ""), "queue_full"),
            (QuotaExceeded("m", "v1", 2), "quota_exceeded"),
            (DeadlineExceeded("m", 1.0), "deadline"),
            (HandlerFailed("traceback"), "handler_failed"),
            (HandlerOutOfMemory("traceback"), "out_of_memory"),
            (InferenceResponse(b"", status=507), "status_507"),
        ],
    )
    def test_failures_are_the_arms_with_their_reason(
        self, answer: RelayError | InferenceResponse, reason: str
    ) -> None:
        async def main() -> None:
            p = self.plane(lambda version: answer, replace(self.TRIAL, allocation=allocate({"b": 10_000})))
            if isinstance(answer, InferenceResponse):
                assert (await p.infer(InferenceRequest("m"))).status == answer.status
            else:
                with pytest.raises(type(answer)):
                    await p.infer(InferenceRequest("m"))
            figures = p.experiment_collector.drain().figures["t"]["b"]
            assert (figures.calls, figures.failed, figures.latency) == (1, {reason: 1}, {})

        asyncio.run(main())

    def test_a_version_that_was_never_ready_is_a_failure_too(self) -> None:
        async def main() -> None:
            p = self.plane(lambda version: InferenceResponse(b""))
            rows = table(v1="ready", v2="stopped").models["m"].versions
            trial = replace(self.TRIAL, allocation=allocate({"b": 10_000}))
            p._reader.update(RoutingTable(2, {"m": ModelRoute("v1", rows, active_split=trial)}))
            with pytest.raises(NoReplica):
                await p.infer(InferenceRequest("m"))
            assert p.experiment_collector.drain().figures["t"]["b"].failed == {"no_replica": 1}

        asyncio.run(main())

    def test_a_stream_counts_at_its_end_and_an_error_in_it_is_a_failure(self) -> None:
        async def pieces(error: Exception | None):
            yield b"a"
            if error is not None:
                raise error
            yield b"b"

        async def main() -> None:
            for error, failed in ((None, {}), (ReplicaDied("killed"), {"replica_died": 1})):
                p = self.plane(lambda version: ResponseStream(InferenceResponse(b""), pieces(error)))  # noqa: B023
                stream = await p.infer(InferenceRequest("m"))
                assert p.experiment_collector.drain() is None, "it is not at its end"
                with pytest.raises(ReplicaDied) if error else contextlib.nullcontext():
                    _ = [piece async for piece in stream]
                await stream.aclose()
                (figures,) = p.experiment_collector.drain().figures["t"].values()
                assert (figures.calls, figures.failed) == (1, failed)
                assert p.experiment_collector.drain() is None

        asyncio.run(main())

    def test_a_caller_that_left_counts_for_nobody(self) -> None:
        async def main() -> None:
            never = asyncio.get_running_loop().create_future()
            p = self.plane(lambda version: never)
            leaving = asyncio.create_task(p.infer(InferenceRequest("m")))
            await asyncio.sleep(0)
            leaving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await leaving
            streaming = DataPlane(p._reader, Meters(), remote=lambda ref, row: Pieces())
            stream = await streaming.infer(InferenceRequest("m"))
            await stream.__aiter__().__anext__()
            await stream.aclose()
            assert p.experiment_collector.drain() is None
            assert streaming.experiment_collector.drain() is None

        asyncio.run(main())
