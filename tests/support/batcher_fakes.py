"""A batcher over a model that tests control, and a clock that they move."""

import asyncio
import functools
import threading

from serve_app.domain.model import ModelRef
from serve_app.domain.request import InferenceRequest, InferenceResponse, InputPart
from serve_app.errors import (
    HandlerFailed,
)
from serve_app.runtime.batching.batcher import Batcher
from serve_app.telemetry.metrics import Meters

REF = ModelRef("m", "1.0")


def make_request(text="", **fields):
    return InferenceRequest(
        "m", inputs=(InputPart("body", text.encode(), "text/plain"),), request_id=text, **fields
    )


def texts(requests):
    return [c.inputs[0].value.decode() for c in requests]


class Model:
    """A model that answers each row with its own text, one batch for each ``release``.

    ``batches`` has the rows of each batch. ``poison`` rows make it raise; ``blocks`` makes it wait before
    every batch.
    """

    def __init__(self, poison=(), blocks=False, error=HandlerFailed):
        self.batches = []
        self.poison = set(poison)
        self.error = error
        self._permits = threading.Semaphore(0) if blocks else None
        self.started_at = asyncio.Queue()
        self.loop = asyncio.get_running_loop()

    def release(self, batches=1):
        self._permits.release(batches)

    def run(self, requests, emit):
        self.batches.append(texts(requests))
        self.loop.call_soon_threadsafe(self.started_at.put_nowait, texts(requests))
        if self._permits is not None:
            assert self._permits.acquire(timeout=60)
        failing = self.poison & set(texts(requests))
        if failing:
            return [self.error(f"{sorted(failing)} cannot be answered")] * len(requests)
        return [InferenceResponse(text.encode(), version="1.0") for text in texts(requests)]


def create_batcher(run, **settings):
    return Batcher(run, REF, settings.pop("meters", Meters()), **settings)


async def submit_and_gather(batcher, *rows):
    return await asyncio.gather(
        *(batcher.infer(row if isinstance(row, InferenceRequest) else make_request(row)) for row in rows),
        return_exceptions=True,
    )


def start_submits(batcher, *rows):
    return [
        asyncio.ensure_future(batcher.infer(row if isinstance(row, InferenceRequest) else make_request(row)))
        for row in rows
    ]


async def until(condition):
    async def turn():
        while not condition():
            await asyncio.sleep(0)

    await asyncio.wait_for(turn(), 60)


def bodies(replies):
    return [reply.body.decode() for reply in replies]


def run_in_event_loop(test):
    """Run a test's coroutine in an event loop of its own, for at most a minute."""

    @functools.wraps(test)
    def run(**fixtures):
        asyncio.run(asyncio.wait_for(test(**fixtures), 60))

    return run


class Clock:
    """A clock with timers, which a test moves."""

    def __init__(self):
        self.now = 100.0
        self.timers = []

    def __call__(self):
        return self.now

    def timer(self, delay, callback, *args):
        handle = asyncio.TimerHandle(self.now + delay, callback, args, asyncio.get_running_loop())
        self.timers.append(handle)
        return handle

    def move(self, seconds):
        self.now += seconds
        for handle in [t for t in self.timers if t.when() <= self.now + 1e-9]:
            self.timers.remove(handle)
            if not handle.cancelled():
                handle._run()


def make_prioritized_request(text, priority, **fields):
    return make_request(text, priority=priority, **fields)


async def create_paced_batcher(seconds, batches=5, **settings):
    """Return a batcher, its blocking model and its clock, after some one-row batches of ``seconds`` each."""
    clock, model = Clock(), Model(blocks=True)
    batcher = create_batcher(model.run, response_timeout=0, clock=clock, timer=clock.timer, **settings)
    for _ in range(batches):
        row = start_submits(batcher, "warm")
        await model.started_at.get()
        clock.move(seconds)
        model.release()
        await row[0]
        await asyncio.sleep(0)
    model.batches.clear()
    return batcher, model, clock
