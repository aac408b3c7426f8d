"""The load generator.

*Closed loop*: each of ``connections`` clients sends its next request after the response to the last one, so
the server sets the rate. *Open loop*: requests arrive by a Poisson process of ``rate`` per second,
independent of the server. Each latency counts from the time the request was due, not from the time a
connection was free, so a stall of the server counts for every request that was due in it.

The client is httptools over asyncio: a general HTTP library costs more than the servers measured here.
"""

from __future__ import annotations

import asyncio
import gc
import math
import random
import selectors
import ssl
import time
from array import array
from collections import Counter, deque
from contextlib import suppress
from itertools import cycle
from statistics import fmean
from typing import cast
from urllib.parse import urlsplit

import httptools

from serve_app.client.prometheus_text import percentile
from serve_app.load_test.profile import LoadProfile, LoadRequest, LoadResult

_TIMEOUT_CHECK_PERIOD = 0.02  # seconds between checks for requests that timed out
_RECONNECT = 0.05  # seconds of a client's wait after a refused connection
_SELECT_LIMIT = 500  # connections up to which the open loop can use select(), whose timeouts are exact


def run(request: LoadRequest, load: LoadProfile) -> LoadResult:
    """Send the load from a new event loop and return the result."""
    loop = _new_loop(load)
    gc.collect()
    gc.freeze()  # a collection over everything that this process holds would look like the server's tail
    task = loop.create_task(measure(request, load))
    try:
        return loop.run_until_complete(task)
    except KeyboardInterrupt:
        task.cancel()
        with suppress(asyncio.CancelledError):
            loop.run_until_complete(task)
        raise
    finally:
        gc.unfreeze()
        loop.close()


async def measure(request: LoadRequest, load: LoadProfile) -> LoadResult:
    """Send the load from the running loop, whose timers may be a millisecond late; return the result."""
    return await _LoadRun(request, load).result()


def _new_loop(load: LoadProfile) -> asyncio.AbstractEventLoop:
    # epoll, and uvloop with it, rounds timers up to whole milliseconds, the size of the latencies.
    if load.rate is not None and load.connections <= _SELECT_LIMIT:
        return asyncio.SelectorEventLoop(selectors.SelectSelector())
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


class _LoadRun:
    """A running load: its phases, connections and counters."""

    def __init__(self, request: LoadRequest, load: LoadProfile) -> None:
        parts = urlsplit(request.url)
        self.load, self.check, self.wires = load, request.check, cycle(request.wires())
        self.address = (parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80))
        self.tls = ssl.create_default_context() if parts.scheme == "https" else None
        self.latencies, self.lags = array("d"), array("d")
        self.errors: Counter[str] = Counter()
        self.completed = self.within = self.begun = self.settled = 0
        self.start = self.end = math.inf  # of the measured time, on time.perf_counter's clock
        self.over = False  # nothing new is sent
        self.hung = 0
        self.idle: list[_LoadConnection] = []
        self.busy: set[_LoadConnection] = set()
        self.waiting: deque[float] = deque()  # due times of arrivals without a connection
        self.opening = 0
        self.tasks: set[asyncio.Task] = set()
        self.drained = asyncio.Event()

    async def result(self) -> LoadResult:
        load = self.load
        began = time.perf_counter()
        self.start = began + load.warmup
        self.end = self.start + load.seconds if load.seconds is not None else math.inf
        self.spawn(self.arrivals(began) if load.rate is not None else self.clients())
        sweeper = asyncio.ensure_future(self.sweep())
        try:
            await self.drained.wait()
            # An unanswered request of the warm-up is not a request of the measured time, but an error.
            self.hung = sum(c.in_flight and c.due < self.start for c in self.busy)
        finally:
            sweeper.cancel()
            for task in self.tasks:
                task.cancel()
            self.abandon_connections()
            await asyncio.gather(sweeper, *self.tasks, return_exceptions=True)
            # Before Python 3.12, wait_for ignores a cancellation that comes with its result.
            self.abandon_connections()
            await asyncio.sleep(0)  # the transports' own closing callbacks
        if self.hung:
            self.errors["unanswered"] += self.hung
        ordered = sorted(self.latencies)
        return LoadResult(
            engine="asyncio",
            connections=load.connections,
            seconds=self.end - self.start,
            requests=len(ordered),
            completed=self.completed,
            p50=percentile(ordered, 0.50),
            p90=percentile(ordered, 0.90),
            p99=percentile(ordered, 0.99),
            max=ordered[-1] if ordered else math.nan,
            errors=dict(self.errors),
            rate=load.rate,
            limit=load.limit,
            within=None if load.limit is None else self.within,
            mean=fmean(ordered) if ordered else math.nan,
            lag=percentile(sorted(self.lags), 0.99) if self.lags else 0.0,
        )

    # What is sent

    async def clients(self) -> None:
        for _ in range(self.load.connections):
            self.open()

    async def arrivals(self, due: float) -> None:
        """Send at the times of a Poisson process, independent of the server."""
        gap, rate = random.Random(self.load.seed).expovariate, self.load.rate or 1.0
        while True:
            due += gap(rate)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))  # also when late: answers must come in
            if due >= self.end or not self.may_begin(due):
                self.finish()
                return
            if self.idle:
                if due >= self.start:
                    self.lags.append(max(0.0, time.perf_counter() - due))
                self.begin(due)
                self.idle.pop().send(due)
            else:
                self.begin(due)
                self.waiting.append(due)
                if self.opening + len(self.busy) < self.load.connections:
                    self.open()

    def may_begin(self, due: float) -> bool:
        if due < self.start or self.load.requests is None:
            return True
        return self.begun < self.load.requests

    def begin(self, due: float) -> None:
        if due >= self.start:
            self.begun += 1

    def next(self, connection: _LoadConnection, now: float) -> None:
        """Send the next request over a free connection, or keep the connection idle."""
        if self.load.rate is not None:
            if self.waiting:
                connection.send(self.waiting.popleft())
            else:
                self.idle.append(connection)
        elif now < self.end and self.may_begin(now):
            self.begin(now)
            connection.send(now)
        else:
            connection.abandon()
            self.finish()

    # What comes back

    def settle(self, due: float, error: str | None) -> None:
        """One request has its outcome."""
        now = time.perf_counter()
        latency = now - due
        if error is None and self.start <= now < self.end:
            self.completed += 1
            if self.load.limit is not None and latency <= self.load.limit:
                self.within += 1
        if due >= self.start:
            self.settled += 1
            if error is None:
                self.latencies.append(latency)
            else:
                self.errors[error] += 1
            if self.load.requests is not None and self.settled >= self.load.requests:
                self.end = min(self.end, now)
                self.finish()
        if self.over:
            self.look()

    def finish(self) -> None:
        self.over = True
        self.look()

    def look(self) -> None:
        """End the run once every request of the measured time has its outcome."""
        if self.settled >= self.begun:
            self.drained.set()

    # Connections

    def abandon_connections(self) -> None:
        for connection in [*self.idle, *self.busy]:
            connection.abandon()

    def open(self) -> None:
        self.opening += 1
        self.spawn(self._open())

    async def _open(self) -> None:
        host, port = self.address
        name = host if self.tls else None
        loop = asyncio.get_running_loop()
        try:
            while not self.over or self.waiting:
                due = time.perf_counter()
                try:
                    opening = loop.create_connection(
                        lambda: _LoadConnection(self), host, port, ssl=self.tls, server_hostname=name
                    )
                    _, connection = await asyncio.wait_for(opening, self.load.timeout)
                except (OSError, asyncio.TimeoutError):
                    self.refused(due)
                    await asyncio.sleep(_RECONNECT)
                else:
                    self.next(connection, time.perf_counter())
                    return
        finally:
            self.opening -= 1

    def refused(self, due: float) -> None:
        """Count a failed connection as the failure of the request that waited for it."""
        if self.load.rate is None:
            if due < self.end and self.may_begin(due):
                self.begin(due)
                self.settle(due, "connect")
            else:
                self.finish()
        elif self.waiting:
            self.settle(self.waiting.popleft(), "connect")

    def lost(self, connection: _LoadConnection) -> None:
        """Replace a lost connection where one is needed."""
        self.busy.discard(connection)
        if connection in self.idle:
            self.idle.remove(connection)
        elif self.load.rate is None:
            if time.perf_counter() < self.end and not self.over:
                self.open()
            else:
                self.finish()
        elif len(self.waiting) > self.opening:
            self.open()

    async def sweep(self) -> None:
        """End what ran out of time, and a closed loop whose clients all hang."""
        while True:
            await asyncio.sleep(_TIMEOUT_CHECK_PERIOD)
            now = time.perf_counter()
            if self.load.rate is None and now >= self.end:
                self.finish()
            for connection in [c for c in self.busy if now - c.sent > self.load.timeout]:
                connection.fail("timeout")
            while self.waiting and now - self.waiting[0] > self.load.timeout:
                self.settle(self.waiting.popleft(), "timeout")

    def spawn(self, coroutine) -> None:
        task = asyncio.ensure_future(coroutine)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)


class _LoadConnection(asyncio.Protocol):
    """One keep-alive connection with at most one request on it."""

    def __init__(self, run: _LoadRun) -> None:
        self.run = run
        self.transport: asyncio.Transport
        self.due = self.sent = 0.0
        self.in_flight = False
        self.body: list[bytes] = []
        if run.check is not None:
            self.on_body = self.body.append  # the parser calls only what is there when it is made
        self.parser = httptools.HttpResponseParser(self)

    def send(self, due: float) -> None:
        self.due, self.sent, self.in_flight = due, time.perf_counter(), True
        self.run.busy.add(self)
        self.transport.write(next(self.run.wires))

    def fail(self, error: str) -> None:
        """End the request and its connection, on which the rest of a response may still arrive."""
        if self.in_flight:
            self.in_flight = False
            self.run.settle(self.due, error)
        self.transport.abort()

    def abandon(self) -> None:
        self.in_flight = False
        self.run = _NOBODY
        self.transport.abort()

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self.fail("protocol")

    def connection_lost(self, error: Exception | None) -> None:
        if self.in_flight:
            self.in_flight = False
            self.run.settle(self.due, "disconnect")
        self.run.lost(self)

    # httptools' side

    def on_message_complete(self) -> None:
        if not self.in_flight:
            return
        self.in_flight = False
        run, status, error = self.run, self.parser.get_status_code(), None
        if not 200 <= status < 300:
            error = f"status {status}"
        elif run.check is not None and not run.check(b"".join(self.body)):
            error = "body"
        self.body.clear()
        run.busy.discard(self)
        run.settle(self.due, error)
        if self.parser.should_keep_alive():
            run.next(self, time.perf_counter())
        else:
            self.transport.close()


class _ClosedRun(_LoadRun):
    """The run of a connection whose own run is over."""

    def __init__(self) -> None:
        self.busy = set()

    def settle(self, due: float, error: str | None) -> None: ...

    def lost(self, connection: _LoadConnection) -> None: ...


_NOBODY = _ClosedRun()
