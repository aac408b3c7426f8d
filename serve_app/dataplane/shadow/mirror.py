"""Sends copies of live requests to a shadow version, and compares its responses with the live ones.

Live requests have precedence: a copy is offered after the live response, which costs microseconds, and waits
in a bounded queue. Few copies run at once, at the lowest priority, and responses are compared in one thread.
The outcome of a copy is visible in the statistics only.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from random import randrange
from typing import Any, NamedTuple

from serve_app.dataplane.routing import version_router
from serve_app.dataplane.shadow.comparison import ResponseComparison, compare
from serve_app.dataplane.shadow.mismatches import Mismatch, build_mismatch
from serve_app.dataplane.shadow.stats import ShadowStats
from serve_app.domain.model import ModelRef
from serve_app.domain.request import InferenceRequest, InferenceResponse, ResponseStream
from serve_app.domain.routing_table import RoutingTable, VersionRoute
from serve_app.domain.traffic_policy import BUCKET_COUNT, ShadowPolicy
from serve_app.errors import RelayError
from serve_app.telemetry.metrics import Meters

log = logging.getLogger(__name__)

MAX_IN_FLIGHT = 4  # copies of one model and live version that are with the shadow, or compared
MAX_QUEUED = 128  # copies that wait for that
MAX_BYTES = 32 << 20  # of all copies of this process, with the live responses


class ShadowPair(NamedTuple):
    """The key of statistics: those of several processes add up if it is equal."""

    model: str
    live: str  # version
    shadow: ShadowPolicy


class _MirroredRequest(NamedTuple):
    request: InferenceRequest
    live: InferenceResponse
    seconds: float  # of the live response
    deadline: float  # in seconds of time.monotonic()
    size: int


class _MirrorQueue:
    """The copies of the requests that one version of a model served."""

    def __init__(self, pair: ShadowPair) -> None:
        self.pair = pair
        self.bucket_limit = round(pair.shadow.percent / 100 * BUCKET_COUNT)
        # A cursor of its own: that of the version selection would copy the requests of one version alone.
        self.bucket = randrange(BUCKET_COUNT)
        self.waiting: deque[_MirroredRequest] = deque()
        self.in_flight = 0
        self.stats = ShadowStats(pair.shadow.keep)

    def update(self, shadow: ShadowPolicy) -> None:
        """Continue the same statistics with another share or timeout."""
        self.pair = self.pair._replace(shadow=shadow)
        self.bucket_limit = round(shadow.percent / 100 * BUCKET_COUNT)


class ShadowMirror:
    """The mirror of one process; it is created on its event loop.

    ``table`` returns the current routing table, ``remote`` reaches versions.
    """

    def __init__(
        self,
        table: Callable[[], RoutingTable],
        remote: Callable[[ModelRef, VersionRoute], Any],
        meters: Meters,
    ) -> None:
        self._table = table
        self._remote = remote
        self._meters = meters
        self._queues: dict[tuple[str, str], _MirrorQueue] = {}
        self._retired: list[_MirrorQueue] = []  # whose stats were not taken yet
        self._bytes = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="shadow")
        self._closed = False

    def offer(
        self,
        request: InferenceRequest,
        version: str,
        response: InferenceResponse | ResponseStream | None,
        seconds: float,
    ) -> None:
        """Offer a copy of a request that named no version; ``version`` served it in ``seconds``; ``response``
        None: it failed.

        This method returns at once and raises nothing.
        """
        try:
            model = self._table().models.get(request.model)
            shadow = model.policy.shadow if model is not None else None
            if model is None or shadow is None or shadow.version == version or self._closed:
                return
            mirror_queue = self._find_queue(request.model, version, shadow)
            mirror_queue.bucket = version_router.next_bucket_cursor(mirror_queue.bucket)
            if mirror_queue.bucket < mirror_queue.bucket_limit:
                self._enqueue(mirror_queue, request, response, seconds, model.versions.get(shadow.version))
        except Exception:
            log.exception("a copy of request %s could not be made", request.request_id)

    def drain(self) -> list[tuple[ShadowPair, ShadowStats]] | None:
        """Return the statistics since the last call; None where there are none."""
        taken = []
        for mirror_queue in [*self._retired, *self._queues.values()]:
            if mirror_queue.stats.counts:
                taken.append((mirror_queue.pair, mirror_queue.stats))
                mirror_queue.stats = ShadowStats(mirror_queue.pair.shadow.keep)
        self._retired = [mirror_queue for mirror_queue in self._retired if mirror_queue.in_flight]
        for key, mirror_queue in list(self._queues.items()):
            model = self._table().models.get(mirror_queue.pair.model)
            if model is None or model.policy.shadow is None or mirror_queue.pair.live not in model.versions:
                self._retire(key)
        return taken or None

    async def close(self) -> None:
        """Drop the queued copies, and cancel those in flight."""
        self._closed = True
        for mirror_queue in self._queues.values():
            mirror_queue.waiting.clear()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _find_queue(self, model: str, version: str, shadow: ShadowPolicy) -> _MirrorQueue:
        mirror_queue = self._queues.get((model, version))
        if mirror_queue is not None:
            if mirror_queue.pair.shadow is shadow:
                return mirror_queue
            if mirror_queue.pair.shadow.stats_key == shadow.stats_key:
                mirror_queue.update(shadow)
                return mirror_queue
            self._retire((model, version))
        mirror_queue = self._queues[model, version] = _MirrorQueue(ShadowPair(model, version, shadow))
        return mirror_queue

    def _retire(self, key: tuple[str, str]) -> None:
        mirror_queue = self._queues.pop(key)
        self._bytes -= sum(copy.size for copy in mirror_queue.waiting)
        mirror_queue.waiting.clear()
        if mirror_queue.in_flight or mirror_queue.stats.counts:
            self._retired.append(mirror_queue)

    def _enqueue(
        self,
        mirror_queue: _MirrorQueue,
        request: InferenceRequest,
        response: InferenceResponse | ResponseStream | None,
        seconds: float,
        route: VersionRoute | None,
    ) -> None:
        if response is None:
            self._count(mirror_queue, "skipped", "live_failed")
        elif isinstance(response, ResponseStream):
            self._count(mirror_queue, "skipped", "stream")
        elif route is None or not route.replicas:
            self._count(mirror_queue, "skipped", "no_replica")
        else:
            size = len(response.body) + sum(len(part.value) for part in request.inputs)
            if len(mirror_queue.waiting) >= MAX_QUEUED or self._bytes + size > MAX_BYTES:
                self._count(mirror_queue, "dropped", "queue_full")
                return
            self._bytes += size
            deadline = time.monotonic() + mirror_queue.pair.shadow.timeout_s
            mirror_queue.waiting.append(_MirroredRequest(request, response, seconds, deadline, size))
            if mirror_queue.in_flight < MAX_IN_FLIGHT:
                mirror_queue.in_flight += 1
                task = asyncio.get_running_loop().create_task(self._send_waiting(mirror_queue))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _send_waiting(self, mirror_queue: _MirrorQueue) -> None:
        try:
            while mirror_queue.waiting:
                copy = mirror_queue.waiting.popleft()
                try:
                    await self._send(mirror_queue, copy)
                except Exception:
                    log.exception("the shadow of request %s failed", copy.request.request_id)
                    self._count(mirror_queue, "error", "internal")
                finally:
                    self._bytes -= copy.size
        finally:
            mirror_queue.in_flight -= 1

    async def _send(self, mirror_queue: _MirrorQueue, copy: _MirroredRequest) -> None:
        ref = ModelRef(mirror_queue.pair.model, mirror_queue.pair.shadow.version)
        model = self._table().models.get(ref.name)
        route = model.versions.get(ref.version) if model is not None else None
        if route is None or not route.replicas:
            return self._count(mirror_queue, "skipped", "no_replica")
        left = copy.deadline - time.monotonic()
        if left <= 0:
            return self._count(mirror_queue, "dropped", "deadline")
        request = replace(
            copy.request,
            version=ref.version,
            request_id=f"{copy.request.request_id}-shadow",
            deadline=time.time() + left,
            priority="shadow",
        )
        started = time.perf_counter()
        try:
            shadow_response = await asyncio.wait_for(self._remote(ref, route).infer(request), left)
        except asyncio.TimeoutError:
            return self._count(mirror_queue, "error", "deadline")
        except RelayError as error:
            return self._count(mirror_queue, "error", error.reason)
        seconds = time.perf_counter() - started
        self._meters.instrument("torchrelay_shadow_latency_seconds", ref.name, ref.version).observe(seconds)
        if isinstance(shadow_response, ResponseStream):
            await shadow_response.aclose()
            return self._count(mirror_queue, "error", "stream")
        found, kept = await asyncio.get_running_loop().run_in_executor(
            self._thread, _compare, mirror_queue.pair.shadow, mirror_queue.stats, copy, shadow_response
        )
        self._meters.shadow(ref.name, ref.version, "agreed" if found.agreed else "disagreed")
        if found.measures.get("label_flipped"):
            self._meters.instrument("torchrelay_shadow_label_flips", ref.name, ref.version).inc()
        mirror_queue.stats.record_comparison(found, copy.seconds, seconds, kept)

    def _count(self, mirror_queue: _MirrorQueue, outcome: Any, reason: str) -> None:
        mirror_queue.stats.count(outcome, reason)
        self._meters.shadow(mirror_queue.pair.model, mirror_queue.pair.shadow.version, outcome)


def _compare(
    shadow: ShadowPolicy, stats: ShadowStats, copy: _MirroredRequest, shadow_response: InferenceResponse
) -> tuple[ResponseComparison, Mismatch | None]:
    """Compare two responses in the thread, and build the mismatch that is stored."""
    found = compare(shadow.compare, copy.live, shadow_response)
    if found.agreed or not stats.worst_mismatches.accepts(found.distance):
        return found, None
    return found, build_mismatch(copy.request, copy.live, shadow_response, found, shadow.redact)
