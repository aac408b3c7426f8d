"""Where sequences are: several replicas on one event loop, each behind a real socket, and the ways to
them.
"""

from __future__ import annotations

import asyncio
import functools

import pytest

from serve_app.dataplane.data_plane import DataPlane, RoutingTableReader
from serve_app.dataplane.routing.sequence_router import LocalReplica, SequenceRouter
from serve_app.deployments.transport.unix_socket import UdsClientPool, UdsServer, socket_path
from serve_app.domain import sequence_ids
from serve_app.domain.model import ModelRef
from serve_app.domain.rendezvous import rank_replicas
from serve_app.domain.request import InferenceRequest, InferenceResponse, InputPart
from serve_app.domain.routing_table import ModelRoute, RoutingTable, VersionRoute
from serve_app.domain.sequence_ids import SequenceHeaders
from serve_app.domain.traffic_policy import BucketAllocation, TrafficPolicy
from serve_app.errors import BadRequest, SequenceLost, TooManySequences
from serve_app.runtime.batching.batcher import Batcher
from serve_app.runtime.batching.sequence_batcher import SequenceBatcher
from serve_app.runtime.batching.sequence_state import SequenceOptions
from serve_app.telemetry.metrics import Meters
from tests.support.coroutine_backend import CoroutineBackend

KEYS = SequenceHeaders("seq", "seq-start", "seq-end")
WHOLE = TrafficPolicy()
HALVES = TrafficPolicy(
    "weighted", {"1": 5000, "2": 5000}, allocation=BucketAllocation((5000, 10000), ("1", "2"))
)


class Replica(CoroutineBackend):
    """Answers each call of a sequence with its own name and how many there were."""

    def __init__(self, name: str, version: str = "1", most: int = 99) -> None:
        self.name, self.ref = name, ModelRef("m", version)
        self.counts: dict[str, int] = {}
        self._batcher = Batcher(self._run, self.ref, Meters())
        self.sequences = SequenceBatcher(
            self._batcher,
            self.ref,
            Meters(),
            name,
            SequenceOptions(KEYS, max_sequences=most, queue_size=64, max_idle=60),
        )
        self._server = UdsServer(self.sequences.submit, self.sequences.holds)

    async def open(self) -> Replica:
        await self._server.open(socket_path(self.name))
        return self

    async def infer(self, request: InferenceRequest) -> InferenceResponse:
        return await self.sequences.infer(request)

    def _run(self, requests, emit):
        answers = []
        for request in requests:
            name = request.headers["seq"]
            self.counts[name] = self.counts.get(name, 0) + 1
            answers.append(
                InferenceResponse(f"{self.name} {self.counts[name]}".encode(), version=self.ref.version)
            )
        return answers

    async def die(self) -> None:
        """Its socket stays, as a killed process leaves it."""
        path = socket_path(self.name)
        kept = path.with_suffix(".kept")
        path.rename(kept)
        self._server.close()
        while self._server._connections:
            await asyncio.sleep(0)
        kept.rename(path)

    async def close(self) -> None:
        await self.die()
        await self.sequences.close()


class Ways(CoroutineBackend):
    """The targets of a process: over sockets alone."""

    def __init__(self) -> None:
        self._clients = UdsClientPool()
        self._row: VersionRoute | None = None

    def __call__(self, ref: ModelRef, row: VersionRoute) -> Ways:
        self._row = row
        return self

    async def infer(self, request: InferenceRequest) -> InferenceResponse:
        return await self.infer_at(self._row.replica_ids[0], request)

    async def infer_at(self, replica: str, request: InferenceRequest) -> InferenceResponse:
        way = await self._clients.get(replica)
        assert way is not None
        return await way.infer(request)

    async def holds(self, replica: str, name: str) -> bool:
        way = await self._clients.get(replica)
        assert way is not None
        return await way.holds(name)


def table(*replicas: Replica, policy: TrafficPolicy = WHOLE) -> RoutingTable:
    ids: dict[str, list[str]] = {}
    for replica in replicas:
        ids.setdefault(replica.ref.version, []).append(replica.name)
    rows = {
        v: VersionRoute(v, "ready", len(found), replica_ids=tuple(sorted(found)), stateful=True)
        for v, found in ids.items()
    }
    return RoutingTable(1, {"m": ModelRoute(min(rows), rows, policy, sequence_header="seq")})


class Process:
    """A gateway, or one of the replicas, with a table of its own."""

    def __init__(
        self, *replicas: Replica, here: Replica | None = None, policy: TrafficPolicy = WHOLE
    ) -> None:
        self.reader = RoutingTableReader(table(*replicas, policy=policy))
        ways = Ways()
        me = None if here is None else LocalReplica(here.ref, here.name, here.sequences.holds, here)
        homes = SequenceRouter(self.reader, ways, KEYS, me)
        local = {} if here is None else {(here.ref.name, here.ref.version): here}
        self._plane = DataPlane(self.reader, Meters(), ways, local, sequence_affinity=homes)

    def sees(self, *replicas: Replica) -> None:
        self.reader.update(table(*replicas))

    async def ask(
        self, name: str = "", version: str | None = None, start: bool = False, end: bool = False
    ) -> InferenceResponse:
        headers = {"seq": name} if name else {}
        headers |= ({"seq-start": "true"} if start else {}) | ({"seq-end": "true"} if end else {})
        return await self._plane.infer(InferenceRequest("m", version, (InputPart("body", b""),), headers))


@pytest.fixture(autouse=True)
def _sockets(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def asynchronous(test):
    @functools.wraps(test)
    def run() -> None:
        asyncio.run(asyncio.wait_for(test(), 60))

    return run


async def replicas(*names: str, **more) -> list[Replica]:
    return [await Replica(name, **more).open() for name in names]


async def close(*some: Replica) -> None:
    for replica in some:
        await replica.close()
    await asyncio.sleep(0)


@asynchronous
async def test_a_sequence_stays_with_the_replica_that_started_it():
    a, b = await replicas("a", "b")
    processes = [Process(a, b, here=a), Process(a, b, here=b), Process(a, b)]
    for process, home in zip(processes, "aba"):
        first = await process.ask()
        name = dict(first.headers)["seq"]
        assert sequence_ids.replica_of(name) == home, "a replica begins at home"
        assert first.body.decode() == f"{home} 1"
        answers = [(await other.ask(name)).body.decode() for other in processes]
        assert answers == [f"{home} {number}" for number in (2, 3, 4)]
    await close(a, b)


@asynchronous
async def test_a_callers_own_name_leads_everybody_to_one_replica_also_when_others_come():
    a, b, c, d = await replicas("a", "b", "c", "d")
    before = [Process(a, b, here=a), Process(a, b)]
    names = [f"own-{number}" for number in range(12)]
    homes = {name: (await before[0].ask(name)).body.decode().split()[0] for name in names}
    assert set(homes.values()) == {"a", "b"}
    for name in names:
        assert (await before[1].ask(name)).body.decode() == f"{homes[name]} 2"
    news = Process(a, b, c, d, here=c)
    for process in (*before, news):
        process.sees(a, b, c, d)
    for name in names:
        for number, process in enumerate((*before, news), 3):
            assert (await process.ask(name)).body.decode() == f"{homes[name]} {number}", "nobody has moved"
    fresh = {(await news.ask(f"new-{number}")).body.decode().split()[0] for number in range(40)}
    assert fresh == {"a", "b", "c", "d"}
    await close(a, b, c, d)


@asynchronous
async def test_calls_that_come_at_once_keep_their_order_also_while_their_home_is_looked_for():
    a, b = await replicas("a", "b")
    for process in (Process(a, b), Process(a, b, here=a)):
        for name in (f"{id(process)}-{number}" for number in range(6)):
            answers = await asyncio.gather(*(process.ask(name) for _ in range(8)))
            assert [int(reply.body.split()[1]) for reply in answers] == [1, 2, 3, 4, 5, 6, 7, 8]
    await close(a, b)


@asynchronous
async def test_callers_get_an_error_when_the_replica_of_their_sequence_has_died():
    a, b = await replicas("a", "b")
    process = Process(a, b)
    given = dict((await process.ask()).headers)["seq"]
    assert sequence_ids.replica_of(given) == "a"
    own = next(name for name in map(str, range(99)) if rank_replicas(name, "ab")[0] == "a")
    result = next(name for name in map(str, range(99, 199)) if rank_replicas(name, "ab")[0] == "a")
    for name in (own, result):
        assert (await process.ask(name)).body == b"a 1"
    await a.die()
    for name in (given, own):
        with pytest.raises(SequenceLost, match="the replica that had its state has ended") as reported:
            await process.ask(name)
        assert reported.value.selected_version == "1"
    assert (await process.ask(result, start=True)).body == b"b 1", "who begins anew need not hear of it"
    assert (await process.ask(result)).body == b"b 2"
    process.sees(b)
    with pytest.raises(SequenceLost):
        await process.ask(given)
    again = await process.ask(own)
    assert (again.body, dict(again.headers)["seq-start"]) == (b"b 1", "true"), "told once, it may begin anew"
    await close(b)
    await a.sequences.close()


@asynchronous
async def test_a_full_replica_sends_those_that_begin_to_another():
    a, b = await replicas("a", "b", most=1)
    process = Process(a, b, here=a)
    assert [(await process.ask()).body for _ in range(2)] == [b"a 1", b"b 1"]
    for name in ("", "own"):
        with pytest.raises(TooManySequences) as refused:
            await process.ask(name)
        assert refused.value.retry_after >= 1
    await close(a, b)

    a, b = await replicas("a", "b", most=1)
    gateway = Process(a, b)
    homes = [(await gateway.ask(name)).body.decode() for name in ("0", "1")]
    assert sorted(homes) == ["a 1", "b 1"]
    assert [(await gateway.ask(name)).body.decode()[0] for name in ("0", "1")] == [home[0] for home in homes]
    await close(a, b)


@asynchronous
async def test_a_split_leaves_sequences_with_their_versions():
    a = await Replica("a", "1").open()
    b = await Replica("b", "2").open()
    process = Process(a, b, policy=HALVES)
    firsts = [await process.ask() for _ in range(8)]
    assert {reply.version for reply in firsts} == {"1", "2"}
    for first in firsts:
        name = dict(first.headers)["seq"]
        assert (await process.ask(name)).version == first.version
        if first.version == "1":
            with pytest.raises(
                SequenceLost, match="version 1 has its state, and the request names version 2"
            ):
                await process.ask(name, version="2")
    owns = {name: (await process.ask(name)).version for name in map(str, range(8))}
    process.reader.update(table(a, b))  # every call that names none gets version 1 from now on
    newcomer = Process(a, b)
    for name, version in owns.items():
        assert (await process.ask(name)).version == version
        assert (await newcomer.ask(name)).version == version
    assert (await process.ask("another")).version == "1"
    await close(a, b)


@asynchronous
async def test_a_gateway_remembers_no_long_name():
    [a] = await replicas("a")
    process = Process(a)
    with pytest.raises(BadRequest, match="seq has 513 characters; it may have 512"):
        await process.ask("x" * 513, start=True)
    assert (await process.ask("x" * 512, start=True)).body == b"a 1"
    await close(a)
