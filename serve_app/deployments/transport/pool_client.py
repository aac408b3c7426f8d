"""Clients of versions in pools: a request goes to a host that has loaded its version, or will load it.

All versions of a pool share one connection to each host. The hosts that have loaded a version are in the
routing table; a version that none has loaded goes to its first host by rendezvous hashing, which loads it.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any

from serve_app.dataplane.backends import ConnectionLost
from serve_app.dataplane.data_plane import RoutingTableReader
from serve_app.deployments.ray_internals.actor_client import ActorClient
from serve_app.deployments.transport.replica_client import RemoteBackend, ReplicaClients
from serve_app.domain.model import ModelRef, ModelSpec
from serve_app.domain.pool import pool_ref, rank_hosts
from serve_app.domain.request import Cancel, InferenceRequest, InferenceResponse, OnDone, ResponseStream
from serve_app.domain.routing_table import VersionRoute
from serve_app.errors import ModelLoading, ReplicaDied, Unavailable
from serve_app.runtime.backends import Backend, TaskRequest
from serve_app.settings import Settings

Response = InferenceResponse | ResponseStream


@dataclass(frozen=True)
class LocalHost:
    """The host of this process; ``infer`` loads the version of a request, with its revision, if it has to."""

    replica: str
    infer: Callable[[InferenceRequest, str], Coroutine[Any, Any, Response]]


async def load_in_host(pool: ModelRef, host: str, spec: ModelSpec) -> None:
    """Load a version in one host of its pool. Raises RelayError."""
    try:
        error = await ActorClient(pool.app).load(host, spec)
    except ConnectionLost:
        raise Unavailable(f"A host of the pool {pool.version} ended while it loaded {spec.name}.") from None
    if error is not None:
        raise error


class VersionClients:
    """The backends of all versions: those of pools, and those with replicas of their own.

    ``host`` is this process, where it is a host of a pool.
    """

    def __init__(self, reader: RoutingTableReader, settings: Settings, host: LocalHost | None = None) -> None:
        self._reader = reader
        self._replicas = ReplicaClients(reader, settings)
        self._host = host
        self._routes: dict[str, VersionRoute] = {}  # of the pools' own applications

    def __call__(self, ref: ModelRef, route: VersionRoute) -> Any:
        """Return the backend of a version. Raises ModelLoading where it has no replica yet."""
        if not route.pool:
            return self._replicas(ref, route)
        hosts = self._reader.table.pools.get(route.pool, ())
        if not hosts:
            raise ModelLoading(ref.name, ref.version, f"no host of the pool {route.pool} runs")
        return _PooledBackend(ref, route, hosts, self._client_of(route.pool, hosts), self._host)

    def wake(self, ref: ModelRef, route: VersionRoute) -> None:
        """Start a replica of a version that is scaled to zero; a pool has its hosts always.

        Raises ModelLoading while its application does not exist.
        """
        if not route.pool:
            self._replicas.wake(ref, route)

    def _client_of(self, pool: str, hosts: tuple[str, ...]) -> RemoteBackend:
        route = self._routes.get(pool)
        if route is None or route.replica_ids != hosts:
            route = self._routes[pool] = VersionRoute(pool, "ready", len(hosts), replica_ids=hosts)
        return self._replicas(pool_ref(pool), route)


class _PooledBackend(Backend):
    """The backend of one version in a pool, for one request."""

    def __init__(
        self,
        ref: ModelRef,
        route: VersionRoute,
        hosts: tuple[str, ...],
        client: RemoteBackend,
        local: LocalHost | None,
    ) -> None:
        self._ref = ref
        self._route = route
        self._hosts = hosts
        self._client = client
        self._local = local

    def submit(self, request: InferenceRequest, on_done: OnDone) -> Cancel:
        """Send a request to the least busy host that has loaded its version.

        Hosts are tried in turn where this process is one of them, or one is not connected.
        """
        request = replace(request, version=self._ref.version)
        hosts = self._candidates()
        if (self._local is None or self._local.replica not in hosts) and self._client.is_connected(hosts):
            return self._client.submit(request, on_done, hosts)
        return TaskRequest(self._infer(request, hosts), on_done).cancel

    async def _infer(self, request: InferenceRequest, chosen: tuple[str, ...]) -> Response:
        """Return the response of a host; another one is tried where it is lost. Raises RelayError."""
        if len(chosen) > 1:
            chosen = tuple(rank_hosts(ModelRef(request.request_id, ""), chosen))
        others = rank_hosts(self._ref, set(self._hosts) - set(chosen))
        for host in (*chosen, *others):
            try:
                if self._local is not None and self._local.replica == host:
                    return await self._local.infer(request, self._route.revision)
                return await self._client.infer_at(host, request)
            except ConnectionLost:
                if not self._route.retries:
                    raise ReplicaDied(f"a host of the pool {self._route.pool} was lost") from None
        raise ModelLoading(self._ref.name, self._ref.version, f"no host of {self._route.pool} answers")

    def _candidates(self) -> tuple[str, ...]:
        """Return the hosts that have loaded the version, else the first of those that should."""
        loaded = tuple(host for host in self._route.replica_ids if host in self._hosts)
        return loaded or tuple(rank_hosts(self._ref, self._hosts)[:1])
