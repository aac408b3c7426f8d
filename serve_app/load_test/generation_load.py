"""A load of text generation over OpenAI's API: time to first token, inter-token latency, tokens per second.

Requests are streamed. *Closed loop*: ``connections`` clients, each with one request at a time. *Open loop*:
Poisson arrivals at ``rate``; the time to first token counts from the scheduled arrival. The inter-token
latency of a request is the time from its first token to its end over the tokens after the first, as
in NVIDIA's GenAI-Perf.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import httpx

from serve_app.client.prometheus_text import percentile
from serve_app.load_test.profile import LoadProfile


@dataclass(frozen=True)
class TokenLoadRequest:
    """The requests of a load: ``base_url`` ends with ``/v1``; the ``bodies`` are sent in turn.

    A body with ``messages`` is a chat completion, others are completions.
    """

    base_url: str
    bodies: Sequence[Mapping[str, Any]]
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class TokenLoadResult:
    """The result of a load of text generation. Times are seconds of requests that succeeded."""

    seconds: float
    requests: int  # that began in the measured time and succeeded
    completed: int  # in the measured time
    within: int | None  # of completed, those whose first token came within the limit
    tokens: int  # of the responses that were completed in the measured time
    ttft_p50: float
    ttft_p99: float
    itl_p50: float
    itl_p99: float
    latency_mean: float
    errors: Mapping[str, int] = field(default_factory=dict)

    @property
    def failed(self) -> int:
        return sum(self.errors.values())


@dataclass(frozen=True)
class _Generation:
    """A response: its times on time.perf_counter's clock."""

    due: float
    first: float
    last: float  # of the end, because tokens without text of their own have no event
    tokens: int


def run(request: TokenLoadRequest, load: LoadProfile) -> TokenLoadResult:
    """Send the load from a new event loop and return the result."""
    return asyncio.run(_GenerationRun(request, load).result())


class _GenerationRun:
    def __init__(self, request: TokenLoadRequest, load: LoadProfile) -> None:
        self.request, self.load = request, load
        self.bodies = cycle([_stream_options(body) for body in request.bodies])
        self.done: list[_Generation] = []
        self.errors: Counter[str] = Counter()
        self.start = self.end = math.inf

    async def result(self) -> TokenLoadResult:
        load = self.load
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=load.connections)
        client = httpx.AsyncClient(timeout=load.timeout, limits=limits, headers=self.request.headers)
        async with client as http:
            began = time.perf_counter()  # after the client has read its certificates
            self.start = began + load.warmup
            self.end = self.start + (load.seconds or 10.0)
            if load.rate is None:
                await asyncio.gather(*(self._client(http) for _ in range(load.connections)))
            else:
                await self._arrivals(http, began, load.rate)
        return self._summarize()

    async def _client(self, http: httpx.AsyncClient) -> None:
        while (now := time.perf_counter()) < self.end:
            await self._send(http, now)

    async def _arrivals(self, http: httpx.AsyncClient, due: float, rate: float) -> None:
        gap = random.Random(self.load.seed).expovariate
        tasks: list[asyncio.Task[None]] = []
        while (due := due + gap(rate)) < self.end:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            tasks.append(asyncio.ensure_future(self._send(http, due)))
        await asyncio.gather(*tasks)

    async def _send(self, http: httpx.AsyncClient, due: float) -> None:
        try:
            # Servers send comments into silent streams, so a timeout of reads would never end.
            outcome: _Generation | str = await asyncio.wait_for(self._stream(http, due), self.load.timeout)
        except (httpx.TimeoutException, asyncio.TimeoutError):
            outcome = "timeout"
        except httpx.HTTPError as error:
            outcome = "connect" if isinstance(error, httpx.ConnectError) else "disconnect"
        except (ValueError, KeyError, IndexError, TypeError):
            outcome = "protocol"
        if isinstance(outcome, str):
            if due >= self.start:
                self.errors[outcome] += 1
        else:
            self.done.append(outcome)

    async def _stream(self, http: httpx.AsyncClient, due: float) -> _Generation | str:
        body = next(self.bodies)
        route = "chat/completions" if "messages" in body else "completions"
        first, last, chunks, usage = math.nan, math.nan, 0, 0
        async with http.stream("POST", f"{self.request.base_url}/{route}", json=body) as response:
            if not response.is_success:
                await response.aread()
                return f"status {response.status_code}"
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    return "stream"
                usage = (event.get("usage") or {}).get("completion_tokens", usage)
                if event["choices"]:
                    last = time.perf_counter()  # also of the event with the reason of the end
                if any(_text(choice) for choice in event["choices"]):
                    first = last if math.isnan(first) else first
                    chunks += 1
        return _Generation(due, first, last, usage or chunks) if chunks else "empty"

    def _summarize(self) -> TokenLoadResult:
        begun = [g for g in self.done if g.due >= self.start]
        ended = [g for g in self.done if self.start <= g.last < self.end]
        limit = self.load.limit
        ttft = sorted(g.first - g.due for g in begun)
        itl = sorted((g.last - g.first) / (g.tokens - 1) for g in begun if g.tokens > 1)
        return TokenLoadResult(
            seconds=self.end - self.start,
            requests=len(begun),
            completed=len(ended),
            within=None if limit is None else sum(g.first - g.due <= limit for g in ended),
            tokens=sum(g.tokens for g in ended),
            ttft_p50=percentile(ttft, 0.50),
            ttft_p99=percentile(ttft, 0.99),
            itl_p50=percentile(itl, 0.50),
            itl_p99=percentile(itl, 0.99),
            latency_mean=sum(g.last - g.due for g in begun) / len(begun) if begun else math.nan,
            errors=dict(self.errors),
        )


def _stream_options(body: Mapping[str, Any]) -> dict[str, Any]:
    return {**body, "stream": True, "stream_options": {"include_usage": True}}


def _text(choice: Mapping[str, Any]) -> str:
    return choice.get("text") or (choice.get("delta") or {}).get("content") or ""
