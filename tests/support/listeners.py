"""The end of a listener of asyncio."""

from __future__ import annotations

import asyncio


async def close_listener(listener: asyncio.Server) -> None:
    """Close a listener after it has attached every connection that it has accepted.

    A connection that is attached to a closed listener fails, and its socket is left to the garbage collector.
    """
    while any("_accept_connection" in repr(task.get_coro()) for task in asyncio.all_tasks()):
        await asyncio.sleep(0)
    listener.close()
