"""Sequence affinity: routes each request to the one replica that has the state of its sequence.

A generated name contains the id of its replica. A name chosen by the client leads to the replica that has the
sequence open. Where none has, the first replica by rendezvous hashing starts it. That choice is remembered,
so new replicas move no sequence, and the clients of a dead replica get an error.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from serve_app.dataplane.backends import ConnectionLost, ReplicaBackend
from serve_app.dataplane.data_plane import RoutingTableReader
from serve_app.dataplane.routing.version_router import VersionSelection
from serve_app.domain import sequence_ids as names
from serve_app.domain.model import ModelRef
from serve_app.domain.rendezvous import rank_replicas
from serve_app.domain.request import InferenceRequest, InferenceResponse, ResponseStream
from serve_app.domain.routing_table import VersionRoute
from serve_app.domain.sequence_ids import SequenceHeaders
from serve_app.errors import ModelLoading, RelayError, SequenceLost, TooManySequences
from serve_app.runtime.backends import Backend, TaskBackend
from serve_app.settings import Settings

Response = InferenceResponse | ResponseStream

_MAX_REMEMBERED = 10_000  # names chosen by clients


@dataclass(frozen=True)
class LocalReplica:
    """The replica of this process; ``holds`` returns whether the state of a sequence is here."""

    ref: ModelRef
    replica: str
    holds: Callable[[str], bool]
    backend: Backend


class SequenceRouter:
    """A router of requests of stateful models; it is the SequenceAffinity of the data plane.

    ``keys`` are the headers of sequences; ``local`` is this process's own replica, if it has one.
    """

    def __init__(
        self,
        reader: RoutingTableReader,
        clients: Callable[[ModelRef, VersionRoute], ReplicaBackend],
        keys: SequenceHeaders,
        local: LocalReplica | None = None,
    ) -> None:
        self._reader = reader
        self._clients = clients
        self._keys = keys
        self._local = local
        # Replicas, by model and a caller's own name.
        self._client_names: OrderedDict[tuple[str, str], str] = OrderedDict()
        self._searches: dict[tuple[str, str], asyncio.Future[str]] = {}

    async def __call__(
        self, request: InferenceRequest, selection: VersionSelection
    ) -> tuple[VersionSelection, Backend]:
        name = names.read_sequence_id(request.headers, self._keys.id)
        version_requested = not selection.routed_by_policy
        selection = selection._replace(routed_by_policy=False)  # a sequence is never copied to a shadow
        selected = selection.route
        if not name:
            ref = ModelRef(request.model, selected.version)
            return selection, TaskBackend(partial(self._infer_unnamed, ref, selected))
        replica = names.replica_of(name)
        is_client_name = not replica
        if is_client_name:
            replica = await self._locate(request, name, selected, version_requested)
        route = self._route_of(request.model, replica) or selected
        if route.version != selected.version:
            if version_requested:
                why = (
                    f"version {route.version} has its state, and the request names version {selected.version}"
                )
                raise SequenceLost(request.model, name, why)
            selection = VersionSelection(route)
        ref = ModelRef(request.model, route.version)
        return selection, TaskBackend(partial(self._infer_named, ref, route, replica, name, is_client_name))

    def _route_of(self, model: str, replica: str) -> VersionRoute | None:
        versions = self._reader.table.models[model].versions
        local = self._local
        if local is not None and local.replica == replica:
            return versions.get(local.ref.version)
        return next((route for route in versions.values() if replica in route.replica_ids), None)

    async def _locate(
        self, request: InferenceRequest, name: str, route: VersionRoute, version_requested: bool
    ) -> str:
        """Return the replica for a name chosen by the client.

        Concurrent callers share one search, so that requests keep their order.
        """
        key = request.model, name
        if (replica := self._client_names.get(key)) is not None:
            if replica in route.replica_ids or not self._starts_sequence(request):
                self._client_names.move_to_end(key)
                return replica
            self._forget(request.model, name)  # it starts again, and its former replica is gone
        search = self._searches.get(key)
        if search is None:
            search = self._searches[key] = asyncio.ensure_future(
                self._search(request.model, name, route, version_requested)
            )
            search.add_done_callback(lambda _: self._searches.pop(key, None))
        return await asyncio.shield(search)

    async def _search(self, model: str, name: str, route: VersionRoute, version_requested: bool) -> str:
        """Query every replica for the sequence; without a match choose the best of those that responded."""
        versions = self._reader.table.models[model].versions.values()
        routes = [route] if version_requested else [r for r in versions if r.stateful]
        candidates = [(r, replica) for r in routes for replica in r.replica_ids]
        answers = await asyncio.gather(*(self._holds(model, r, replica, name) for r, replica in candidates))
        found = [replica for (_, replica), holds in zip(candidates, answers, strict=True) if holds]
        alive = [
            replica
            for (r, replica), holds in zip(candidates, answers, strict=True)
            if r is route and holds is not None
        ]
        replicas = found or rank_replicas(name, alive)
        if not replicas:
            raise ModelLoading(model, route.version, "none of its replicas answers")
        self._remember(model, name, replicas[0])
        return replicas[0]

    async def _holds(self, model: str, route: VersionRoute, replica: str, name: str) -> bool | None:
        """Return whether the replica has the sequence; None where it does not respond."""
        local = self._local
        if local is not None and local.replica == replica:
            return local.holds(name)
        try:
            return await self._clients(ModelRef(model, route.version), route).holds(replica, name)
        except (ConnectionLost, RelayError):
            return None

    def _starts_sequence(self, request: InferenceRequest) -> bool:
        """Return whether the headers start a sequence."""
        return request.headers.get(self._keys.start, "").lower() == "true"

    def _remember(self, model: str, name: str, replica: str) -> None:
        self._client_names[model, name] = replica
        if len(self._client_names) > _MAX_REMEMBERED:
            self._client_names.popitem(last=False)

    def _forget(self, model: str, name: str) -> None:
        self._client_names.pop((model, name), None)

    async def _infer_at(
        self, ref: ModelRef, route: VersionRoute, replica: str, request: InferenceRequest
    ) -> Response:
        """Return the response of one replica. Raises RelayError, and ConnectionLost."""
        local = self._local
        if local is not None and local.replica == replica:
            return await local.backend.infer(request)
        return await self._clients(ref, route).infer_at(replica, request)

    async def _infer_at_any(
        self,
        ref: ModelRef,
        route: VersionRoute,
        replicas: Iterable[str],
        request: InferenceRequest,
        refusal: RelayError,
    ) -> tuple[str, Response]:
        """Return the first of ``replicas`` with room, and its response. Raises ``refusal`` where none has."""
        for replica in replicas:
            try:
                return replica, await self._infer_at(ref, route, replica, request)
            except (TooManySequences, ModelLoading, ConnectionLost):
                continue
        raise refusal

    async def _infer_unnamed(self, ref: ModelRef, route: VersionRoute, request: InferenceRequest) -> Response:
        """Start a sequence without a name at any replica with room, the nearest first."""
        local = self._local
        try:
            if local is not None and local.ref == ref:
                return await local.backend.infer(request)
            return await self._clients(ref, route).infer(request)
        except (TooManySequences, ModelLoading) as refusal:
            return (await self._infer_at_any(ref, route, route.replica_ids, request, refusal))[1]

    async def _infer_named(
        self,
        ref: ModelRef,
        route: VersionRoute,
        replica: str,
        name: str,
        is_client_name: bool,
        request: InferenceRequest,
    ) -> Response:
        """Return the response of a sequence's replica. A sequence named by the client may start elsewhere."""
        try:
            return await self._infer_at(ref, route, replica, request)
        except (TooManySequences, ModelLoading) as refusal:  # it would start there
            if not is_client_name:
                raise
            error: RelayError = refusal
        except ConnectionLost:
            self._forget(ref.name, name)
            error = SequenceLost(ref.name, name, "the replica that had its state has ended")
            if not is_client_name or not self._starts_sequence(request):
                raise error from None
        others = [other for other in rank_replicas(name, route.replica_ids) if other != replica]
        replica, response = await self._infer_at_any(ref, route, others, request, error)
        self._remember(ref.name, name, replica)
        return response


def sequence_headers(settings: Settings) -> SequenceHeaders:
    """Return the headers of sequences in lower case, as the protocols have them."""
    runtime = settings.runtime
    return SequenceHeaders(
        runtime.header_key_sequence_id.lower(),
        runtime.header_key_sequence_start.lower(),
        runtime.header_key_sequence_end.lower(),
    )
