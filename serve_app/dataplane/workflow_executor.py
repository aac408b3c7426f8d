"""One call through a workflow: its steps asked in the order of the graph, side by side where none waits for another.

It is a target like any other: the data plane gives it calls, and it asks the data plane for each step, so that every
model's policy, limits and metrics hold for steps as for callers. The call's deadline and priority go with each step.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import replace
from typing import Any

import orjson

from handlers.functions import HEADER
from handlers.parts import PARTS, join
from serve_app import handover
from serve_app.errors import (
    BadRequest,
    DeadlineExceeded,
    HandlerFailed,
    HandlerSaid,
    OfStep,
    RelayError,
    StepFailed,
    StepRefused,
    StepSaid,
    StepTimeout,
    StepUnavailable,
    Unavailable,
    WorkerDied,
)
from serve_app.graph import ALONE, REQUEST, Graph, Step
from serve_app.handover import JSON, Value
from serve_app.telemetry.metrics import Meters
from serve_app.types import Call, Input, ModelRef, Reply, ReplyStream

Ask = Callable[[Call], Awaitable[Reply | ReplyStream]]

_PAUSE = 0.05  # seconds before the second attempt; it doubles with each
_LONGEST_PAUSE = 2.0
_LONGEST_WORDS = 1000  # characters of an answer that says no
_GRACE = 0.1  # seconds in which whoever runs a step may say itself that its time is over
# Headers that speak of the request's own body.
_OF_THE_BODY = ("content-type", "content-length", "content-encoding", "transfer-encoding")

_LIKE: tuple[tuple[type[RelayError], type[RelayError]], ...] = (
    (HandlerSaid, StepSaid),
    (BadRequest, StepRefused),
    (Unavailable, StepUnavailable),
    (DeadlineExceeded, StepTimeout),
)


class Workflow:
    """``model`` answers for a step that names a model, ``function`` for one that names a function of the workflow's.

    ``most`` is how many items a step with ``each`` is asked for at most. Raises RelayError, of a step one of OfStep.
    """

    def __init__(self, ref: ModelRef, graph: Graph, model: Ask, function: Ask, meters: Meters, most: int) -> None:
        self._ref = ref
        self._graph = graph
        self._model = model
        self._function = function
        self._meters = meters
        self._most = most

    async def infer(self, call: Call) -> Reply | ReplyStream:
        if call.kind not in ("predict", "tensors"):
            raise BadRequest(f"{self._ref.name} is a workflow, which predicts and does no {call.kind}; ask its models.")
        run = _Run(self, call)
        self._meters.workflow(self._ref.name, self._ref.version, 1)
        streams = False
        try:
            reply = await run.whole()
            streams = isinstance(reply, ReplyStream)
        finally:
            if not streams:
                self._meters.workflow(self._ref.name, self._ref.version, -1)
        if isinstance(reply, ReplyStream):
            reply.at_end(lambda: self._meters.workflow(self._ref.name, self._ref.version, -1))
        return reply

    async def ask(self, call: Call, step: Step) -> Reply | ReplyStream:
        """One attempt of a step. Raises RelayError."""
        target = self._model if step.model else self._function
        if step.timeout_s is not None:
            until = time.time() + step.timeout_s
            call = call if call.deadline is not None and call.deadline < until else replace(call, deadline=until)
        if call.deadline is None:
            return await target(call)
        patience = max(0.0, call.deadline - time.time())
        try:
            return await asyncio.wait_for(target(call), patience + _GRACE)
        except asyncio.TimeoutError:
            raise DeadlineExceeded(call.model, patience) from None

    @property
    def ref(self) -> ModelRef:
        return self._ref

    @property
    def graph(self) -> Graph:
        return self._graph

    @property
    def most(self) -> int:
        return self._most

    def count(self, step: str, status: str, seconds: float) -> None:
        self._meters.step(self._ref.name, self._ref.version, step, status, seconds)


class _Run:
    """One call's way through the steps."""

    def __init__(self, workflow: Workflow, call: Call) -> None:
        self._workflow = workflow
        self._graph = workflow.graph
        self._call = call
        self._headers = {name: value for name, value in call.headers.items() if name.lower() not in _OF_THE_BODY}
        self._answers: dict[str, Reply | ReplyStream] = {}
        self._seconds: dict[str, float] = {}

    async def whole(self) -> Reply | ReplyStream:
        """Ask every step when what it waits for is there. The first that fails, or a caller that leaves, ends all."""
        waits = self._graph.waits
        running: dict[asyncio.Task[Reply | ReplyStream], str] = {}
        try:
            while waits or running:
                for name in [name for name, needs in waits.items() if needs <= self._answers.keys()]:
                    del waits[name]
                    running[asyncio.create_task(self._step(name))] = name
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    self._answers[running[task]] = task.result()
                    del running[task]
        finally:
            await _end(running)
        return self._reply()

    async def _step(self, name: str) -> Reply | ReplyStream:
        step = self._graph.steps[name]
        began = time.perf_counter()
        status = "caller_left"
        try:
            answer = await (self._each(name, step) if step.each else self._once(name, step))
            status = "ok"
            return answer
        except RelayError as error:
            status = error.reason
            raise self._of_step(name, error) from error
        finally:
            self._seconds[name] = seconds = time.perf_counter() - began
            self._workflow.count(name, status, seconds)

    async def _once(self, name: str, step: Step) -> Reply | ReplyStream:
        answer = await self._attempts(name, step, self._inputs(step), f"{self._call.request_id}/{name}")
        if isinstance(answer, ReplyStream) and self._graph.leaves != (name,):
            return await _collected(answer)
        return answer

    async def _each(self, name: str, step: Step) -> Reply:
        """The list of the step's answers to each item, in the order of the items."""
        lists = {key: handover.items(self._value(source), source) for key, source in step.dealt.items()}
        lengths = {len(items) for items in lists.values()}
        if len(lengths) > 1:
            told = ", ".join(f"{source} has {len(lists[key])}" for key, source in step.dealt.items())
            raise BadRequest(f"its lists go together item by item, and {told}.")
        count = lengths.pop()
        if count > self._workflow.most:
            raise BadRequest(
                f"it would be asked {count} times, and inference.max_workflow_items allows {self._workflow.most}."
            )
        shared = self._inputs(step) if step.inputs else ()
        gate = asyncio.Semaphore(step.parallel)

        async def one(index: int) -> Reply:
            inputs = tuple(Input(key, *items[index]) for key, items in lists.items())
            async with gate:
                id = f"{self._call.request_id}/{name}/{index}"
                answer = await self._attempts(name, step, inputs + shared, id)
                return await _collected(answer) if isinstance(answer, ReplyStream) else answer

        replies = await _together(one(index) for index in range(count))
        return Reply(join((reply.body, reply.content_type) for reply in replies), PARTS)

    async def _attempts(
        self, name: str, step: Step, inputs: tuple[Input, ...], request_id: str
    ) -> Reply | ReplyStream:
        call = self._call_of(step, inputs, request_id)
        for attempt in itertools.count():
            try:
                answer = await self._workflow.ask(call, step)
                if isinstance(answer, Reply) and answer.status >= 400:
                    raise HandlerSaid(answer.body.decode("utf-8", "replace")[:_LONGEST_WORDS], answer.status)
                return answer
            except RelayError as error:
                pause = min(_PAUSE * 2**attempt, _LONGEST_PAUSE)
                late = call.deadline is not None and time.time() + pause >= call.deadline
                if attempt >= step.retries or late or not _worth_another(error):
                    raise
                await asyncio.sleep(pause)
        raise AssertionError("unreachable")

    def _call_of(self, step: Step, inputs: tuple[Input, ...], request_id: str) -> Call:
        call = replace(self._call, inputs=inputs, headers=self._headers, request_id=request_id)
        if step.model:
            model, version = step.asks
            if call.kind == "tensors" and not all(map(handover.is_tensor, inputs)):
                call = replace(call, kind="predict", inputs=tuple(map(handover.plain, inputs)))
            return replace(call, model=model, version=version)
        ref, headers = self._workflow.ref, {**self._headers, HEADER: step.function}
        if call.kind == "tensors":
            call = replace(call, kind="predict", inputs=tuple(map(handover.plain, inputs)))
        return replace(call, model=ref.name, version=ref.version, headers=headers)

    # What steps get

    def _inputs(self, step: Step) -> tuple[Input, ...]:
        said = step.shared
        if said == REQUEST:
            return self._call.inputs
        if isinstance(said, str):
            return self._whole(said)
        return tuple(Input(name, *self._value(source)) for name, source in said.items())

    def _whole(self, source: str) -> tuple[Input, ...]:
        """All that a source has."""
        if source.partition(".")[0] == REQUEST:
            return (Input(ALONE, *self._value(source)),)
        return handover.unpacked(self._answer(source), ALONE)

    def _answer(self, step: str) -> Value:
        answer = self._answers[step]
        assert isinstance(answer, Reply)
        return answer.body, None if self._graph.torchserve else answer.content_type

    def _value(self, source: str) -> Value:
        first, _, part = source.partition(".")
        if first != REQUEST:
            return handover.sole(self._answer(source), source)
        for given in self._call.inputs:
            if not part or given.name == part:
                return given.value, given.content_type
        has = ", ".join(repr(given.name) for given in self._call.inputs) or "none"
        raise BadRequest(f"the request has no part {part!r}; its parts: {has}.")

    # What the caller gets

    def _reply(self) -> Reply | ReplyStream:
        leaves = self._graph.leaves
        if len(leaves) == 1:
            answer = self._answers[leaves[0]]
            if isinstance(answer, ReplyStream):
                head = self._timed(answer.head)
                return ReplyStream(head, answer.__aiter__())
            if answer.content_type == PARTS:
                return self._timed(replace(answer, body=orjson.dumps(self._plain(leaves[0])), content_type=JSON))
            if answer.content_type is None and self._graph.torchserve:
                answer = replace(answer, content_type=JSON)
            return self._timed(answer)
        said = {name: self._plain(name) for name in leaves}
        return self._timed(Reply(orjson.dumps(said), JSON))

    def _timed(self, reply: Reply) -> Reply:
        """The reply as the workflow's own: by its version, with the milliseconds that each step took."""
        steps = ", ".join(f"{name};dur={self._seconds[name] * 1000:.3f}" for name in self._graph.steps)
        others = tuple(header for header in reply.headers if header[0].lower() != "server-timing")
        headers = (*others, ("server-timing", steps))
        version = self._workflow.ref.version
        return Reply(reply.body, reply.content_type, reply.status, reply.phrase, headers, version)

    def _plain(self, name: str) -> Any:
        """A step's answer as it stands in a document of JSON. Raises OfStep where it cannot."""
        answer = self._answers[name]
        assert isinstance(answer, Reply)
        try:
            return handover.as_json((answer.body, answer.content_type))
        except ValueError:
            why = "its answer is neither JSON nor text, so it cannot be a part of one; let a function join the answers"
            raise self._of_step(name, HandlerFailed(why), why) from None

    def _of_step(self, name: str, error: RelayError, message: str = "") -> RelayError:
        """The error as a step's own, of the kind that it was."""
        kind = next((made for like, made in _LIKE if isinstance(error, like)), StepFailed)
        code = error.code if isinstance(error, HandlerSaid | OfStep) else 0
        detail = getattr(error, "detail", "")
        made = kind(self._workflow.ref.name, name, message or str(error), error.reason, code, detail)
        made.retry_after = error.retry_after
        return made


def _worth_another(error: RelayError) -> bool:
    """Whether the same question may be answered the next time."""
    if isinstance(error, HandlerSaid):
        return error.code >= 500
    return isinstance(error, Unavailable | WorkerDied | HandlerFailed | DeadlineExceeded)


async def _collected(stream: ReplyStream) -> Reply:
    """A streamed reply in one piece."""
    try:
        return replace(stream.head, body=b"".join([piece async for piece in stream]))
    finally:
        await stream.aclose()


async def _together(jobs: Iterable[Coroutine[Any, Any, Reply]]) -> list[Reply]:
    """What all of them return; the first error ends the others."""
    tasks = [asyncio.create_task(job) for job in jobs]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await _end(tasks)


async def _end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel what still runs, and wait until it has ended; a stream that nobody will read is closed."""
    for task in tasks:
        task.cancel()
    for left in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(left, ReplyStream):
            await left.aclose()
