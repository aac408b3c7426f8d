"""The load generator: requests in, a Result out.

*Closed loop*: ``connections`` clients, each sending its next request when it has its answer; the server
sets the pace. *Open loop*: requests arrive by a Poisson process of ``rate`` per second whether or not the
server keeps up, and each latency counts from the moment the request was due, not from when a connection
became free for it; a server that stalls for a second is charged for everybody who would have come in it.

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from urllib.parse import urlsplit

import httptools

_SWEEP = 0.02  # seconds between looks for requests that ran out of time
_RECONNECT = 0.05  # seconds that a client waits after a refused connection
_SELECT_LIMIT = 500  # connections up to which the open loop can use select(), whose timeouts are exact


@dataclass(frozen=True)
class Request:
    """What is sent, over and over."""

    url: str
    method: str = "POST"
    body: bytes = b""
    content_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)
    check: Callable[[bytes], bool] | None = None  # of every body; False counts as the error "body"
    bodies: Sequence[bytes] = ()  # sent in turn, in place of ``body``

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{self.url!r} is no http or https URL with a host.")
        if self.method == "HEAD":
            raise ValueError("HEAD cannot be measured: its answers announce a body that does not come.")

    def wires(self) -> list[bytes]:
        """The request as it goes over the wire, with each of its bodies."""
        return [self._wire(body) for body in self.bodies or (self.body,)]

    def _wire(self, body: bytes) -> bytes:
        parts = urlsplit(self.url)
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        headers = {"Host": parts.netloc.rpartition("@")[2], **self.headers}
        if body or self.method not in ("GET", "DELETE"):
            headers |= {"Content-Type": self.content_type, "Content-Length": str(len(body))}
        lines = [f"{self.method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


@dataclass(frozen=True)
class Load:
    """How it is sent, and for how long; the first bound that is reached ends the run."""

    connections: int = 1  # clients of a closed loop; the most connections of an open one
    rate: float | None = None  # requests per second; None is a closed loop
    seconds: float | None = 10.0
    requests: int | None = None
    warmup: float = 1.0  # seconds of the same load before, which are not counted
    timeout: float = 10.0  # seconds for one request, from when it was sent or joined those that wait
    limit: float | None = None  # seconds; answers within it are the goodput
    seed: int = 0  # of the arrivals

    def __post_init__(self) -> None:
        if self.seconds is None and self.requests is None:
            raise ValueError("A load needs an end: give seconds, requests, or both.")
        if self.connections < 1 or (self.rate is not None and self.rate <= 0):
            raise ValueError("A load needs at least one connection, and a rate above 0 where it has one.")


@dataclass(frozen=True)
class Result:
    """What came of it. Latencies are seconds of good answers; every other answer is an error of some kind.

    ``requests + failed`` are the requests that began while it was measured, late answers included (and
    what hung since the warm-up, as the error "unanswered"). ``completed`` and ``within`` count good
    answers that came in the measured time, whenever they began, so a throughput has no edge.

    Kinds of errors: "status 503", "connect", "disconnect", "timeout", "protocol" (no HTTP), "body" (the
    check said no), "unanswered".
    """

    engine: str
    connections: int
    seconds: float
    requests: int
    completed: int
    p50: float
    p90: float
    p99: float
    max: float
    errors: Mapping[str, int] = field(default_factory=dict)
    rate: float | None = None
    limit: float | None = None
    within: int | None = None  # of completed, how many took no longer than the limit
    mean: float = math.nan  # of the latencies, where all of them are known
    lag: float = 0.0  # p99 of how late the generator itself sent in an open loop, with a connection free

    @property
    def throughput(self) -> float:
        """Good answers a second."""
        return self.completed / self.seconds if self.seconds else 0.0

    @property
    def goodput(self) -> float | None:
        """Good answers within the limit a second; None without a limit."""
        return None if self.within is None else self.within / self.seconds if self.seconds else 0.0

    @property
    def failed(self) -> int:
        return sum(self.errors.values())


def percentile(ordered: Sequence[float], fraction: float) -> float:
    """The nearest-rank percentile of values in ascending order; NaN of none."""
    if not ordered:
        return math.nan
    return ordered[max(0, math.ceil(fraction * len(ordered)) - 1)]


def run(request: Request, load: Load) -> Result:
    """Send the load from an event loop of its own and return what came of it."""
    loop = _new_loop(load)
    gc.collect()
    gc.freeze()  # a collection over everything that this process holds would look like the server's tail
    try:
        return loop.run_until_complete(measure(request, load))
    finally:
        gc.unfreeze()
        loop.close()


async def measure(request: Request, load: Load) -> Result:
    """As ``run``, in the running loop; there, a timer may be a millisecond late."""
    return await _Run(request, load).result()


def _new_loop(load: Load) -> asyncio.AbstractEventLoop:
    if load.rate is not None and load.connections <= _SELECT_LIMIT:
        # epoll, and uvloop on it, round a timer up to whole milliseconds: as much as the latencies themselves.
        return asyncio.SelectorEventLoop(selectors.SelectSelector())
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


class _Run:
    """One load while it runs: the clock's phases, the connections, and what was counted."""

    def __init__(self, request: Request, load: Load) -> None:
        parts = urlsplit(request.url)
        self.load, self.check, self.wires = load, request.check, cycle(request.wires())
        self.address = (parts.hostname, parts.port or (443 if parts.scheme == "https" else 80))
        self.tls = ssl.create_default_context() if parts.scheme == "https" else None
        self.latencies, self.lags = array("d"), array("d")
        self.errors: Counter[str] = Counter()
        self.completed = self.within = self.begun = self.settled = 0
        self.start = self.end = math.inf  # of the measured time, on time.perf_counter's clock
        self.over = False  # nothing new is sent
        self.hung = 0
        self.idle: list[_Connection] = []
        self.busy: set[_Connection] = set()
        self.waiting: deque[float] = deque()  # due times of arrivals without a connection
        self.opening = 0
        self.tasks: set[asyncio.Task] = set()
        self.drained = asyncio.Event()

    async def result(self) -> Result:
        load = self.load
        began = time.perf_counter()
        self.start = began + load.warmup
        self.end = self.start + load.seconds if load.seconds is not None else math.inf
        self.spawn(self.arrivals(began) if load.rate is not None else self.clients())
        sweeper = asyncio.ensure_future(self.sweep())
        try:
            await self.drained.wait()
            # Sent in the warm-up and never answered: no request of the measured time, and no good news either.
            self.hung = sum(c.asked and c.due < self.start for c in self.busy)
        finally:
            sweeper.cancel()
            for task in self.tasks:
                task.cancel()
            for connection in [*self.idle, *self.busy]:
                connection.abandon()
            await asyncio.gather(sweeper, *self.tasks, return_exceptions=True)
            await asyncio.sleep(0)  # the transports' own closing callbacks
        if self.hung:
            self.errors["unanswered"] += self.hung
        ordered = sorted(self.latencies)
        return Result(
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
            lag=percentile(sorted(self.lags), 0.99) if self.lags else 0.0,
        )

    # What is sent

    async def clients(self) -> None:
        for _ in range(self.load.connections):
            self.open()

    async def arrivals(self, due: float) -> None:
        """Send at the times of a Poisson process, however the server fares."""
        gap, rate = random.Random(self.load.seed).expovariate, self.load.rate
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

    def next(self, connection: _Connection, now: float) -> None:
        """Give a free connection its next request, or let it rest."""
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
        """The run ends when every request that began in the measured time has its outcome."""
        if self.settled >= self.begun:
            self.drained.set()

    # Connections

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
                        lambda: _Connection(self), host, port, ssl=self.tls, server_hostname=name
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
        """A connection that does not come is a request's failure: the one that waited for it."""
        if self.load.rate is None:
            if due < self.end and self.may_begin(due):
                self.begin(due)
                self.settle(due, "connect")
            else:
                self.finish()
        elif self.waiting:
            self.settle(self.waiting.popleft(), "connect")

    def lost(self, connection: _Connection) -> None:
        """A connection is gone; another takes its place where one is needed."""
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
            await asyncio.sleep(_SWEEP)
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


class _Connection(asyncio.Protocol):
    """One keep-alive connection with at most one request on it."""

    def __init__(self, run: _Run) -> None:
        self.run = run
        self.transport: asyncio.Transport | None = None
        self.due = self.sent = 0.0
        self.asked = False
        self.body: list[bytes] = []
        if run.check is not None:
            self.on_body = self.body.append  # the parser calls only what is there when it is made
        self.parser = httptools.HttpResponseParser(self)

    def send(self, due: float) -> None:
        self.due, self.sent, self.asked = due, time.perf_counter(), True
        self.run.busy.add(self)
        self.transport.write(next(self.run.wires))

    def fail(self, error: str) -> None:
        """End the request, and the connection with it: what may still come on it belongs to nobody."""
        if self.asked:
            self.asked = False
            self.run.settle(self.due, error)
        self.transport.abort()

    def abandon(self) -> None:
        self.asked = False
        self.run = _NOBODY
        self.transport.abort()

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self.fail("protocol")

    def connection_lost(self, error: Exception | None) -> None:
        if self.asked:
            self.asked = False
            self.run.settle(self.due, "disconnect")
        self.run.lost(self)

    # httptools' side

    def on_message_complete(self) -> None:
        if not self.asked:
            return
        self.asked = False
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


class _Nobody:
    """Who a connection belongs to after its run is over."""

    busy: set = set()

    def settle(self, due: float, error: str | None) -> None: ...

    def lost(self, connection: _Connection) -> None: ...


_NOBODY = _Nobody()
