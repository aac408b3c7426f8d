"""Loads of requests, and a monitor of this machine's stalls."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter

import httpx


class Load:
    """A closed loop over keep-alive connections in its own thread, with a count of every response."""

    def __init__(self, url: str, connections: int) -> None:
        self.url, self.connections = url, connections
        self.answers: Counter[tuple[int | str, str]] = Counter()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def failed(self) -> dict[tuple[int | str, str], int]:
        return {answer: n for answer, n in self.answers.items() if answer[0] != 200}

    async def _run(self) -> None:
        limits = httpx.Limits(max_connections=self.connections, max_keepalive_connections=self.connections)
        async with httpx.AsyncClient(limits=limits, timeout=60) as client:
            await asyncio.gather(*(self._one(client) for _ in range(self.connections)))

    async def _one(self, client: httpx.AsyncClient) -> None:
        while not self._stop.is_set():
            try:
                answer = await client.post(self.url, content=b"x")
                self.answers[answer.status_code, answer.text[:80]] += 1
            except httpx.HTTPError as error:
                self.answers[type(error).__name__, str(error)] += 1


class Trickle(Load):
    """A load of twenty requests a second: enough to notice failures, too little to disturb."""

    async def _one(self, client: httpx.AsyncClient) -> None:
        while not self._stop.is_set():
            answer = await client.post(self.url, content=b"x")
            self.answers[answer.status_code, answer.text[:80]] += 1
            await asyncio.sleep(0.05)


class Pulse:
    """A monitor of stalls of this machine: a sleep of 10 ms that took longer."""

    def __init__(self) -> None:
        self._late: list[tuple[float, float]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Pulse:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            began = time.monotonic()
            time.sleep(0.01)
            ended = time.monotonic()
            if ended - began > 0.1:
                self._late.append((began, ended))

    def stalled_seconds(self, since: float) -> float:
        """Return the stalled seconds since then, on time.monotonic's clock."""
        time.sleep(0.05)  # this one may have gone on first
        return sum(ended - max(began, since) for began, ended in self._late if ended > since)
