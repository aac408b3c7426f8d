"""Prefix-aware routing: sends requests with the same beginning to the replica that has cached it.

It routes versions with ``routing: prefix`` only. HAProxy cannot choose by the body, so the gateways own the
routes of such versions. Each counts the requests that it has sent itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial

from serve_app.dataplane.backends import ConnectionLost, ReplicaBackend
from serve_app.dataplane.data_plane import RoutingTableReader
from serve_app.dataplane.routing.prefix_table import PrefixTable, hash_blocks, read_prefix
from serve_app.domain.model import ModelRef
from serve_app.domain.request import Cancel, InferenceRequest, InferenceResponse, OnDone, ResponseStream
from serve_app.domain.routing_table import VersionRoute
from serve_app.errors import ModelLoading, ReplicaDied
from serve_app.runtime.backends import Backend, TaskRequest


class PrefixRouter:
    """The remote backends of a data plane: those of ``clients``, with a choice by prefix where it is due."""

    def __init__(
        self, reader: RoutingTableReader, clients: Callable[[ModelRef, VersionRoute], ReplicaBackend]
    ) -> None:
        self._reader = reader
        self._clients = clients
        self._backends: dict[ModelRef, PrefixBackend] = {}

    def __call__(self, ref: ModelRef, route: VersionRoute) -> Backend:
        backend = self._clients(ref, route)
        if route.routing != "prefix" or len(route.replica_ids) < 2:
            return backend
        routed = self._backends.get(ref)
        if routed is None or routed.replicas is not backend:
            self._remove_unregistered()
            routed = self._backends[ref] = PrefixBackend(ref, backend)
        return routed

    def _remove_unregistered(self) -> None:
        models = self._reader.table.models
        for ref in list(self._backends):
            if ref.name not in models or ref.version not in models[ref.name].versions:
                del self._backends[ref]


class PrefixBackend(Backend):
    """A backend of one version that chooses the replica of each request; ``replicas`` reaches them."""

    def __init__(self, ref: ModelRef, replicas: ReplicaBackend) -> None:
        self.replicas = replicas
        self._ref = ref
        self._table = PrefixTable()
        self._in_flight: Counter[str] = Counter()  # requests without a complete response

    def submit(self, request: InferenceRequest, on_done: OnDone) -> Cancel:
        return TaskRequest(self._infer(request), on_done).cancel

    async def _infer(self, request: InferenceRequest) -> InferenceResponse | ResponseStream:
        in_flight = {replica: self._in_flight[replica] for replica in self.replicas.route.replica_ids}
        if not in_flight:  # the last one has stopped since the backend was selected
            return await self.replicas.infer(request)
        replica = self._table.choose(hash_blocks(read_prefix(request)), in_flight)
        self._in_flight[replica] += 1
        try:
            response = await self._infer_at(replica, request)
        except BaseException:
            self._release(replica)
            raise
        if isinstance(response, ResponseStream):
            response.add_done_callback(partial(self._release, replica))
        else:
            self._release(replica)
        return response

    async def _infer_at(self, replica: str, request: InferenceRequest) -> InferenceResponse | ResponseStream:
        """Return the response of one replica, or that of another if it is stopping or lost."""
        try:
            return await self.replicas.infer_at(replica, request)
        except ModelLoading:
            pass
        except ConnectionLost:
            if not self.replicas.route.retries:
                raise ReplicaDied(f"a replica of {self._ref.app} was lost") from None
        return await self.replicas.infer(request)

    def _release(self, replica: str) -> None:
        self._in_flight[replica] -= 1
        if not self._in_flight[replica]:
            del self._in_flight[replica]
