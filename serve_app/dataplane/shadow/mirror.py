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

log = logging.getLogger("torchrelay.shadow")

MAX_IN_FLIGHT = 4  # copies of one model and live version that are with the shadow, or compared
MAX_QUEUED = 128  # copies that wait for that
MAX_BYTES = 32 << 20  # of all copies of this process, with the live answers that they are compared with


class ShadowPair(NamedTuple):
    """The key of statistics: those of several processes add up if it is equal."""

    model: str
    live: str  # version
    shadow: ShadowPolicy


class _MirroredRequest(NamedTuple):
    call: InferenceRequest
    live: InferenceResponse
    seconds: float  # the live answer took
    deadline: float  # in seconds of time.monotonic()
    size: int


class _MirrorQueue:
    """The copies of the requests that one version of a model served."""

    def __init__(self, pair: ShadowPair) -> None:
        self.pair = pair
        self.below = round(pair.shadow.percent / 100 * BUCKET_COUNT)
        self.lot = randrange(
            BUCKET_COUNT
        )  # of its own: the lots by which versions are chosen would pick one version's calls
        self.queue: deque[_MirroredRequest] = deque()
        self.flying = 0
        self.figures = ShadowStats(pair.shadow.keep)

    def turn_to(self, shadow: ShadowPolicy) -> None:
        """Continue the same statistics with another share or timeout."""
        self.pair = self.pair._replace(shadow=shadow)
        self.below = round(shadow.percent / 100 * BUCKET_COUNT)


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
        self._lanes: dict[tuple[str, str], _MirrorQueue] = {}
        self._retired: list[_MirrorQueue] = []  # whose figures were not taken yet
        self._bytes = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="shadow")
        self._closed = False

    def offer(
        self,
        call: InferenceRequest,
        version: str,
        reply: InferenceResponse | ResponseStream | None,
        seconds: float,
    ) -> None:
        """Offer a copy of a request that named no version; ``version`` served it in ``seconds``; ``reply``
        None: it failed.

        This method returns at once and raises nothing.
        """
        try:
            model = self._table().models.get(call.model)
            shadow = model.policy.shadow if model is not None else None
            if model is None or shadow is None or shadow.version == version or self._closed:
                return
            lane = self._lane(call.model, version, shadow)
            lane.lot = version_router.next_bucket_cursor(lane.lot)
            if lane.lot < lane.below:
                self._take_in(lane, call, reply, seconds, model.versions.get(shadow.version))
        except Exception:
            log.exception("a copy of request %s could not be made", call.request_id)

    def drain(self) -> list[tuple[ShadowPair, ShadowStats]] | None:
        """Return the statistics since the last call; None where there are none."""
        taken = []
        for lane in [*self._retired, *self._lanes.values()]:
            if lane.figures.counts:
                taken.append((lane.pair, lane.figures))
                lane.figures = ShadowStats(lane.pair.shadow.keep)
        self._retired = [lane for lane in self._retired if lane.flying]
        for key, lane in list(self._lanes.items()):
            model = self._table().models.get(lane.pair.model)
            if model is None or model.policy.shadow is None or lane.pair.live not in model.versions:
                self._retire(key)
        return taken or None

    async def close(self) -> None:
        """Drop the queued copies, and cancel those in flight."""
        self._closed = True
        for lane in self._lanes.values():
            lane.queue.clear()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _lane(self, model: str, version: str, shadow: ShadowPolicy) -> _MirrorQueue:
        lane = self._lanes.get((model, version))
        if lane is not None:
            if lane.pair.shadow is shadow:
                return lane
            if lane.pair.shadow.stats_key == shadow.stats_key:
                lane.turn_to(shadow)
                return lane
            self._retire((model, version))
        lane = self._lanes[model, version] = _MirrorQueue(ShadowPair(model, version, shadow))
        return lane

    def _retire(self, key: tuple[str, str]) -> None:
        lane = self._lanes.pop(key)
        self._bytes -= sum(copy.size for copy in lane.queue)
        lane.queue.clear()
        if lane.flying or lane.figures.counts:
            self._retired.append(lane)

    def _take_in(
        self,
        lane: _MirrorQueue,
        call: InferenceRequest,
        reply: InferenceResponse | ResponseStream | None,
        seconds: float,
        row: VersionRoute | None,
    ) -> None:
        if reply is None:
            self._count(lane, "skipped", "live_failed")
        elif isinstance(reply, ResponseStream):
            self._count(lane, "skipped", "stream")
        elif row is None or not row.replicas:
            self._count(lane, "skipped", "no_replica")
        else:
            size = len(reply.body) + sum(len(part.value) for part in call.inputs)
            if len(lane.queue) >= MAX_QUEUED or self._bytes + size > MAX_BYTES:
                self._count(lane, "dropped", "queue_full")
                return
            self._bytes += size
            deadline = time.monotonic() + lane.pair.shadow.timeout_s
            lane.queue.append(_MirroredRequest(call, reply, seconds, deadline, size))
            if lane.flying < MAX_IN_FLIGHT:
                lane.flying += 1
                task = asyncio.get_running_loop().create_task(self._fly(lane))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _fly(self, lane: _MirrorQueue) -> None:
        try:
            while lane.queue:
                copy = lane.queue.popleft()
                try:
                    await self._send(lane, copy)
                except Exception:
                    log.exception("the shadow of request %s failed", copy.call.request_id)
                    self._count(lane, "error", "internal")
                finally:
                    self._bytes -= copy.size
        finally:
            lane.flying -= 1

    async def _send(self, lane: _MirrorQueue, copy: _MirroredRequest) -> None:
        ref = ModelRef(lane.pair.model, lane.pair.shadow.version)
        model = self._table().models.get(ref.name)
        row = model.versions.get(ref.version) if model is not None else None
        if row is None or not row.replicas:
            return self._count(lane, "skipped", "no_replica")
        left = copy.deadline - time.monotonic()
        if left <= 0:
            return self._count(lane, "dropped", "deadline")
        call = replace(
            copy.call,
            version=ref.version,
            request_id=f"{copy.call.request_id}-shadow",
            deadline=time.time() + left,
            priority="shadow",
        )
        started = time.perf_counter()
        try:
            answer = await asyncio.wait_for(self._remote(ref, row).infer(call), left)
        except asyncio.TimeoutError:
            return self._count(lane, "error", "deadline")
        except RelayError as error:
            return self._count(lane, "error", error.reason)
        seconds = time.perf_counter() - started
        self._meters.shadow_latency(ref.name, ref.version, seconds)
        if isinstance(answer, ResponseStream):
            await answer.aclose()
            return self._count(lane, "error", "stream")
        found, kept = await asyncio.get_running_loop().run_in_executor(
            self._thread, _judge, lane.pair.shadow, lane.figures, copy, answer
        )
        self._meters.shadow(ref.name, ref.version, "agreed" if found.agreed else "disagreed")
        if found.measures.get("label_flipped"):
            self._meters.shadow_flip(ref.name, ref.version)
        lane.figures.record_comparison(found, copy.seconds, seconds, kept)

    def _count(self, lane: _MirrorQueue, outcome: Any, reason: str) -> None:
        lane.figures.count(outcome, reason)
        self._meters.shadow(lane.pair.model, lane.pair.shadow.version, outcome)


def _judge(
    shadow: ShadowPolicy, figures: ShadowStats, copy: _MirroredRequest, answer: InferenceResponse
) -> tuple[ResponseComparison, Mismatch | None]:
    """Compare two responses in the thread, and build the mismatch that is stored."""
    found = compare(shadow.compare, copy.live, answer)
    if found.agreed or not figures.worst_mismatches.accepts(found.distance):
        return found, None
    return found, build_mismatch(copy.call, copy.live, answer, found, shadow.redact)
