"""Attacks of slow, oversized and malformed HTTP clients, and the death of HAProxy."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections import Counter
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx
import psutil

from tests.security.attack import Outcome, Target, attack

MIB = 1 << 20
HEAD = b"POST /predictions/echo HTTP/1.1\r\nHost: localhost\r\n"
CONNECTIONS = 4300


def address(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    assert parts.hostname and parts.port
    return parts.hostname, parts.port


class Crowd:
    """Raw connections that each send ``data``, and stay open until the server closes them."""

    def __init__(self, url: str, data: bytes, count: int, trickle: bytes = b"") -> None:
        self._address, self._data, self._count = address(url), data, count
        self._trickle = trickle  # sent every second
        self.answers: Counter[str] = Counter()
        self.closed: list[float] = []  # seconds after the start
        self._tasks: list[asyncio.Task[None]] = []
        self._began = time.monotonic()

    async def __aenter__(self) -> Crowd:
        self._tasks = [asyncio.create_task(self._one()) for _ in range(self._count)]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _one(self) -> None:
        try:
            reader, writer = await asyncio.open_connection(*self._address)
        except OSError as error:
            self.answers[type(error).__name__] += 1
            return
        try:
            writer.write(self._data)
            while True:
                try:
                    line = await asyncio.wait_for(reader.readline(), 1 if self._trickle else None)
                except TimeoutError:
                    writer.write(self._trickle)
                    continue
                self.answers[line.decode("latin-1").strip()[9:12] or "closed"] += 1
                await reader.read()
                break
        except OSError:
            self.answers["reset"] += 1
        finally:
            writer.transport.abort()
        self.closed.append(time.monotonic() - self._began)


async def probe(target: Target, seconds: float, interval: float = 1.25, timeout: float = 5) -> list[float]:
    """Send a prediction every ``interval`` seconds; return the latencies of those with status 200."""
    latencies = []
    async with httpx.AsyncClient(timeout=timeout, limits=httpx.Limits(max_keepalive_connections=0)) as client:

        async def one() -> None:
            began = time.monotonic()
            with contextlib.suppress(httpx.HTTPError):
                answer = await client.post(
                    f"{target.inference}/predictions/echo", content=b"x", headers=target.headers()
                )
                if answer.status_code == 200:
                    latencies.append(time.monotonic() - began)

        tasks = []
        for _ in range(round(seconds / interval)):
            tasks.append(asyncio.create_task(one()))
            await asyncio.sleep(interval)
        await asyncio.gather(*tasks)
    return latencies


def summarize(latencies: list[float], sent: int) -> str:
    slowest = max(latencies, default=0.0)
    return f"{len(latencies)} of {sent} requests answered, slowest {slowest:.2f} s"


def crowd_attack(
    target: Target, url: str, data: bytes, count: int, seconds: float, trickle: bytes = b""
) -> tuple[Crowd, list[float]]:
    async def run() -> tuple[Crowd, list[float]]:
        async with Crowd(url, data, count, trickle) as crowd:
            return crowd, await probe(target, seconds, seconds / 20)

    return asyncio.run(run())


@attack("http", "4,300 unfinished request heads for 25 s", "0 of 20 requests answered", keys=False)
def unfinished_heads(target: Target) -> Outcome:
    crowd, latencies = crowd_attack(target, target.inference, HEAD, CONNECTIONS, 25)
    return Outcome(
        f"{summarize(latencies, 20)}; {len(crowd.closed)} closed {dict(crowd.answers)}", len(latencies) == 20
    )


@attack("http", "4,300 idle connections for 25 s", "0 of 20 requests answered", keys=False)
def idle_connections(target: Target) -> Outcome:
    crowd, latencies = crowd_attack(target, target.inference, b"", CONNECTIONS, 25)
    closed = len(crowd.closed)
    return Outcome(
        f"{summarize(latencies, 20)}; {closed} closed", len(latencies) == 20 and closed == CONNECTIONS
    )


@attack("http", "500 unfinished heads on the management port", "none closed within 15 s", keys=False)
def unfinished_management_heads(target: Target) -> Outcome:
    crowd, _ = crowd_attack(
        target, target.management, b"GET /models HTTP/1.1\r\nHost: localhost\r\n", 500, 15
    )
    return Outcome(f"{len(crowd.closed)} of 500 closed within 15 s", len(crowd.closed) == 500)


@attack("http", "500 bodies at one byte a second", "no answer within 35 s, connections open", keys=False)
def slow_bodies(target: Target) -> Outcome:
    data = HEAD + b"Content-Length: 1000000\r\n\r\n"
    crowd, latencies = crowd_attack(target, target.inference, data, 500, 35, trickle=b"x")
    after = f"answers within 35 s: {dict(crowd.answers)}; {summarize(latencies, 20)}"
    return Outcome(after, crowd.answers["408"] == 500 and len(latencies) == 20)


async def exchange(url: str, data: bytes, timeout: float = 5) -> str:
    """Return the status codes of the answers to raw bytes, "-" for none."""
    reader, writer = await asyncio.open_connection(*address(url))
    received = b""
    try:
        with contextlib.suppress(OSError):
            writer.write(data)
            await writer.drain()
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(timeout):
                while chunk := await reader.read(1 << 16):
                    received += chunk
    finally:
        writer.transport.abort()
    statuses = [part[:3].decode() for part in received.split(b"HTTP/1.1 ")[1:]]
    return "+".join(statuses) or "-"


LARGE = {
    "100,000 headers": HEAD + b"a: b\r\n" * 100_000 + b"\r\n",
    "200 headers": HEAD + b"a: b\r\n" * 200 + b"\r\n",
    "header of 1 MB": HEAD + b"a: " + b"b" * MIB + b"\r\n\r\n",
    "header of 70 KB": HEAD + b"a: " + b"b" * 70_000 + b"\r\n\r\n",
    "URL of 100 KB": b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
}


@attack(
    "http",
    "oversized request heads on all ports",
    "100,000 headers accepted by the management port",
    keys=False,
)
def oversized_heads(target: Target) -> Outcome:
    async def run() -> dict[str, tuple[str, str]]:
        ports = (target.inference, target.management)
        return {
            name: tuple([await exchange(port, data) for port in ports])  # type: ignore[misc]
            for name, data in LARGE.items()
        }

    answers = asyncio.run(run())
    accepted = {"400", "414", "431"}
    after = "; ".join(f"{name} {'/'.join(statuses)}" for name, statuses in answers.items())
    return Outcome(after, all(set(statuses) <= accepted for statuses in answers.values()))


AMBIGUOUS = {
    "CL and TE": b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /x HTTP/1.1\r\n\r\n",
    "two CL": b"Content-Length: 3\r\nContent-Length: 5\r\n\r\nabcde",
    "CL +3": b"Content-Length: +3\r\n\r\nabc",
    "CL 3,5": b"Content-Length: 3,5\r\n\r\nabcde",
    "TE xchunked": b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "TE twice": b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n",
    "space before colon": b"Content-Length : 3\r\n\r\nabc",
    "NUL": b"A: b\0c\r\nContent-Length: 3\r\n\r\nabc",
    "bare CR": b"A: b\rc\r\nContent-Length: 3\r\n\r\nabc",
    "negative chunk": b"Transfer-Encoding: chunked\r\n\r\n-3\r\nabc\r\n0\r\n\r\n",
    "chunk overflow": b"Transfer-Encoding: chunked\r\n\r\n10000000000000003\r\nabc\r\n0\r\n\r\n",
}


@attack("http", "ambiguous message framing (request smuggling)", "one answer to each", keys=False)
def ambiguous_framing(target: Target) -> Outcome:
    async def run() -> dict[str, list[str]]:
        ports = (target.inference, target.management)
        return {
            name: [await exchange(port, HEAD + data, 2) for port in ports] for name, data in AMBIGUOUS.items()
        }

    answers = asyncio.run(run())
    after = "; ".join(f"{name} {'/'.join(statuses)}" for name, statuses in answers.items())
    # One answer at most: a second one would be that to a smuggled request.
    return Outcome(after, all("+" not in status for pair in answers.values() for status in pair))


@attack("http", "chunk extensions of 1 MiB and 1,000 pipelined requests", "others served", keys=False)
def extensions_and_pipelines(target: Target) -> Outcome:
    chunked = HEAD + b"Transfer-Encoding: chunked\r\n\r\n1;" + b"a" * MIB + b"\r\nx\r\n0\r\n\r\n"
    pipeline = (
        (HEAD + b"Content-Length: 1\r\n\r\nx") * 999
        + HEAD
        + b"Connection: close\r\nContent-Length: 1\r\n\r\nx"
    )

    async def run() -> tuple[str, int, list[float]]:
        other = asyncio.create_task(probe(target, 5, 0.25))
        extended = await exchange(target.inference, chunked)
        count = (await exchange(target.inference, pipeline, 20)).count("200")
        return extended, count, await other

    extended, count, latencies = asyncio.run(run())
    after = f"extension {extended}; {count} pipelined answers; {summarize(latencies, 20)}"
    return Outcome(after, len(latencies) == 20)


@attack("http", "300 clients that do not read 1 MiB each", "+ 124 MiB until they disconnect", keys=False)
def slow_readers(target: Target) -> Outcome:
    request = b"GET /predictions/wide HTTP/1.1\r\nHost: localhost\r\n\r\n"
    before = target.memory()

    async def run() -> tuple[int, list[float]]:
        streams = []
        for _ in range(300):
            reader, writer = await asyncio.open_connection(*address(target.inference), limit=1)
            writer.write(request)
            streams.append((reader, writer))
        latencies = await probe(target, 10, 0.5)
        memory = target.memory() - before
        for _, writer in streams:
            writer.transport.abort()
        return memory, latencies

    memory, latencies = asyncio.run(run())
    return Outcome(f"+ {memory >> 20} MiB; {summarize(latencies, 20)}", len(latencies) == 20)


async def stall(target: Target, path: str, content_type: str, body: bytes) -> tuple[int, float]:
    """Return the status of a request with this body, and the slowest of the small requests beside it."""
    async with httpx.AsyncClient(timeout=60, headers=target.headers()) as client:
        headers = {"content-type": content_type}
        task = asyncio.ensure_future(client.post(target.inference + path, content=body, headers=headers))
        slowest = 0.0
        while not task.done():
            began = time.monotonic()
            await client.post(f"{target.inference}/predictions/echo", content=b"x")
            slowest = max(slowest, time.monotonic() - began)
            await asyncio.sleep(0.005)
        return (await task).status_code, slowest


def bodies() -> Iterator[tuple[str, str, str, bytes]]:
    """Yield bodies of up to 6 MB, just below the limit, with what answers them and their type."""
    form, predictions = "application/x-www-form-urlencoded", "/predictions/echo"
    yield "form of 1,500,000 fields", predictions, form, b"a=b&" * 1_500_000
    yield "form of one field", predictions, form, b"a=" + b"%41" * 2_000_000
    part = b"--x\r\nContent-Disposition: form-data; name=a\r\n\r\n\r\n"
    yield "100,000 parts", predictions, "multipart/form-data; boundary=x", part * 100_000 + b"--x--\r\n"
    numbers = b"1," * 3_000_000 + b"1"
    tensor = b'{"name": "a", "shape": [3000001], "datatype": "FP32", "data": [' + numbers + b"]}"
    yield "JSON of numbers", "/v2/models/echo/infer", "application/json", b'{"inputs": [' + tensor + b"]}"
    nested = b"[" * 100_000 + b"]" * 100_000
    yield "JSON 100,000 levels deep", "/v2/models/echo/infer", "application/json", nested


@attack(
    "http",
    "large and nested bodies beside small requests",
    "a form of 1,500,000 fields holds the loop for 7.2 s",
    keys=False,
)
def large_bodies(target: Target) -> Outcome:
    after, resisted = [], True
    for name, path, content_type, body in bodies():
        status, slowest = asyncio.run(stall(target, path, content_type, body))
        after.append(f"{name}: {status}, others {slowest:.2f} s")
        resisted &= status in (200, 400) and slowest < 0.5
    return Outcome("; ".join(after), resisted)


def find(target: Target, *words: str) -> psutil.Process:
    """Return the youngest process of the server whose command line contains the words."""
    found = []
    for process in target.processes():
        with contextlib.suppress(psutil.Error):
            command = " ".join(process.cmdline())
            if all(word in command for word in words):
                found.append(process)
    return max(found, key=lambda process: process.create_time())


def outage(target: Target, victim: psutil.Process, seconds: float = 15) -> tuple[float, Counter[str]]:
    """Kill a process under 50 requests a second; return the longest gap between successes, and the others."""
    others: Counter[str] = Counter()
    gap, last = 0.0, time.monotonic()

    async def run() -> None:
        nonlocal gap, last
        limits = httpx.Limits(max_keepalive_connections=0)
        async with httpx.AsyncClient(timeout=5, limits=limits) as client:

            async def one() -> None:
                nonlocal gap, last
                try:
                    answer = await client.post(
                        f"{target.inference}/predictions/echo", content=b"x", headers=target.headers()
                    )
                except httpx.HTTPError as error:
                    others[type(error).__name__] += 1
                    return
                if answer.status_code == 200:
                    now = time.monotonic()
                    gap, last = max(gap, now - last), now
                else:
                    others[str(answer.status_code)] += 1

            tasks = []
            for number in range(round(seconds * 50)):
                if number == 50:
                    last = time.monotonic()
                    gap = 0.0
                    victim.send_signal(signal.SIGKILL)
                tasks.append(asyncio.create_task(one()))
                await asyncio.sleep(0.02)
            await asyncio.gather(*tasks)

    asyncio.run(run())
    return gap, others


def death(target: Target, *words: str) -> Outcome:
    gap, others = outage(target, find(target, *words))
    wrong = {status for status in others if status.isdigit()} - {"503"}
    return Outcome(f"no answer for {gap:.1f} s; others {dict(others)}", gap <= 2 and not wrong)


@attack("http", "kill -9 of HAProxy", "no answer for 5.9 s; 27 times 404", keys=False)
def haproxy_death(target: Target) -> Outcome:
    return death(target, "haproxy", "-f")


@attack("http", "kill -9 of HAProxy's manager", "no answer for 5.5 s; 27 times 404", keys=False)
def manager_death(target: Target) -> Outcome:
    outcome = death(target, "HAProxyManager")
    running = sum("-db" in command(process) for process in target.processes())
    return Outcome(f"{outcome.after}; {running} HAProxy", outcome.resisted and running == 1)


def command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
