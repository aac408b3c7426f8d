"""Predictions that are answered later: taken in, run beside live traffic, kept, told of, forgotten.

Management owns them: one process has their database, none of them is lost with a gateway or a replica, and no lease is
needed. What it has taken in is stored; what had not ended when it ended itself is run again: at least once. They run
through a data plane like any call, by default at the lowest priority that a caller may ask for.
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

from serve_app.control.deferrals import StoredDeferrals
from serve_app.control.webhooks import Webhooks
from serve_app.deferral import Answer, Deferral, Request, State
from serve_app.errors import (
    DeferralCancelled,
    DeferralLost,
    DeferralNotFound,
    KeyReused,
    NoRoomForDeferrals,
    ResultsUnreachable,
    Unavailable,
    WrongModel,
)
from serve_app.settings import AsynchronousSettings
from serve_app.telemetry.metrics import Meters
from serve_app.types import matches

log = logging.getLogger("torchrelay.management")

_LONGEST_PAUSE = 30.0  # seconds between two attempts at one that nobody has room for
_SWEEP = 5.0  # seconds between looks at what has expired
_STORE_AGAIN = 5.0  # seconds between attempts to store an answer


class Deferrals:
    """``answer`` says what a door says to a request. Runs on the event loop that it is made on."""

    def __init__(
        self,
        stored: StoredDeferrals,
        answer: Callable[[Request], Awaitable[Answer]],
        webhooks: Webhooks,
        settings: AsynchronousSettings,
        meters: Meters,
    ) -> None:
        self._stored = stored
        self._answer = answer
        self._webhooks = webhooks
        self._settings = settings
        self._meters = meters
        self._all: dict[str, Deferral] = {}
        self._by_key: dict[tuple[str, str], str] = {}
        self._coming = Counter[str]()  # how many, and how many bytes, are being stored
        self._bytes = 0
        self._waiting: dict[str, deque[str]] = {}  # by model, in order
        self._running: dict[str, asyncio.Task[Answer]] = {}
        self._carried: dict[str, asyncio.Task[None]] = {}
        self._of_model = Counter[str]()
        self._keyed = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False

    async def load(self) -> None:
        """Take up what is stored: what had not ended waits again, and whoever was to be told is told."""
        for deferral in await self._stored.load():
            self._know(deferral)
            if not deferral.has_ended:
                self._wait(deferral)
            elif deferral.told == "pending":
                self._spawn(self._tell(deferral.id))

    # What a control plane asks

    async def defer(self, request: Request) -> dict[str, Any]:
        """Take a request in; stored when this returns. Raises NoRoomForDeferrals, KeyReused and BadRequest."""
        if request.webhook:
            self._webhooks.check(request.webhook)
        if not request.key:
            return (await self._store(request)).document()
        async with self._keyed:
            known = self._all.get(self._by_key.get((request.model, request.key), ""))
            if known is not None and not _expired(known):
                if known.digest != request.digest:
                    raise KeyReused(request.key, request.model)
                return known.document()
            return (await self._store(request)).document()

    async def deferral(self, id: str, within: tuple[str, ...]) -> dict[str, Any]:
        return self._find(id, within).document()

    async def deferred_answer(self, id: str, within: tuple[str, ...]) -> tuple[dict[str, Any], Answer | None]:
        """How far it is, and the answer where there is one.

        Raises DeferralNotFound, DeferralCancelled, DeferralLost and ResultsUnreachable.
        """
        deferral = self._find(id, within)
        if deferral.state == "cancelled":
            raise DeferralCancelled(id)
        answer = await self._stored.answer(deferral) if deferral.has_ended else None
        return deferral.document(), answer

    async def cancel_deferral(self, id: str, within: tuple[str, ...]) -> dict[str, Any] | None:
        """Stop one that has not ended, however far it is; forget one that has, which is then None."""
        deferral = self._find(id, within)
        if deferral.has_ended:
            await self._forget([deferral])
            return None
        if (running := self._running.get(id)) is not None:
            running.cancel()
            await asyncio.wait({self._carried[id]})
        elif id in self._waiting.get(deferral.model, ()):
            self._waiting[deferral.model].remove(id)
            self._count()
            await self._end(id, "cancelled", None)
        return self._find(id, within).document()

    # The life of one

    async def run(self) -> None:
        """Forget what has expired, and clean up where it lay, until cancelled."""
        await asyncio.gather(self._expire(), self._clean())

    async def close(self) -> None:
        """What runs is broken off, and runs again in the next life."""
        self._closed = True
        tasks = [*self._running.values(), *self._carried.values(), *self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._webhooks.close()
        self._stored.close()

    async def _expire(self) -> None:
        while True:
            gone = list(filter(_expired, self._all.values()))
            if gone:
                try:
                    await self._forget(gone)
                except Unavailable as error:
                    log.warning("what has expired could not be removed, and will be: %s", error)
            await asyncio.sleep(min(_SWEEP, self._settings.keep))

    async def _clean(self) -> None:
        """Remove what a life before left, then what could not be removed; tell where the folder is of no use."""
        clean = self._stored.sweep
        complained = False
        while True:
            try:
                await clean()
                clean, complained = self._stored.tidy, False
            except Unavailable as error:
                if not complained:
                    log.warning("large asynchronous predictions are refused or have to wait: %s", error)
                complained = True
            await asyncio.sleep(_SWEEP)

    async def _store(self, request: Request) -> Deferral:
        size = len(request.body)
        limit = self._settings
        if len(self._all) + self._coming["predictions"] >= limit.max_predictions:
            raise NoRoomForDeferrals("asynchronous.max_predictions", limit.max_predictions)
        if self._bytes + self._coming["bytes"] + size > limit.max_bytes:
            raise NoRoomForDeferrals("asynchronous.max_bytes", limit.max_bytes)
        deferral = Deferral(
            secrets.token_hex(16),
            request.model,
            request.version,
            request.request_id,
            time.time(),
            size=size,
            key=request.key,
            digest=request.digest,
            webhook=request.webhook,
        )

        async def store() -> None:
            self._coming.update(predictions=1, bytes=size)
            try:
                await self._stored.add(deferral, request)
            finally:
                self._coming.subtract(predictions=1, bytes=size)
            self._know(deferral)
            self._wait(deferral)

        await asyncio.shield(self._spawn(store()))  # its caller may leave: what is stored is known
        return deferral

    def _know(self, deferral: Deferral) -> None:
        self._all[deferral.id] = deferral
        self._bytes += deferral.size
        if deferral.key:
            self._by_key[deferral.model, deferral.key] = deferral.id

    def _wait(self, deferral: Deferral) -> None:
        self._waiting.setdefault(deferral.model, deque()).append(deferral.id)
        self._begin()

    def _begin(self) -> None:
        """Run what there is room for: the models take turns, each in order."""
        limit = self._settings
        for model in list(self._waiting):
            if self._closed or len(self._carried) >= limit.concurrency:
                break
            waiting = self._waiting.pop(model)
            room = min(limit.model_concurrency - self._of_model[model], limit.concurrency - len(self._carried))
            for _ in range(min(room, len(waiting))):
                id = waiting.popleft()
                self._of_model[model] += 1
                self._running[id] = asyncio.get_running_loop().create_task(self._answered(id))
                self._carried[id] = self._spawn(self._carry(id))
            if waiting:
                self._waiting[model] = waiting  # behind the others
        self._count()

    async def _carry(self, id: str) -> None:
        model = self._all[id].model
        try:
            try:
                answer = await self._running[id]
            except asyncio.CancelledError:
                if self._closed:
                    raise
                await self._end(id, "cancelled", None)
            except DeferralLost as error:
                log.error("%s", error)
                await self._end(id, "failed", None, error.args[1])
            except Exception:
                log.exception("prediction %s failed: a fault of this server", id)
                await self._end(id, "failed", Answer(500, (), b""))
            else:
                await self._end(id, "done" if answer.status < 400 else "failed", answer)
        finally:
            del self._running[id], self._carried[id]
            self._of_model[model] -= 1
            if not self._closed:
                self._begin()

    async def _answered(self, id: str) -> Answer:
        """One's answer; a refusal for want of room is one only when its patience is over. Raises DeferralLost."""
        self._all[id] = deferral = replace(self._all[id], state="running", started=time.time())
        until = time.time() + self._settings.patience
        while True:
            try:
                answer = await self._answer(await self._stored.request(deferral))
                pause = answer.retry_after
            except Unavailable as error:
                if isinstance(error, ResultsUnreachable) and time.time() + error.retry_after > until:
                    raise DeferralLost(id, f"{error}.") from error
                log.warning("prediction %s cannot be read now: %s", id, error)
                answer, pause = None, error.retry_after
            if answer is not None and (pause is None or time.time() + pause > until):
                return answer
            await asyncio.sleep(min(pause or 1, _LONGEST_PAUSE))

    async def _end(self, id: str, state: State, answer: Answer | None, error: str = "") -> None:
        """Store it. An answer that its folder does not take is given up when the patience for it is over."""
        before, now = self._all[id], time.time()
        while True:
            after = replace(
                before,
                state=state,
                ended=now,
                expires=now + self._settings.keep,
                status=answer.status if answer is not None else 0,
                size=len(answer.body) if answer is not None else 0,
                told="pending" if before.webhook else "",
                error=error,
            )
            try:
                await self._stored.end(before, after, answer)
                break
            except Unavailable as why:
                log.warning("the answer of prediction %s could not be stored, and will be: %s", id, why)
                if isinstance(why, ResultsUnreachable) and time.time() > now + self._settings.patience:
                    state, answer, error = "failed", None, f"It was there, and could not be stored: {why}."
                    log.error("prediction %s has lost its answer: %s", id, why)
                    continue
            await asyncio.sleep(_STORE_AGAIN)
        self._all[id] = after
        self._bytes += after.size - before.size
        self._meters.deferral_ended(after.model, state)
        if after.webhook:
            self._spawn(self._tell(id))

    async def _tell(self, id: str) -> None:
        deferral = self._all[id]
        taken = await self._webhooks.tell(deferral.webhook, id, deferral.document())
        self._meters.webhook("delivered" if taken else "failed")
        if id in self._all:
            self._all[id] = deferral = replace(deferral, told="delivered" if taken else "failed")
            with contextlib.suppress(Unavailable):  # in the next life it is told once more
                await self._stored.update(deferral)

    async def _forget(self, gone: list[Deferral]) -> None:
        await self._stored.remove(gone)
        for deferral in gone:
            if self._all.pop(deferral.id, None) is not None:
                self._bytes -= deferral.size
                if self._by_key.get((deferral.model, deferral.key)) == deferral.id:
                    del self._by_key[deferral.model, deferral.key]

    def _find(self, id: str, within: tuple[str, ...]) -> Deferral:
        deferral = self._all.get(id)
        if deferral is None or _expired(deferral):
            raise DeferralNotFound(id)
        if not matches(deferral.model, within):
            raise WrongModel(deferral.model)
        return deferral

    def _count(self) -> None:
        for model in {*self._of_model, *self._waiting}:
            self._meters.deferrals(model, len(self._waiting.get(model, ())), self._of_model[model])

    def _spawn(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _expired(deferral: Deferral) -> bool:
    return deferral.has_ended and time.time() >= deferral.expires
