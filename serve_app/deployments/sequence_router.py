"""Sequence affinity: routes each request to the one replica that has the state of its sequence.

A generated name contains the id of its replica. A name chosen by the client leads to the replica that has the
sequence open. Where none has, the first replica by rendezvous hashing starts it. That choice is remembered,
so new replicas move no sequence, and the clients of a dead replica get an error.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass
from typing import Protocol

from serve_app.dataplane.data_plane import InferenceBackend, RoutingTableReader
from serve_app.dataplane.version_router import VersionSelection
from serve_app.deployments.replica_client import ReplicaClients
from serve_app.deployments.uds_transport import ConnectionLost
from serve_app.domain import sequence_ids as names
from serve_app.domain.model import ModelRef
from serve_app.domain.request import InferenceRequest, InferenceResponse, ResponseStream
from serve_app.domain.routing_table import VersionRoute
from serve_app.domain.sequence_ids import SequenceHeaders
from serve_app.errors import ModelLoading, RelayError, SequenceLost, TooManySequences
from serve_app.settings import Settings

_MAX_REMEMBERED = 10_000  # names chosen by clients


class SequenceHolder(Protocol):
    def holds(self, name: str) -> bool:
        """Return whether the state of this sequence is here."""


@dataclass(frozen=True)
class LocalReplica:
    """The replica of this process."""

    ref: ModelRef
    replica: str
    sequences: SequenceHolder
    backend: InferenceBackend


class SequenceRouter:
    """A router of requests of stateful models; it is the SequenceAffinity of the data plane.

    ``keys`` are the headers of sequences; ``local`` is this process's own replica, if its model is stateful.
    """

    def __init__(
        self,
        reader: RoutingTableReader,
        clients: ReplicaClients,
        keys: SequenceHeaders,
        local: LocalReplica | None = None,
    ) -> None:
        self._reader = reader
        self._clients = clients
        self._keys = keys
        self._local = local
        self._client_names: OrderedDict[tuple[str, str], str] = (
            OrderedDict()
        )  # replicas, by model and a caller's own name
        self._searches: dict[tuple[str, str], asyncio.Future[str]] = {}

    async def __call__(
        self, request: InferenceRequest, selection: VersionSelection
    ) -> tuple[VersionSelection, InferenceBackend]:
        name = request.headers.get(self._keys.id, "")
        version_requested = not selection.routed_by_policy
        selection = selection._replace(
            routed_by_policy=False
        )  # requests of a sequence are never copied to a shadow
        row = selection.route
        if not name:
            return selection, _NewSequenceBackend(self, ModelRef(request.model, row.version), row)
        replica = names.replica_of(name)
        is_client_name = not replica
        if is_client_name:
            replica = await self.locate(request, name, row, version_requested)
        route = self._row_of(request.model, replica) or row
        if route.version != row.version:
            if version_requested:
                why = f"version {route.version} has its state, and version {row.version} is asked"
                raise SequenceLost(request.model, name, why)
            selection = VersionSelection(route)
        return selection, _SequenceBackend(
            self, ModelRef(request.model, route.version), route, replica, name, is_client_name
        )

    def _row_of(self, model: str, replica: str) -> VersionRoute | None:
        versions = self._reader.table.models[model].versions
        local = self._local
        if local is not None and local.replica == replica:
            return versions.get(local.ref.version)
        return next((row for row in versions.values() if replica in row.replica_ids), None)

    async def locate(
        self, request: InferenceRequest, name: str, row: VersionRoute, version_requested: bool
    ) -> str:
        """Return the replica for a name chosen by the client.

        Concurrent callers share one search, so that requests keep their order.
        """
        key = request.model, name
        if (replica := self._client_names.get(key)) is not None:
            if replica in row.replica_ids or not self.starts_sequence(request):
                self._client_names.move_to_end(key)
                return replica
            self.forget(request.model, name)  # it starts again, and its former replica is gone
        search = self._searches.get(key)
        if search is None:
            search = self._searches[key] = asyncio.ensure_future(
                self._search(request.model, name, row, version_requested)
            )
            search.add_done_callback(lambda _: self._searches.pop(key, None))
        return await asyncio.shield(search)

    async def _search(self, model: str, name: str, row: VersionRoute, version_requested: bool) -> str:
        """Query every replica for the sequence; without a match choose the best of those that responded."""
        versions = self._reader.table.models[model].versions.values()
        rows = [row] if version_requested else [r for r in versions if r.stateful]
        candidates = [(r, replica) for r in rows for replica in r.replica_ids]
        answers = await asyncio.gather(*(self._holds(model, r, replica, name) for r, replica in candidates))
        found = [replica for (_, replica), holds in zip(candidates, answers, strict=True) if holds]
        alive = [
            replica
            for (r, replica), holds in zip(candidates, answers, strict=True)
            if r is row and holds is not None
        ]
        replicas = found or names.rank_replicas(name, alive)
        if not replicas:
            raise ModelLoading(model, row.version, "none of its replicas answers")
        self.remember(model, name, replicas[0])
        return replicas[0]

    async def _holds(self, model: str, row: VersionRoute, replica: str, name: str) -> bool | None:
        """Return whether the replica has the sequence; None where it does not respond."""
        local = self._local
        if local is not None and local.replica == replica:
            return local.sequences.holds(name)
        try:
            return await self._clients(ModelRef(model, row.version), row).holds(replica, name)
        except (ConnectionLost, RelayError):
            return None

    def starts_sequence(self, request: InferenceRequest) -> bool:
        """Return whether the headers start a sequence."""
        return request.headers.get(self._keys.start, "").lower() == "true"

    def remember(self, model: str, name: str, replica: str) -> None:
        self._client_names[model, name] = replica
        if len(self._client_names) > _MAX_REMEMBERED:
            self._client_names.popitem(last=False)

    def forget(self, model: str, name: str) -> None:
        self._client_names.pop((model, name), None)

    async def infer_at(
        self, ref: ModelRef, row: VersionRoute, replica: str, request: InferenceRequest
    ) -> InferenceResponse | ResponseStream:
        """Return the response of one replica. Raises RelayError, and ConnectionLost."""
        local = self._local
        if local is not None and local.replica == replica:
            return await local.backend.infer(request)
        return await self._clients(ref, row).infer_at(replica, request)

    async def infer_anywhere(
        self, ref: ModelRef, row: VersionRoute, request: InferenceRequest
    ) -> InferenceResponse | ResponseStream:
        local = self._local
        if local is not None and local.ref == ref:
            return await local.backend.infer(request)
        return await self._clients(ref, row).infer(request)


class _NewSequenceBackend:
    """A backend for a sequence without a name: any replica with room starts it, the nearest first."""

    __slots__ = ("_ref", "_router", "_row")

    def __init__(self, router: SequenceRouter, ref: ModelRef, row: VersionRoute) -> None:
        self._router, self._ref, self._row = router, ref, row

    async def infer(self, request: InferenceRequest) -> InferenceResponse | ResponseStream:
        try:
            return await self._router.infer_anywhere(self._ref, self._row, request)
        except (TooManySequences, ModelLoading) as refusal:
            for replica in self._row.replica_ids:
                try:
                    return await self._router.infer_at(self._ref, self._row, replica, request)
                except (TooManySequences, ModelLoading, ConnectionLost):
                    continue
            raise refusal


class _SequenceBackend:
    """A backend for the replica of a sequence. A sequence named by the client may start elsewhere."""

    __slots__ = ("_is_client_name", "_name", "_ref", "_replica", "_router", "_row")

    def __init__(
        self,
        router: SequenceRouter,
        ref: ModelRef,
        row: VersionRoute,
        replica: str,
        name: str,
        is_client_name: bool,
    ) -> None:
        self._router, self._ref, self._row = router, ref, row
        self._replica, self._name, self._is_client_name = replica, name, is_client_name

    async def infer(self, request: InferenceRequest) -> InferenceResponse | ResponseStream:
        router, ref, row = self._router, self._ref, self._row
        try:
            return await router.infer_at(ref, row, self._replica, request)
        except (TooManySequences, ModelLoading) as refusal:  # it would start there
            if not self._is_client_name:
                raise
            error: RelayError = refusal
        except ConnectionLost:
            router.forget(ref.name, self._name)
            error = SequenceLost(ref.name, self._name, "the replica that had its state has ended")
            if not self._is_client_name or not router.starts_sequence(request):
                raise error from None
        for replica in names.rank_replicas(self._name, row.replica_ids):
            if replica != self._replica:
                try:
                    answer = await router.infer_at(ref, row, replica, request)
                except (TooManySequences, ModelLoading, ConnectionLost):
                    continue
                router.remember(ref.name, self._name, replica)
                return answer
        raise error


def sequence_headers(settings: Settings) -> SequenceHeaders:
    """Return the headers of sequences in lower case, as the protocols have them."""
    runtime = settings.runtime
    return SequenceHeaders(
        runtime.header_key_sequence_id.lower(),
        runtime.header_key_sequence_start.lower(),
        runtime.header_key_sequence_end.lower(),
    )
