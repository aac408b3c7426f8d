"""A load on many models whose popularity follows Zipf's law."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from typing import Any

import httpx

INPUTS = 64
CONNECTIONS = 8


class ZipfLoad:
    """A closed loop of requests whose models follow Zipf's law with the exponent 1."""

    def __init__(self, url: str, names: Sequence[str]) -> None:
        self._url = url
        self.names = random.Random(1).sample(list(names), len(names))
        self._weights = [1 / rank for rank in range(1, len(names) + 1)]
        self.hits: list[float] = []
        self.loads: list[float] = []
        self.failed: dict[str, int] = {}

    async def run(self, seconds: float) -> None:
        """Send requests for so many seconds."""
        end = time.monotonic() + seconds
        limits = httpx.Limits(max_connections=CONNECTIONS, max_keepalive_connections=CONNECTIONS)
        async with httpx.AsyncClient(base_url=self._url, limits=limits, timeout=60) as client:
            await asyncio.gather(*(self._work(client, end, seed) for seed in range(CONNECTIONS)))

    async def _work(self, client: httpx.AsyncClient, end: float, seed: int) -> None:
        draw = random.Random(seed)
        while time.monotonic() < end:
            [name] = draw.choices(self.names, self._weights)
            await self.request(client, name, [draw.random() for _ in range(INPUTS)])

    async def request(self, client: httpx.AsyncClient, name: str, row: Sequence[float]) -> None:
        started_at = time.perf_counter()
        try:
            response = await self.send(client, name, row)
        except httpx.HTTPError as error:
            self._fail(type(error).__name__)
            return
        elapsed = time.perf_counter() - started_at
        if response.status_code != 200:
            self._fail(" ".join(f"{response.status_code} {response.text}".split())[:300])
        else:
            (self.loads if self.is_load(name, response.json()) else self.hits).append(elapsed)

    async def send(self, client: httpx.AsyncClient, name: str, row: Sequence[float]) -> httpx.Response:
        """Send a row to a model."""
        return await client.post(f"/predictions/{name}", json=row)

    def is_load(self, name: str, document: Any) -> bool:
        """Return whether a response is the first of a model since its load."""
        assert document["model"] == name
        return bool(document["first"])

    def _fail(self, reason: str) -> None:
        self.failed[reason] = self.failed.get(reason, 0) + 1


def quantiles(values: Sequence[float]) -> list[float]:
    """Return the median and the 99th percentile."""
    ordered = sorted(values) or [0.0]
    return [ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]]
