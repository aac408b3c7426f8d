"""Tests of prefix-aware routing: replicas on one event loop, each behind a real socket, and a data plane."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from serve_app.dataplane.backends import ConnectionLost
from serve_app.dataplane.data_plane import DataPlane, RoutingTableReader
from serve_app.dataplane.routing.prefix_router import PrefixRouter
from serve_app.dataplane.routing.prefix_table import BLOCK_BYTES, MAX_EXTRA_REQUESTS
from serve_app.deployments.transport.unix_socket import UdsClientPool, UdsServer, socket_path
from serve_app.domain.model import ModelRef
from serve_app.domain.request import InferenceRequest, InferenceResponse, InputPart, ResponseStream
from serve_app.domain.routing_table import ModelRoute, RoutingTable, VersionRoute
from serve_app.errors import ModelLoading, ReplicaDied
from serve_app.runtime.batching.batcher import Batcher
from serve_app.telemetry.metrics import Meters
from tests.support.coroutine_backend import CoroutineBackend

REF = ModelRef("m", "1")


class ReplicaSocket:
    """A replica that answers with its name, behind a socket."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._batcher = Batcher(self._run, REF, Meters())
        self._server = UdsServer(self._batcher.submit, lambda name: False)

    async def open(self) -> ReplicaSocket:
        await self._server.open(socket_path(self.name))
        return self

    def _run(self, requests, emit):
        return [InferenceResponse(self.name.encode(), version="1") for _ in requests]

    async def close(self) -> None:
        self._server.close()
        while self._server._connections:
            await asyncio.sleep(0)
        await self._batcher.close()


class SocketBackend(CoroutineBackend):
    """A backend of the replicas of one version, over their sockets alone."""

    def __init__(self, route: VersionRoute) -> None:
        self.route = route
        self.stopping: set[str] = set()
        self.streams: set[str] = set()  # replicas whose responses are streams
        self._clients = UdsClientPool()

    async def infer(self, request: InferenceRequest) -> InferenceResponse | ResponseStream:
        for replica in self.route.replica_ids:
            try:
                return await self.infer_at(replica, request)
            except (ConnectionLost, ModelLoading):
                continue
        raise ReplicaDied

    async def infer_at(self, replica: str, request: InferenceRequest) -> InferenceResponse | ResponseStream:
        if replica in self.stopping:
            raise ModelLoading("m", "1", "it is stopping")
        client = await self._clients.get(replica)
        if client is None:
            raise ConnectionLost
        response = await client.infer(request)
        if replica in self.streams and isinstance(response, InferenceResponse):
            return ResponseStream(response, _chunks())
        return response


async def _chunks() -> AsyncIterator[bytes]:
    yield b"one"
    yield b"two"


class GatewayPlane:
    """The data plane of a gateway."""

    def __init__(self, *replicas: str, routing: str = "prefix", retries: bool = True) -> None:
        self._options = {"routing": routing, "retries": retries}
        self.reader = RoutingTableReader()
        self.backend = SocketBackend(self._route(replicas))
        self.update(*replicas)
        self.router = PrefixRouter(self.reader, self._client)
        self.plane = DataPlane(self.reader, Meters(), self.router)

    def _client(self, ref: ModelRef, route: VersionRoute) -> SocketBackend:
        self.backend.route = route
        return self.backend

    def _route(self, replicas) -> VersionRoute:
        return VersionRoute("1", "ready", len(replicas), replica_ids=tuple(replicas), **self._options)

    def update(self, *replicas: str) -> None:
        self.reader.update(RoutingTable(1, {"m": ModelRoute("1", {"1": self._route(replicas)})}))

    async def infer(self, prefix: str, rest: str = "") -> InferenceResponse | ResponseStream:
        prompt = prefix.ljust(BLOCK_BYTES) + rest
        return await self.plane.infer(InferenceRequest("m", inputs=(InputPart("body", prompt.encode()),)))

    async def home(self, prefix: str, rest: str = "") -> str:
        response = await self.infer(prefix, rest)
        assert isinstance(response, InferenceResponse)
        return response.body.decode()


@pytest.fixture(autouse=True)
def _sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def run(test) -> None:
    """Run ``test`` with three replicas by name."""

    async def with_replicas() -> None:
        replicas = {name: await ReplicaSocket(name).open() for name in "abc"}
        try:
            await asyncio.wait_for(test(replicas), 60)
        finally:
            for replica in replicas.values():
                await replica.close()

    asyncio.run(with_replicas())


def test_equal_prefixes_reach_one_replica_and_others_spread() -> None:
    async def test(replicas) -> None:
        gateway, other = GatewayPlane(*replicas), GatewayPlane(*replicas)
        homes = {prefix: await gateway.home(prefix) for prefix in map(str, range(30))}
        assert min(Counter(homes.values()).values()) > 3
        for prefix, home in homes.items():
            assert {await gateway.home(prefix, rest) for rest in "xyz"} == {home}
            assert await other.home(prefix) == home

    run(test)


def test_a_busy_replica_shares_its_prefixes() -> None:
    async def test(replicas) -> None:
        gateway = GatewayPlane(*replicas)
        home = await gateway.home("hot")
        gateway.backend.streams.add(home)
        streams = [await gateway.infer("hot") for _ in range(MAX_EXTRA_REQUESTS + 1)]
        assert all(isinstance(stream, ResponseStream) for stream in streams), "within the limit"
        assert await gateway.home("hot") != home
        async for _ in streams[0]:  # to its end
            pass
        await streams[1].aclose()  # by a client that left
        gateway.backend.streams.clear()
        assert [await gateway.home("hot") for _ in range(3)] == [home] * 3

    run(test)


def test_requests_of_a_lost_or_stopping_replica_go_to_others() -> None:
    async def test(replicas) -> None:
        gateway = GatewayPlane(*replicas)
        home = await gateway.home("prefix")
        gateway.backend.stopping.add(home)
        assert await gateway.home("prefix") != home
        gateway.backend.stopping.clear()
        assert await gateway.home("prefix") == home
        await replicas[home].close()
        assert await gateway.home("prefix") != home
        rest = [name for name in replicas if name != home]
        gateway.update(*rest)
        assert await gateway.home("prefix") in rest

    run(test)


def test_a_lost_request_is_not_repeated_where_the_model_forbids_it() -> None:
    async def test(replicas) -> None:
        gateway = GatewayPlane(*replicas, retries=False)
        home = await gateway.home("prefix")
        await replicas[home].close()
        with pytest.raises(ReplicaDied):
            await gateway.home("prefix")

    run(test)


@pytest.mark.parametrize(("names", "routing"), [("abc", "load"), ("a", "prefix")])
def test_other_versions_keep_their_backend(names: str, routing: str) -> None:
    gateway = GatewayPlane(*names, routing=routing)
    assert gateway.router(REF, gateway.backend.route) is gateway.backend


def test_the_table_of_a_removed_version_is_freed() -> None:
    gateway = GatewayPlane(*"abc")
    route = gateway.backend.route
    first = gateway.router(REF, route)
    assert gateway.router(REF, route) is first
    gateway.reader.update(RoutingTable(2, {}))
    gateway.router(ModelRef("n", "1"), route)
    assert gateway.router(REF, route) is not first
