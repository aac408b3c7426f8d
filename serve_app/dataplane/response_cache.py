"""Stored responses of versions whose handlers answer equal requests equally.

The data plane reads the cache after it has selected a version, so that access rules and the limits of keys
apply to every request. The key of a response is the digest of what a handler reads. That is the inputs with
their media types, the path, the adapter, and the headers that may select another response. Equal requests
that arrive while the first one runs wait for its response.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from hashlib import blake2b
from typing import NamedTuple

from serve_app.dataplane.routing.version_router import VersionSelection
from serve_app.domain.model import ModelRef
from serve_app.domain.request import Cancel, InferenceRequest, InferenceResponse, OnDone, Outcome, Timings
from serve_app.domain.response_cache import CachePolicy
from serve_app.domain.routing_table import RoutingTable, VersionRoute
from serve_app.runtime.backends import Backend
from serve_app.telemetry.metrics import Meters

log = logging.getLogger(__name__)

HEADER = "x-torchrelay-cache"
_HIT, _MISS = (HEADER, "hit"), (HEADER, "miss")
_KEY_HEADERS = ("accept", "accept-language", "url_path", "adapter")
_EXCLUDING = ("no-store", "no-cache", "private", "max-age=0")  # directives of responses
_ENTRY_BYTES = 600  # of Python's objects around a body


class _Entry(NamedTuple):
    response: InferenceResponse
    size: int
    expires: float


class _Store:
    """The stored responses and the running requests of one version."""

    def __init__(self, ref: ModelRef, policy: CachePolicy, revision: str) -> None:
        self.ref = ref
        self.policy = policy
        self.revision = revision
        self.headers = (*_KEY_HEADERS, *map(str.lower, policy.vary))
        self.running: dict[bytes, _CachedRequest] = {}
        self.size = 0
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()  # the least recently used first

    def find(self, key: bytes, now: float) -> InferenceResponse | None:
        entry = self._entries.get(key)
        if entry is None:
            return None
        if entry.expires <= now:
            self.drop(key)
            return None
        self._entries.move_to_end(key)
        return entry.response

    def put(self, key: bytes, entry: _Entry) -> None:
        self._entries[key] = entry
        self.size += entry.size

    def drop(self, key: bytes) -> None:
        if (entry := self._entries.pop(key, None)) is not None:
            self.size -= entry.size

    def drop_oldest(self) -> None:
        """Drop the least recently used response."""
        self.drop(next(iter(self._entries)))


class ResponseCache:
    """The stores of one process, by version, of ``max_bytes`` together. ``clock`` counts seconds."""

    def __init__(self, meters: Meters, max_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.meters = meters
        self.clock = clock
        self._max_bytes = max_bytes
        self._stores: dict[ModelRef, _Store] = {}
        self._table: RoutingTable | None = None  # with which the stores were compared last

    def wrap(
        self, request: InferenceRequest, selection: VersionSelection, table: RoutingTable, backend: Backend
    ) -> Backend:
        """Return a backend that answers from the cache where the request and its version allow it.

        Requests that an experiment, a rollout or a shadow measures run, so that latencies are real.
        """
        route, model = selection.route, table.models.get(request.model)
        if model is None or route.version not in model.versions:
            return backend  # a step of a workflow that started before its version was removed
        if (
            not self._max_bytes
            or request.kind not in ("predict", "tensors")
            or route.stateful
            or route.phase in ("stopped", "failed")
            or selection.active_split is not None
            or (selection.routed_by_policy and model.policy.shadow is not None)
        ):
            return backend
        directives = _read_directives(request)
        if "no-store" in directives:
            return backend
        ref = ModelRef(request.model, route.version)
        reads = directives.isdisjoint(("no-cache", "max-age=0"))
        return _CachedRequest(self, self._find_store(ref, route, table), backend, reads)

    def put(self, store: _Store, key: bytes, response: InferenceResponse) -> None:
        """Store a response; the least recently used ones are removed for it."""
        if self._stores.get(store.ref) is not store:
            return  # its version was replaced while the request ran
        size = _ENTRY_BYTES + len(response.body) + sum(len(n) + len(v) for n, v in response.headers)
        store.drop(key)
        if size <= min(store.policy.max_bytes, self._max_bytes):
            while store.size + size > store.policy.max_bytes:
                store.drop_oldest()
            while sum(each.size for each in self._stores.values()) + size > self._max_bytes:
                largest = max(self._stores.values(), key=lambda each: each.size)
                largest.drop_oldest()
                self._record_size(largest)
            store.put(key, _Entry(response, size, self.clock() + store.policy.ttl_s))
        self._record_size(store)

    def _record_size(self, store: _Store) -> None:
        self.meters.set_cache_bytes(store.ref.name, store.ref.version, store.size)

    def _find_store(self, ref: ModelRef, route: VersionRoute, table: RoutingTable) -> _Store:
        if table is not self._table:
            self._table = table
            self._drop_outdated(table)
        store = self._stores.get(ref)
        if store is None:
            assert route.response_cache is not None
            store = self._stores[ref] = _Store(ref, route.response_cache, route.revision)
        return store

    def _drop_outdated(self, table: RoutingTable) -> None:
        """Drop the responses of versions that were removed or replaced."""
        for ref, store in list(self._stores.items()):
            model = table.models.get(ref.name)
            route = model.versions.get(ref.version) if model is not None else None
            if route is None or (route.response_cache, route.revision) != (store.policy, store.revision):
                del self._stores[ref]
                self.meters.set_cache_bytes(ref.name, ref.version, 0)


class _CachedRequest(Backend):
    """A request that the cache may answer. ``reads`` is false where its client demands a new response."""

    __slots__ = (
        "_backend", "_cache", "_cancel", "_key", "_leader", "_on_done", "_reads", "_request",
        "_store", "_waiting",
    )  # fmt: skip
    _on_done: OnDone
    _request: InferenceRequest

    def __init__(self, cache: ResponseCache, store: _Store, backend: Backend, reads: bool) -> None:
        self._cache = cache
        self._store = store
        self._backend = backend
        self._reads = reads
        self._key = b""
        self._leader: _CachedRequest | None = None  # for whose response it waits
        self._waiting: list[_CachedRequest] = []  # for its response
        self._cancel: Cancel | None = None

    def submit(self, request: InferenceRequest, on_done: OnDone) -> Cancel:
        self._request, self._on_done = request, on_done
        store = self._store
        self._key = key = build_key(request, store.headers)
        if self._reads:
            if (found := store.find(key, self._cache.clock())) is not None:
                self._answer(found)
                return self._withdraw
            leader = store.running.get(key)
            if leader is not None and _may_wait(request, leader._request):
                leader._waiting.append(self)
                self._leader = leader
                return self._withdraw
        store.running.setdefault(key, self)
        try:
            self._run()
        except Exception:  # also a fault of this server: no equal request may wait for this one
            self._release()
            raise
        return self._withdraw

    def _run(self) -> None:
        self._record("miss")
        self._cancel = self._backend.submit(self._request, self._complete)

    def _record(self, outcome: str) -> None:
        ref = self._store.ref
        self._cache.meters.cache_request(ref.name, ref.version, outcome)

    def _answer(self, stored: InferenceResponse) -> None:
        self._record("hit")
        self._on_done(replace(stored, headers=(*stored.headers, _HIT), timings=Timings()))

    def _complete(self, outcome: Outcome) -> None:
        stored = None
        try:
            if isinstance(outcome, InferenceResponse):
                if _is_storable(outcome):
                    self._cache.put(self._store, self._key, outcome)
                    stored = outcome
                outcome = replace(outcome, headers=(*outcome.headers, _MISS))
            self._on_done(outcome)
        finally:
            self._release(stored)

    def _withdraw(self) -> None:
        """Withdraw the request of a client that disconnected; those that wait for it run themselves."""
        if self._leader is not None:
            self._leader._waiting.remove(self)
            self._leader = None
        elif self._cancel is not None:
            self._cancel()
            self._release()

    def _release(self, stored: InferenceResponse | None = None) -> None:
        """Answer the requests that wait for this one; without a response each of them runs."""
        if self._store.running.get(self._key) is self:
            del self._store.running[self._key]
        waiting, self._waiting = self._waiting, []
        for follower in waiting:
            follower._leader = None
        for follower in waiting:
            try:
                follower._end_wait(stored)
            except Exception:  # of its client's callback: the others are answered all the same
                log.exception("%s: a response was not delivered", self._store.ref.app)

    def _end_wait(self, stored: InferenceResponse | None) -> None:
        if stored is not None:
            self._answer(stored)
            return
        try:
            self._run()
        except Exception as error:
            self._on_done(error)


def build_key(request: InferenceRequest, names: tuple[str, ...]) -> bytes:
    """Return the digest of what a handler reads of a request; ``names`` are those of headers."""
    headers = [request.headers.get(name) for name in names]
    parts = [(part.name, part.content_type, len(part.value)) for part in request.inputs]
    digest = blake2b(repr((request.kind, headers, parts)).encode("utf-8", "surrogatepass"), digest_size=32)
    for part in request.inputs:
        digest.update(part.value)
    return digest.digest()


def _read_directives(request: InferenceRequest) -> set[str]:
    """Return the directives of ``Cache-Control``."""
    control = request.headers.get("cache-control", "")
    return {directive.strip() for directive in control.lower().split(",")}


def _may_wait(request: InferenceRequest, leader: InferenceRequest) -> bool:
    """Return whether an equal request of this deadline and priority ends in time for ``request``."""
    return request.priority == leader.priority and (
        request.deadline is None or (leader.deadline is not None and leader.deadline <= request.deadline)
    )


def _is_storable(response: InferenceResponse) -> bool:
    """Return whether a response may be used again: a success that its handler has not excluded."""
    headers = {name.lower(): value.lower() for name, value in response.headers}
    control = headers.get("cache-control", "")
    excluded = "set-cookie" in headers or any(directive in control for directive in _EXCLUDING)
    return response.status == 200 and not excluded
