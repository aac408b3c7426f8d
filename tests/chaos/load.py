"""An open-loop load over every protocol, with the outcome of each request.

Requests are due by a Poisson process that does not depend on the server. A latency counts from the time at
which its request was due, and a request that is never answered is an outcome, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass

import aiohttp
import grpc
import grpc.aio

from serve_app.proto.inference_pb2 import PredictionResponse, PredictionsRequest

OK = "ok"
WRONG = {"status 404", "grpc NOT_FOUND", "body"}  # never the response for a model that exists
TIMEOUT_S = 10.0  # of one request
_BODY = b"chaos"
_DETAIL = 150  # characters of an error that are kept
_SERVICE = "/org.pytorch.serve.grpc.inference.InferenceAPIsService/"
# Without these bounds a channel waits up to two minutes before it connects to a restarted server.
_CHANNEL = [("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 500)]


@dataclass(frozen=True)
class Outcome:
    """One request: when it was due (time.monotonic), its kind ("ok", "status 503", "connect", …), seconds."""

    stream: str
    due: float
    kind: str
    seconds: float
    arm: str = ""  # of the experiment that counted it
    detail: str = ""  # the beginning of an error's body

    @property
    def is_ok(self) -> bool:
        return self.kind == OK


Response = tuple[str, str, str]  # the kind, the arm, and the beginning of an error's body
Send = Callable[[], Awaitable[Response]]


@dataclass(frozen=True)
class Stream:
    """Requests of one kind: name, rate per second, and the method of ``Senders`` that sends one."""

    name: str
    rate: float
    path: str


STREAMS = (
    Stream("http", 20.0, "http"),  # HAProxy, then a replica of ``echo``
    Stream("gateway", 10.0, "gateway"),  # HAProxy, the gateway, then a replica of ``split``
    Stream("http stream", 2.0, "http_stream"),
    Stream("grpc", 10.0, "grpc"),
    Stream("grpc stream", 2.0, "grpc_stream"),
)


class Senders:
    """The clients of one load, on its event loop, of the models ``echo``, ``split`` and ``letters``."""

    def __init__(self, url: str, grpc_target: str) -> None:
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        self._http = aiohttp.ClientSession(
            url, timeout=timeout, connector=aiohttp.TCPConnector(limit=0, force_close=False)
        )
        self._channel = grpc.aio.insecure_channel(grpc_target, options=_CHANNEL)
        decode = PredictionResponse.FromString
        encode = PredictionsRequest.SerializeToString
        self._unary = self._channel.unary_unary(_SERVICE + "Predictions", encode, decode)
        self._streaming = self._channel.unary_stream(_SERVICE + "StreamPredictions", encode, decode)

    async def close(self) -> None:
        await self._http.close()
        await self._channel.close()

    async def http(self) -> Response:
        return await self._post("echo", {_BODY})

    async def gateway(self) -> Response:
        return await self._post("split", {b"1.0", b"2.0"})

    async def http_stream(self) -> Response:
        return await self._post("letters", {_BODY})

    async def grpc(self) -> Response:
        return await self._call("echo", self._predict)

    async def grpc_stream(self) -> Response:
        return await self._call("letters", self._stream)

    async def _post(self, model: str, expected: set[bytes]) -> Response:
        try:
            async with self._http.post(f"/predictions/{model}", data=_BODY) as response:
                body = await response.read()
        except aiohttp.ClientConnectorError:
            return "connect", "", ""
        except aiohttp.ClientError:
            return "disconnect", "", ""
        except asyncio.TimeoutError:
            return "timeout", "", ""
        arm = response.headers.get("x-torchrelay-arm", "")
        if response.status == 200 and body in expected:
            return OK, arm, ""
        kind = "body" if response.status == 200 else f"status {response.status}"
        return kind, arm, body[:_DETAIL].decode(errors="replace")

    async def _predict(self, request: PredictionsRequest) -> bytes:
        return bytes((await self._unary(request, timeout=TIMEOUT_S)).prediction)

    async def _stream(self, request: PredictionsRequest) -> bytes:
        return b"".join([chunk.prediction async for chunk in self._streaming(request, timeout=TIMEOUT_S)])

    async def _call(self, model: str, send: Callable[[PredictionsRequest], Awaitable[bytes]]) -> Response:
        try:
            body = await send(PredictionsRequest(model_name=model, input={"data": _BODY}))
        except grpc.aio.AioRpcError as error:
            # TorchServe's code for a missing model is INTERNAL; only the text tells it from a failure.
            detail = (error.details() or "")[:_DETAIL]
            missing = "not found" in detail.lower()
            return "grpc NOT_FOUND" if missing else f"grpc {error.code().name}", "", detail
        return (OK, "", "") if body == _BODY else ("body", "", repr(body[:_DETAIL]))


class OpenLoop:
    """The load of ``STREAMS`` in a thread of its own, between ``__enter__`` and ``__exit__``."""

    def __init__(self, url: str, grpc_target: str, scale: float = 1.0, seed: int = 0) -> None:
        self.outcomes: list[Outcome] = []
        self._where = (url, grpc_target)
        self._scale = scale
        self._seed = seed
        self._over = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="open loop")

    def __enter__(self) -> OpenLoop:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def ok_since(self, since: float) -> bool:
        """Return whether every stream has answers to requests due since then, and nothing but answers."""
        recent = [outcome for outcome in tuple(self.outcomes) if outcome.due >= since]
        answered = {outcome.stream for outcome in recent}
        return len(answered) == len(STREAMS) and all(outcome.is_ok for outcome in recent)

    async def _run(self) -> None:
        async with self._senders() as senders:
            running: set[asyncio.Task[None]] = set()
            loops = [self._arrivals(stream, getattr(senders, stream.path), running) for stream in STREAMS]
            await asyncio.gather(*loops)
            while running:
                await asyncio.wait(running)

    @contextlib.asynccontextmanager
    async def _senders(self) -> AsyncIterator[Senders]:
        senders = Senders(*self._where)
        try:
            yield senders
        finally:
            await senders.close()

    async def _arrivals(self, stream: Stream, send: Send, running: set[asyncio.Task[None]]) -> None:
        gap = random.Random(f"{self._seed} {stream.name}").expovariate
        due = time.monotonic()
        while not self._over.is_set():
            due += gap(stream.rate * self._scale)
            while (wait := due - time.monotonic()) > 0 and not self._over.is_set():
                await asyncio.sleep(min(wait, 0.1))
            if not self._over.is_set():
                task = asyncio.create_task(self._one(stream.name, due, send))
                running.add(task)
                task.add_done_callback(running.discard)

    async def _one(self, name: str, due: float, send: Send) -> None:
        kind, arm, detail = await send()
        self.outcomes.append(Outcome(name, due, kind, time.monotonic() - due, arm, detail))


# Figures of outcomes


def unavailable_seconds(outcomes: Sequence[Outcome]) -> float:
    """Return the longest time of any stream without an answer to a request that was due in it.

    It counts from the first failed request to the next answered one, or to the last outcome.
    """
    longest = 0.0
    for name in {outcome.stream for outcome in outcomes}:
        began: float | None = None
        ordered = sorted((o for o in outcomes if o.stream == name), key=lambda o: o.due)
        for outcome in ordered:
            if not outcome.is_ok:
                began = outcome.due if began is None else began
                longest = max(longest, outcome.due - began)
            elif began is not None:
                longest, began = max(longest, outcome.due - began), None
    return longest


def failures(outcomes: Sequence[Outcome]) -> dict[str, int]:
    """Return the number of failed requests by stream and kind, such as "http: status 503"."""
    counts = Counter(f"{outcome.stream}: {outcome.kind}" for outcome in outcomes if not outcome.is_ok)
    return dict(sorted(counts.items()))


def by_second(outcomes: Sequence[Outcome], start: float) -> list[dict[str, object]]:
    """Return for every second since ``start`` and every stream the kinds and the longest latency."""
    rows: dict[tuple[int, str], list[Outcome]] = {}
    for outcome in outcomes:
        rows.setdefault((int(outcome.due - start), outcome.stream), []).append(outcome)
    return [
        {
            "second": second,
            "stream": stream,
            "kinds": dict(Counter(outcome.kind for outcome in group)),
            "longest": round(max(outcome.seconds for outcome in group), 3),
        }
        for (second, stream), group in sorted(rows.items())
    ]
