"""How many calls a replica answers at once, where the version has a limit (maxConcurrentRequests)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from serve_app.errors import QuotaExceeded, RelayError
from serve_app.types import Call, ModelRef, Reply, ReplyStream


class Quota:
    """A batcher's face that lets its share of a version's limit through; QuotaExceeded at once for the rest.

    Every way into the replica goes through here, so the replicas together keep the limit, whichever way the calls
    come. A call counts while it waits and while it runs, a stream until it ends; shadows never do. The limit is
    divided evenly and rounded down, at least one for each replica.
    """

    def __init__(self, batcher: Any, ref: ModelRef) -> None:
        self._batcher = batcher
        self._ref = ref
        self._limit = 0  # of the whole version; 0: none
        self._share = 0
        self._under_way = 0

    def allot(self, limit: int, replicas: int) -> None:
        """Take the version's limit, and how many replicas share it."""
        self._limit = limit
        self._share = max(1, limit // max(1, replicas)) if limit else 0

    async def submit(self, call: Call) -> Reply | ReplyStream:
        if not self._share or call.priority == "shadow":
            return await self._batcher.submit(call)
        self._enter(call)
        try:
            answer = await self._batcher.submit(call)
        except BaseException:
            self._leave()
            raise
        self._answered(answer)
        return answer

    def enqueue(self, call: Call) -> asyncio.Future[Reply | ReplyStream]:
        if not self._share or call.priority == "shadow":
            return self._batcher.enqueue(call)
        self._enter(call)
        try:
            row: asyncio.Future[Reply | ReplyStream] = self._batcher.enqueue(call)
        except BaseException:
            self._leave()
            raise
        row.add_done_callback(lambda row: self._answered(_answer(row)))
        return row

    async def submit_all(self, calls: Sequence[Call]) -> list[Any]:
        if not self._share:
            return await self._batcher.submit_all(calls)
        answers: list[Any] = [None] * len(calls)
        admitted: list[int] = []
        for i, call in enumerate(calls):
            try:
                if call.priority != "shadow":
                    self._enter(call)
                admitted.append(i)
            except QuotaExceeded as error:
                answers[i] = error
        said: list[Any] = [None] * len(admitted)
        try:
            said = await self._batcher.submit_all([calls[i] for i in admitted])
        finally:
            for i, answer in zip(admitted, said, strict=True):
                answers[i] = answer
                if calls[i].priority != "shadow":
                    self._answered(answer)
        return answers

    def _enter(self, call: Call) -> None:
        if self._under_way >= self._share:
            error = QuotaExceeded(self._ref.name, self._ref.version, self._limit)
            error.retry_after = self._batcher.retry_after
            raise error
        self._under_way += 1

    def _answered(self, answer: Reply | ReplyStream | RelayError | None) -> None:
        if isinstance(answer, ReplyStream):
            answer.at_end(self._leave)
        else:
            self._leave()

    def _leave(self) -> None:
        self._under_way -= 1


def _answer(row: asyncio.Future[Reply | ReplyStream]) -> Reply | ReplyStream | None:
    return None if row.cancelled() or row.exception() is not None else row.result()
