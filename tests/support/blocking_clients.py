"""The asyncio client behind blocking methods, so that a test runs with both kinds of client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from serve_app.client import AsyncClient


class BlockingAsyncClient:
    """An AsyncClient whose methods block, and whose streams are read to their ends."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._client = self._loop.run_until_complete(self._create(args, options))

    @staticmethod
    async def _create(args: Any, options: Any) -> AsyncClient:
        return AsyncClient(*args, **options)

    def close(self) -> None:
        self._loop.run_until_complete(self._client.aclose())
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def method(*args: Any, **options: Any) -> Any:
            result = getattr(self._client, name)(*args, **options)
            return self._loop.run_until_complete(_collect(result) if hasattr(result, "__aiter__") else result)

        return method


async def _collect(chunks: AsyncIterator[Any]) -> list[Any]:
    return [chunk async for chunk in chunks]
