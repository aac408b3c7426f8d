"""The execution of one request by a workflow: steps run in the order of the graph, in parallel where
possible.

A workflow is a backend of the data plane, and runs each step through the data plane. Every model's policy,
limits and metrics thus hold for steps as for clients. Each step has the request's deadline and priority.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import replace
from typing import Any

from handlers.loading.workflow_functions import FUNCTION_HEADER
from handlers.multipart import PARTS_CONTENT_TYPE, join_parts
from serve_app.dataplane import workflow_step_io
from serve_app.dataplane.workflow_step_io import JSON, Value
from serve_app.domain import exact_json
from serve_app.domain.model import ModelRef
from serve_app.domain.request import InferenceRequest, InferenceResponse, InputPart, ResponseStream
from serve_app.domain.workflow_graph import DEFAULT_INPUT_NAME, REQUEST, WorkflowGraph, WorkflowStep
from serve_app.errors import (
    BadRequest,
    DeadlineExceeded,
    HandlerFailed,
    HandlerRejected,
    RelayError,
    ReplicaDied,
    StepBadRequest,
    StepFailed,
    StepRejected,
    StepTimeout,
    StepUnavailable,
    Unavailable,
    WorkflowStepError,
)
from serve_app.telemetry import tracing
from serve_app.telemetry.metrics import Meters

StepBackend = Callable[[InferenceRequest], Awaitable[InferenceResponse | ResponseStream]]

_BACKOFF_S = 0.05  # seconds before the second attempt; it doubles with each
_MAX_BACKOFF_S = 2.0
_MAX_MESSAGE_LENGTH = 1000  # characters of an error response
_GRACE = 0.1  # seconds in which the backend may report the timeout itself
# Headers that describe the body of the whole request.
_BODY_HEADERS = ("content-type", "content-length", "content-encoding", "transfer-encoding")

_STEP_ERRORS: tuple[tuple[type[RelayError], type[RelayError]], ...] = (
    (HandlerRejected, StepRejected),
    (BadRequest, StepBadRequest),
    (Unavailable, StepUnavailable),
    (DeadlineExceeded, StepTimeout),
)


class WorkflowExecutor:
    """A backend that runs a workflow: ``model`` runs steps that name a model, ``function`` those that name a
    function.

    ``max_items`` limits the items of a step with ``each``. Raises RelayError; an error of a step is a
    WorkflowStepError.
    """

    def __init__(
        self,
        ref: ModelRef,
        graph: WorkflowGraph,
        model: StepBackend,
        function: StepBackend,
        meters: Meters,
        max_items: int,
    ) -> None:
        self.ref = ref
        self.graph = graph
        self._model = model
        self._function = function
        self._meters = meters
        self.max_items = max_items

    async def infer(self, call: InferenceRequest) -> InferenceResponse | ResponseStream:
        if call.kind not in ("predict", "tensors"):
            raise BadRequest(
                f"{self.ref.name} is a workflow, which predicts and does no {call.kind}; ask its models."
            )
        run = _WorkflowRun(self, call)
        self._meters.workflow(self.ref.name, self.ref.version, 1)
        streams = False
        try:
            reply = await run.whole()
            streams = isinstance(reply, ResponseStream)
        finally:
            if not streams:
                self._meters.workflow(self.ref.name, self.ref.version, -1)
        if isinstance(reply, ResponseStream):
            reply.add_done_callback(lambda: self._meters.workflow(self.ref.name, self.ref.version, -1))
        return reply

    async def run_attempt(
        self, call: InferenceRequest, step: WorkflowStep
    ) -> InferenceResponse | ResponseStream:
        """Run one attempt of a step. Raises RelayError."""
        target = self._model if step.model else self._function
        if step.timeout_s is not None:
            until = time.time() + step.timeout_s
            call = (
                call if call.deadline is not None and call.deadline < until else replace(call, deadline=until)
            )
        if call.deadline is None:
            return await target(call)
        timeout = max(0.0, call.deadline - time.time())
        try:
            return await asyncio.wait_for(target(call), timeout + _GRACE)
        except asyncio.TimeoutError:
            raise DeadlineExceeded(call.model, timeout) from None

    def record_step(self, step: str, status: str, seconds: float) -> None:
        self._meters.step(self.ref.name, self.ref.version, step, status, seconds)


class _WorkflowRun:
    """The execution of one request."""

    def __init__(self, workflow: WorkflowExecutor, call: InferenceRequest) -> None:
        self._workflow = workflow
        self._graph = workflow.graph
        self._call = call
        self._headers = {
            name: value for name, value in call.headers.items() if name.lower() not in _BODY_HEADERS
        }
        self._answers: dict[str, InferenceResponse | ResponseStream] = {}
        self._seconds: dict[str, float] = {}

    async def whole(self) -> InferenceResponse | ResponseStream:
        """Run every step as soon as its inputs are available.

        The first failure, or a disconnect of the client, cancels all steps.
        """
        waits = self._graph.dependencies
        running: dict[asyncio.Task[InferenceResponse | ResponseStream], str] = {}
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

    async def _step(self, name: str) -> InferenceResponse | ResponseStream:
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
            self._workflow.record_step(name, status, seconds)

    async def _once(self, name: str, step: WorkflowStep) -> InferenceResponse | ResponseStream:
        answer = await self._attempts(name, step, self._inputs(step), f"{self._call.request_id}/{name}")
        if isinstance(answer, ResponseStream) and self._graph.leaves != (name,):
            return await _collected(answer)
        return answer

    async def _each(self, name: str, step: WorkflowStep) -> InferenceResponse:
        """Run the step for each item, and return the list of responses in the order of the items."""
        lists = {
            key: workflow_step_io.split_items(self._value(source), source)
            for key, source in step.item_sources.items()
        }
        lengths = {len(items) for items in lists.values()}
        if len(lengths) > 1:
            list_sizes = ", ".join(
                f"{source} has {len(lists[key])}" for key, source in step.item_sources.items()
            )
            raise BadRequest(f"its lists go together item by item, and {list_sizes}.")
        count = lengths.pop()
        if count > self._workflow.max_items:
            raise BadRequest(
                f"it would run {count} times, and "
                f"inference.max_workflow_items allows {self._workflow.max_items}."
            )
        shared = self._inputs(step) if step.inputs else ()
        gate = asyncio.Semaphore(step.parallel)

        async def one(index: int) -> InferenceResponse:
            inputs = tuple(InputPart(key, *items[index]) for key, items in lists.items())
            async with gate:
                id = f"{self._call.request_id}/{name}/{index}"
                answer = await self._attempts(name, step, inputs + shared, id)
                return await _collected(answer) if isinstance(answer, ResponseStream) else answer

        replies = await _together(one(index) for index in range(count))
        return InferenceResponse(
            join_parts((reply.body, reply.content_type) for reply in replies), PARTS_CONTENT_TYPE
        )

    async def _attempts(
        self, name: str, step: WorkflowStep, inputs: tuple[InputPart, ...], request_id: str
    ) -> InferenceResponse | ResponseStream:
        call, span = tracing.begin(self._call_of(step, inputs, request_id), f"step {name}")
        with tracing.ended(span):
            return await self._repeat(call, step)

    async def _repeat(self, call: InferenceRequest, step: WorkflowStep) -> InferenceResponse | ResponseStream:
        for attempt in itertools.count():
            try:
                answer = await self._workflow.run_attempt(call, step)
                if isinstance(answer, InferenceResponse) and answer.status >= 400:
                    raise HandlerRejected(
                        answer.body.decode("utf-8", "replace")[:_MAX_MESSAGE_LENGTH], answer.status
                    )
                return answer
            except RelayError as error:
                pause = min(_BACKOFF_S * 2**attempt, _MAX_BACKOFF_S)
                late = call.deadline is not None and time.time() + pause >= call.deadline
                if attempt >= step.retries or late or not _worth_another(error):
                    raise
                await asyncio.sleep(pause)
        raise AssertionError("unreachable")

    def _call_of(
        self, step: WorkflowStep, inputs: tuple[InputPart, ...], request_id: str
    ) -> InferenceRequest:
        call = replace(self._call, inputs=inputs, headers=self._headers, request_id=request_id)
        if step.model:
            model, version = step.model_and_version
            if call.kind == "tensors" and not all(map(workflow_step_io.is_tensor, inputs)):
                call = replace(
                    call, kind="predict", inputs=tuple(map(workflow_step_io.without_tensors, inputs))
                )
            return replace(call, model=model, version=version)
        ref, headers = self._workflow.ref, {**self._headers, FUNCTION_HEADER: step.function}
        if call.kind == "tensors":
            call = replace(call, kind="predict", inputs=tuple(map(workflow_step_io.without_tensors, inputs)))
        return replace(call, model=ref.name, version=ref.version, headers=headers)

    # What steps get

    def _inputs(self, step: WorkflowStep) -> tuple[InputPart, ...]:
        source_spec = step.shared_inputs
        if source_spec == REQUEST:
            return self._call.inputs
        if isinstance(source_spec, str):
            return self._whole(source_spec)
        return tuple(InputPart(name, *self._value(source)) for name, source in source_spec.items())

    def _whole(self, source: str) -> tuple[InputPart, ...]:
        """Return all parts of a source."""
        if source.partition(".")[0] == REQUEST:
            return (InputPart(DEFAULT_INPUT_NAME, *self._value(source)),)
        return workflow_step_io.unpack_inputs(self._answer(source), DEFAULT_INPUT_NAME)

    def _answer(self, step: str) -> Value:
        answer = self._answers[step]
        assert isinstance(answer, InferenceResponse)
        return answer.body, None if self._graph.torchserve else answer.content_type

    def _value(self, source: str) -> Value:
        first, _, part = source.partition(".")
        if first != REQUEST:
            return workflow_step_io.single_value(self._answer(source), source)
        for given in self._call.inputs:
            if not part or given.name == part:
                return given.value, given.content_type
        has = ", ".join(repr(given.name) for given in self._call.inputs) or "none"
        raise BadRequest(f"the request has no part {part!r}; its parts: {has}.")

    # What the caller gets

    def _reply(self) -> InferenceResponse | ResponseStream:
        leaves = self._graph.leaves
        if len(leaves) == 1:
            answer = self._answers[leaves[0]]
            if isinstance(answer, ResponseStream):
                head = self._timed(answer.head)
                return ResponseStream(head, answer.__aiter__())
            if answer.content_type == PARTS_CONTENT_TYPE:
                return self._timed(
                    replace(answer, body=exact_json.dumps(self._plain(leaves[0])), content_type=JSON)
                )
            if answer.content_type is None and self._graph.torchserve:
                answer = replace(answer, content_type=JSON)
            return self._timed(answer)
        parts = {name: self._plain(name) for name in leaves}
        return self._timed(InferenceResponse(exact_json.dumps(parts), JSON))

    def _timed(self, reply: InferenceResponse) -> InferenceResponse:
        """Return the response with the workflow's version, and with the milliseconds of each step."""
        steps = ", ".join(f"{name};dur={self._seconds[name] * 1000:.3f}" for name in self._graph.steps)
        others = tuple(header for header in reply.headers if header[0].lower() != "server-timing")
        headers = (*others, ("server-timing", steps))
        version = self._workflow.ref.version
        return InferenceResponse(reply.body, reply.content_type, reply.status, reply.phrase, headers, version)

    def _plain(self, name: str) -> Any:
        """Return a step's response as JSON data. Raises WorkflowStepError where that is impossible."""
        answer = self._answers[name]
        assert isinstance(answer, InferenceResponse)
        try:
            return workflow_step_io.to_json((answer.body, answer.content_type))
        except ValueError:
            why = (
                "its answer is neither JSON nor text, so it cannot be a part of one; "
                "let a function join the answers"
            )
            raise self._of_step(name, HandlerFailed(why), why) from None

    def _of_step(self, name: str, error: RelayError, message: str = "") -> RelayError:
        """Return the error as a WorkflowStepError of the same kind."""
        kind = next((made for like, made in _STEP_ERRORS if isinstance(error, like)), StepFailed)
        code = error.code if isinstance(error, HandlerRejected | WorkflowStepError) else 0
        detail = getattr(error, "detail", "")
        made = kind(self._workflow.ref.name, name, message or str(error), error.reason, code, detail)
        made.retry_after = error.retry_after
        return made


def _worth_another(error: RelayError) -> bool:
    """Return whether a retry may succeed."""
    if isinstance(error, HandlerRejected):
        return error.code >= 500
    return isinstance(error, Unavailable | ReplicaDied | HandlerFailed | DeadlineExceeded)


async def _collected(stream: ResponseStream) -> InferenceResponse:
    """Return a streamed response as one body."""
    try:
        return replace(stream.head, body=b"".join([piece async for piece in stream]))
    finally:
        await stream.aclose()


async def _together(jobs: Iterable[Coroutine[Any, Any, InferenceResponse]]) -> list[InferenceResponse]:
    """Run all coroutines and return their results; the first error cancels the others."""
    tasks = [asyncio.create_task(job) for job in jobs]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await _end(tasks)


async def _end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel the running tasks, wait for their end, and close streams that will not be read."""
    for task in tasks:
        task.cancel()
    for left in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(left, ResponseStream):
            await left.aclose()
