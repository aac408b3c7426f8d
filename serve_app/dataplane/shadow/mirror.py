"""Sends copies of live calls to a shadow version, and compares what it says with what was answered.

Live calls come first: a copy is offered when its caller's answer is known, which costs microseconds, and waits in a
bounded queue. Few copies are under way at once, at the lowest priority, and answers are compared in one thread.
Whatever becomes of a copy, nobody hears of it who has not asked for its figures.
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

from serve_app import traffic
from serve_app.errors import RelayError
from serve_app.policy import WHOLE, Shadow
from serve_app.shadow.comparison import Comparison, compare
from serve_app.shadow.disagreements import Disagreement, disagreement
from serve_app.shadow.figures import Figures
from serve_app.telemetry.metrics import Meters
from serve_app.types import Call, ModelRef, Reply, ReplyStream, Table, VersionRow

log = logging.getLogger("torchrelay.shadow")

IN_FLIGHT = 4  # copies of one model and live version that are with the shadow, or compared
QUEUE = 128  # copies that wait for that
MAX_BYTES = 32 << 20  # of all copies of this process, with the live answers that they are compared with


class Pair(NamedTuple):
    """What figures of a process are about: they add up with those of others that say the same."""

    model: str
    live: str  # version
    shadow: Shadow


class _Copy(NamedTuple):
    call: Call
    live: Reply
    seconds: float  # the live answer took
    deadline: float
    size: int


class _Lane:
    """The copies of the calls that one version of a model answered."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.below = round(pair.shadow.percent / 100 * WHOLE)
        self.lot = randrange(WHOLE)  # of its own: the lots by which versions are chosen would pick one version's calls
        self.queue: deque[_Copy] = deque()
        self.flying = 0
        self.figures = Figures(pair.shadow.keep)

    def turn_to(self, shadow: Shadow) -> None:
        """The same figures go on, with another share or time."""
        self.pair = self.pair._replace(shadow=shadow)
        self.below = round(shadow.percent / 100 * WHOLE)


class Mirror:
    """Made on the event loop that it runs on. ``table`` gives the table in force, ``remote`` reaches versions."""

    def __init__(
        self, table: Callable[[], Table], remote: Callable[[ModelRef, VersionRow], Any], meters: Meters
    ) -> None:
        self._table = table
        self._remote = remote
        self._meters = meters
        self._lanes: dict[tuple[str, str], _Lane] = {}
        self._retired: list[_Lane] = []  # whose figures were not taken yet
        self._bytes = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="shadow")
        self._closed = False

    def offer(self, call: Call, version: str, reply: Reply | ReplyStream | None, seconds: float) -> None:
        """A call that named no version was answered by ``version`` after ``seconds``; None: it was not.

        Returns at once, and raises nothing.
        """
        try:
            model = self._table().models.get(call.model)
            shadow = model.policy.shadow if model is not None else None
            if model is None or shadow is None or shadow.version == version or self._closed:
                return
            lane = self._lane(call.model, version, shadow)
            lane.lot = traffic.after(lane.lot)
            if lane.lot < lane.below:
                self._take_in(lane, call, reply, seconds, model.versions.get(shadow.version))
        except Exception:
            log.exception("a copy of request %s could not be made", call.request_id)

    def take(self) -> list[tuple[Pair, Figures]] | None:
        """The figures since the last time; None where there are none."""
        taken = []
        for lane in [*self._retired, *self._lanes.values()]:
            if lane.figures.counts:
                taken.append((lane.pair, lane.figures))
                lane.figures = Figures(lane.pair.shadow.keep)
        self._retired = [lane for lane in self._retired if lane.flying]
        for key, lane in list(self._lanes.items()):
            model = self._table().models.get(lane.pair.model)
            if model is None or model.policy.shadow is None or lane.pair.live not in model.versions:
                self._retire(key)
        return taken or None

    async def close(self) -> None:
        """Drop what waits and what is under way."""
        self._closed = True
        for lane in self._lanes.values():
            lane.queue.clear()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _lane(self, model: str, version: str, shadow: Shadow) -> _Lane:
        lane = self._lanes.get((model, version))
        if lane is not None:
            if lane.pair.shadow is shadow:
                return lane
            if lane.pair.shadow.terms == shadow.terms:
                lane.turn_to(shadow)
                return lane
            self._retire((model, version))
        lane = self._lanes[model, version] = _Lane(Pair(model, version, shadow))
        return lane

    def _retire(self, key: tuple[str, str]) -> None:
        lane = self._lanes.pop(key)
        self._bytes -= sum(copy.size for copy in lane.queue)
        lane.queue.clear()
        if lane.flying or lane.figures.counts:
            self._retired.append(lane)

    def _take_in(
        self, lane: _Lane, call: Call, reply: Reply | ReplyStream | None, seconds: float, row: VersionRow | None
    ) -> None:
        if reply is None:
            self._count(lane, "skipped", "live_failed")
        elif isinstance(reply, ReplyStream):
            self._count(lane, "skipped", "stream")
        elif row is None or not row.replicas:
            self._count(lane, "skipped", "no_replica")
        else:
            size = len(reply.body) + sum(len(part.value) for part in call.inputs)
            if len(lane.queue) >= QUEUE or self._bytes + size > MAX_BYTES:
                self._count(lane, "dropped", "queue_full")
                return
            self._bytes += size
            deadline = time.time() + lane.pair.shadow.timeout_s
            lane.queue.append(_Copy(call, reply, seconds, deadline, size))
            if lane.flying < IN_FLIGHT:
                lane.flying += 1
                task = asyncio.get_running_loop().create_task(self._fly(lane))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _fly(self, lane: _Lane) -> None:
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

    async def _send(self, lane: _Lane, copy: _Copy) -> None:
        ref = ModelRef(lane.pair.model, lane.pair.shadow.version)
        model = self._table().models.get(ref.name)
        row = model.versions.get(ref.version) if model is not None else None
        if row is None or not row.replicas:
            return self._count(lane, "skipped", "no_replica")
        left = copy.deadline - time.time()
        if left <= 0:
            return self._count(lane, "dropped", "deadline")
        call = replace(
            copy.call,
            version=ref.version,
            request_id=f"{copy.call.request_id}-shadow",
            deadline=copy.deadline,
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
        if isinstance(answer, ReplyStream):
            await answer.aclose()
            return self._count(lane, "error", "stream")
        found, kept = await asyncio.get_running_loop().run_in_executor(
            self._thread, _judge, lane.pair.shadow, lane.figures, copy, answer
        )
        self._meters.shadow(ref.name, ref.version, "agreed" if found.agreed else "disagreed")
        if found.measures.get("label_flipped"):
            self._meters.shadow_flip(ref.name, ref.version)
        lane.figures.compared(found, copy.seconds, seconds, kept)

    def _count(self, lane: _Lane, outcome: Any, reason: str) -> None:
        lane.figures.count(outcome, reason)
        self._meters.shadow(lane.pair.model, lane.pair.shadow.version, outcome)


def _judge(shadow: Shadow, figures: Figures, copy: _Copy, answer: Reply) -> tuple[Comparison, Disagreement | None]:
    """In the thread: how two answers compare, and what is kept of them."""
    found = compare(shadow.compare, copy.live, answer)
    if found.agreed or not figures.worst.takes(found.distance):
        return found, None
    return found, disagreement(copy.call, copy.live, answer, found, shadow.redact)
