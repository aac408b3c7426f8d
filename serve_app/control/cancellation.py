"""Work that a cancellation of its caller does not interrupt."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def run_to_end(work: Awaitable[T]) -> T:
    """Await ``work`` to its end, and return its result; a cancellation of the caller is raised only then.

    A thread that saves cannot be cancelled. What follows the save must not be skipped either, or memory and
    database differ; and a lock that the caller holds stays held meanwhile.
    """
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled from (None if task.cancelled() else task.exception())
    return task.result()
