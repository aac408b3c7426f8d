"""The service of asynchronous predictions: it queues, executes, stores and expires them, and sends webhooks.

Management owns them: a single process uses their database, a lost gateway or replica loses none of them, and
no lease is needed. An accepted request is stored. A prediction that has not ended when the process ends is
executed again: at least once. By default predictions use the data plane at the lowest priority.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from serve_app.control.async_predictions.store import AsyncPredictionStore
from serve_app.control.async_predictions.usage import StoreUsage
from serve_app.control.async_predictions.webhooks import WebhookSender
from serve_app.control.cancellation import run_to_end
from serve_app.domain.access import KeyGrant
from serve_app.domain.async_prediction import (
    AsyncPrediction,
    AsyncPredictionDocument,
    State,
    StoredRequest,
    StoredResponse,
    select_visible,
)
from serve_app.errors import (
    IdempotencyKeyReused,
    ModelNotAllowed,
    PredictionCancelled,
    PredictionLost,
    PredictionNotFound,
    ResultStoreUnavailable,
    Unavailable,
)
from serve_app.settings import AsyncPredictionSettings
from serve_app.telemetry import tracing
from serve_app.telemetry.metrics import Meters

log = logging.getLogger(__name__)

_MAX_RETRY_PAUSE = 30.0  # seconds between two attempts while no replica has capacity
_GC_INTERVAL = 5.0  # seconds between two removals of expired predictions
_STORE_RETRY_S = 5.0  # seconds between attempts to store a response


class AsyncPredictionService:
    """All asynchronous predictions. ``execute`` returns the response to a request.

    A prediction belongs to the key that created it. A ``grant`` of None stands for a caller who needs no key
    and may see all. While ``has_several_owners`` returns True, each owner has at most its share of the store.
    Every method runs on the event loop that the service is created on. A record may change during each await,
    so ``_change`` takes the present one and changes the caller's own fields only.
    """

    def __init__(
        self,
        store: AsyncPredictionStore,
        execute: Callable[[StoredRequest], Awaitable[StoredResponse]],
        webhooks: WebhookSender,
        settings: AsyncPredictionSettings,
        meters: Meters,
        has_several_owners: Callable[[], bool] = lambda: False,
    ) -> None:
        self._store = store
        self._execute = execute
        self._webhooks = webhooks
        self._settings = settings
        self._meters = meters
        self._all: dict[str, AsyncPrediction] = {}
        self._has_several_owners = has_several_owners
        self._by_key: dict[tuple[str, str, str], str] = {}  # by owner, model and Idempotency-Key
        self._usage = StoreUsage(settings, meters)
        self._queues: dict[tuple[str, str], deque[str]] = {}  # by owner and model, in order
        self._running: dict[str, asyncio.Task[StoredResponse]] = {}
        self._supervisors: dict[str, asyncio.Task[None]] = {}
        self._running_by_model = Counter[str]()
        self._running_by_owner = Counter[str]()
        # Predictions that are being stored, by owner, model and Idempotency-Key; without a key by their id.
        self._adding: dict[tuple[str, str, str], asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False
        self._traces: dict[str, str] = {}  # contexts of traced requests that wait for their webhook, by id

    async def load(self) -> None:
        """Reload stored predictions: queue unfinished ones again, and resend pending webhooks."""
        for prediction in await self._store.load():
            self._add(prediction)
            if not prediction.has_ended:
                self._enqueue(prediction)
            elif prediction.webhook_state == "pending":
                self._spawn(self._send_webhook(prediction.id))

    # Operations

    async def submit_prediction(self, request: StoredRequest) -> AsyncPredictionDocument:
        """Store a request that is executed later, and return the prediction.

        Raises AsyncQueueFull, KeyShareExceeded, IdempotencyKeyReused and BadRequest.
        """
        if request.webhook:
            self._webhooks.check(request.webhook)
        index = request.owner, request.model, request.key
        while request.key and (adding := self._adding.get(index)) is not None:
            await asyncio.wait({adding})  # it continues when its own caller disconnects
        known = self._all.get(self._by_key.get(index, ""))
        if known is None or _expired(known):
            return (await self._accept(request)).to_dict()
        if known.digest != request.digest:
            raise IdempotencyKeyReused(request.key, request.model)
        return known.to_dict()

    async def get_prediction(self, id: str, grant: KeyGrant | None) -> AsyncPredictionDocument:
        return self._find(id, grant).to_dict()

    async def get_prediction_result(
        self, id: str, grant: KeyGrant | None
    ) -> tuple[AsyncPredictionDocument, StoredResponse | None]:
        prediction = self._find(id, grant)
        if prediction.state == "cancelled":
            raise PredictionCancelled(id)
        response = await self._store.get_response(prediction) if prediction.has_ended else None
        return prediction.to_dict(), response

    async def list_predictions(
        self, grant: KeyGrant | None, limit: int, model: str, state: str
    ) -> list[AsyncPredictionDocument]:
        current = (each for each in self._all.values() if not _expired(each))
        return [each.to_dict() for each in select_visible(current, grant, limit, model, state)]

    async def cancel_prediction(self, id: str, grant: KeyGrant | None) -> AsyncPredictionDocument | None:
        """Cancel an unfinished prediction, or delete a finished one and return None."""
        prediction = self._find(id, grant)
        if prediction.has_ended:
            await run_to_end(self._spawn(self._delete([prediction])))
            return None
        if (running := self._running.get(id)) is not None:
            running.cancel()
            await asyncio.wait({self._supervisors[id]})
        elif id in (waiting := self._queues.get((prediction.owner, prediction.model), deque())):
            waiting.remove(id)
            if not waiting:
                del self._queues[prediction.owner, prediction.model]
            self._report_counts()
            # It is in no queue any more, so it must end, and that may take until the store responds.
            await asyncio.shield(self._spawn(self._end(id, "cancelled", None)))
        return self._find(id, grant).to_dict()

    async def remove_owner(self, owner: str) -> None:
        """Make an owner's predictions those of managers alone: a later key of its name is another owner."""
        if adding := [task for (added_by, *_), task in self._adding.items() if added_by == owner]:
            await asyncio.wait(adding)  # their rows and records have the owner
        for queued_by, model in [queue for queue in self._queues if queue[0] == owner]:
            waiting = self._queues.pop((queued_by, model))
            self._queues.setdefault(("", model), deque()).extend(waiting)
        for id, prediction in list(self._all.items()):
            if prediction.owner != owner:
                continue
            self._remove_key(prediction)
            self._change(id, owner="", key="")
        await self._store.remove_owner(owner)

    # Execution

    async def run(self) -> None:
        """Delete expired predictions and unused objects until cancelled."""
        await asyncio.gather(self._expire(), self._remove_objects())

    async def close(self) -> None:
        """Cancel running predictions; they are executed again after the next start."""
        self._closed = True
        tasks = [*self._running.values(), *self._supervisors.values(), *self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._webhooks.close()
        self._store.close()

    async def _expire(self) -> None:
        while True:
            expired = list(filter(_expired, self._all.values()))
            if expired:
                try:
                    await self._delete(expired)
                except Unavailable as error:
                    log.warning("Expired async predictions could not be removed; trying again: %s", error)
            await asyncio.sleep(min(_GC_INTERVAL, self._settings.retention_s))

    async def _remove_objects(self) -> None:
        """Remove objects that a crash left, then those whose removal failed; log an unusable folder."""
        clean = self._store.remove_orphans
        has_warned = False
        while True:
            try:
                await clean()
                clean, has_warned = self._store.remove_unneeded, False
            except Unavailable as error:
                if not has_warned:
                    log.warning(
                        "Large async predictions are refused or wait, until their folder is usable: %s", error
                    )
                has_warned = True
            await asyncio.sleep(_GC_INTERVAL)

    async def _accept(self, request: StoredRequest) -> AsyncPrediction:
        size = len(request.body)
        self._usage.check(request.owner, size, request.owner != "" and self._has_several_owners())
        prediction = AsyncPrediction(
            secrets.token_hex(16),
            request.model,
            request.version,
            request.request_id,
            time.time(),
            size=size,
            key=request.key,
            digest=request.digest,
            webhook=request.webhook,
            owner=request.owner,
        )

        async def store() -> None:
            self._usage.add(prediction)
            try:
                await self._store.add(prediction, request)
            finally:
                self._usage.remove(prediction)
            self._add(prediction)
            if prediction.webhook and (context := dict(request.headers).get(tracing.TRACEPARENT)):
                self._traces[prediction.id] = context
            self._enqueue(prediction)

        index = request.owner, request.model, request.key or prediction.id
        task = self._adding[index] = self._spawn(store())
        task.add_done_callback(lambda _: self._adding.pop(index))
        await run_to_end(task)  # its caller may disconnect: a stored prediction must be known
        return prediction

    def _change(self, id: str, **fields: Any) -> AsyncPrediction:
        """Change fields of the present record, and the totals; return the new record."""
        before = self._all[id]
        self._all[id] = after = replace(before, **fields)
        self._usage.remove(before)
        self._usage.add(after)
        return after

    def _add(self, prediction: AsyncPrediction) -> None:
        self._all[prediction.id] = prediction
        self._usage.add(prediction)
        if prediction.key:
            self._by_key[prediction.owner, prediction.model, prediction.key] = prediction.id

    def _enqueue(self, prediction: AsyncPrediction) -> None:
        self._queues.setdefault((prediction.owner, prediction.model), deque()).append(prediction.id)
        self._start_queued()

    def _start_queued(self) -> None:
        """Start as many predictions as the limits allow."""
        while not self._closed and len(self._supervisors) < self._settings.concurrency:
            queue = self._next_queue()
            if queue is None:
                break
            waiting = self._queues.pop(queue)
            id = waiting.popleft()
            owner, model = queue
            self._running_by_owner[owner] += 1
            self._running_by_model[model] += 1
            self._running[id] = asyncio.get_running_loop().create_task(self._run(id))
            self._supervisors[id] = self._spawn(self._supervise(id, owner, model))
            if waiting:
                self._queues[queue] = waiting  # behind the others
        self._report_counts()

    def _next_queue(self) -> tuple[str, str] | None:
        """Return the queue that is next: of the owner with the fewest running predictions.

        The queues of an owner, and owners with as many, take turns. So the backlog of one key delays the
        first prediction of another by one prediction at most.
        """
        limit = self._settings.model_concurrency
        ready = (queue for queue in self._queues if self._running_by_model[queue[1]] < limit)
        return min(ready, key=lambda queue: self._running_by_owner[queue[0]], default=None)

    async def _supervise(self, id: str, owner: str, model: str) -> None:
        try:
            try:
                response = await self._running[id]
            except asyncio.CancelledError:
                if self._closed:
                    raise
                await self._end(id, "cancelled", None)
            except PredictionLost as error:
                log.error("%s", error)
                await self._end(id, "failed", None, error.problem)
            except Exception:
                log.exception("Async prediction %s failed: a fault of this server", id)
                await self._end(id, "failed", StoredResponse(500, (), b""))
            else:
                await self._end(id, "done" if response.status < 400 else "failed", response)
        finally:
            del self._running[id], self._supervisors[id]
            self._running_by_model[model] -= 1
            self._running_by_owner[owner] -= 1
            if not self._running_by_owner[owner]:
                del self._running_by_owner[owner]
            if not self._closed:
                self._start_queued()

    async def _run(self, id: str) -> StoredResponse:
        """Execute a prediction; retry while no replica has capacity, until its queue time is over.

        Raises PredictionLost.
        """
        prediction = self._change(id, state="running", started=time.time())
        deadline = time.time() + self._settings.max_queue_time_s
        while True:
            try:
                response = await self._execute(await self._store.get_request(prediction))
                pause = response.retry_after
            except Unavailable as error:
                if isinstance(error, ResultStoreUnavailable) and time.time() + error.retry_after > deadline:
                    raise PredictionLost(id, f"{error}.") from error
                log.warning("Async prediction %s cannot be read now; trying again: %s", id, error)
                response, pause = None, error.retry_after
            if response is not None and (pause is None or time.time() + pause > deadline):
                return response
            await asyncio.sleep(min(pause or 1, _MAX_RETRY_PAUSE))

    async def _end(self, id: str, state: State, response: StoredResponse | None, error: str = "") -> None:
        """Store the outcome; a response that the folder refuses is given up after the queue time."""
        now = time.time()
        while True:
            before = self._all[id]
            outcome: dict[str, Any] = {
                "state": state,
                "ended": now,
                "expires": now + self._settings.retention_s,
                "status": response.status if response is not None else 0,
                "size": len(response.body) if response is not None else 0,
                "webhook_state": "pending" if before.webhook else "",
                "error": error,
            }
            try:
                await self._store.finish(before, replace(before, **outcome), response)
                break
            except Unavailable as why:
                log.warning(
                    "The response of async prediction %s of %s could not be stored; trying again: %s",
                    id,
                    before.model,
                    why,
                )
                if (
                    isinstance(why, ResultStoreUnavailable)
                    and time.time() > now + self._settings.max_queue_time_s
                ):
                    state, response, error = "failed", None, f"It was there, and could not be stored: {why}."
                    log.error("The response of async prediction %s of %s is lost: %s", id, before.model, why)
                    continue
            await asyncio.sleep(_STORE_RETRY_S)
        after = self._change(id, **outcome)
        self._meters.instrument("torchrelay_async_predictions_ended", after.model, state).inc()
        if after.webhook:
            self._spawn(self._send_webhook(id))

    async def _send_webhook(self, id: str) -> None:
        prediction = self._all[id]
        context = self._traces.pop(id, "")
        headers, span = tracing.begin_call(context, "webhook")
        with tracing.ended(span):
            delivered = await self._webhooks.send(prediction.webhook, id, prediction.to_dict(), headers)
        self._meters.instrument("torchrelay_webhooks", "delivered" if delivered else "failed").inc()
        if id in self._all:
            prediction = self._change(id, webhook_state="delivered" if delivered else "failed")
            with contextlib.suppress(Unavailable):  # the webhook is sent again after the next start
                await self._store.update(prediction)

    async def _delete(self, predictions: list[AsyncPrediction]) -> None:
        await self._store.remove(predictions)
        for prediction in predictions:
            if (removed := self._all.pop(prediction.id, None)) is not None:
                self._usage.remove(removed)
                self._remove_key(removed)

    def _find(self, id: str, grant: KeyGrant | None) -> AsyncPrediction:
        """Return a prediction; one of another owner does not exist for a caller who is no manager."""
        prediction = self._all.get(id)
        if prediction is None or _expired(prediction):
            raise PredictionNotFound(id)
        if grant is not None:
            if not grant.may_see(prediction.owner, prediction.model):
                raise PredictionNotFound(id)
            if not grant.covers(prediction.model):
                raise ModelNotAllowed(prediction.model)
        return prediction

    def _report_counts(self) -> None:
        queued = Counter[str]()
        for (_, model), waiting in self._queues.items():
            queued[model] += len(waiting)
        for model in {*self._running_by_model, *queued}:
            self._meters.set_async_predictions(model, queued[model], self._running_by_model[model])

    def _remove_key(self, prediction: AsyncPrediction) -> None:
        index = prediction.owner, prediction.model, prediction.key
        if self._by_key.get(index) == prediction.id:
            del self._by_key[index]

    def _spawn(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _expired(prediction: AsyncPrediction) -> bool:
    return prediction.has_ended and time.time() >= prediction.expires
