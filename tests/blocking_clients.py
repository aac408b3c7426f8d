"""The asyncio clients behind blocking methods, so that a test runs with both kinds of client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from serve_app.client import AsyncClient, StreamEnd
from serve_app.client.grpc import AsyncGrpcClient


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
            if hasattr(result, "__aenter__"):
                return BlockingAsyncSocket(result, self._loop.run_until_complete)
            return self._loop.run_until_complete(_collect(result) if hasattr(result, "__aiter__") else result)

        return method


class BlockingAsyncSocket:
    """The connection of an AsyncClient with the methods of ``Socket``."""

    def __init__(self, connection: Any, wait: Callable[[Any], Any]) -> None:
        self._connection = connection
        self._wait = wait

    def __enter__(self) -> BlockingAsyncSocket:
        self._socket = self._wait(self._connection.__aenter__())
        return self

    def __exit__(self, *error: Any) -> None:
        self._wait(self._connection.__aexit__(*error))

    def __iter__(self) -> Iterator[bytes]:
        chunks = aiter(self._socket)
        while (chunk := self._wait(anext(chunks, None))) is not None:
            yield chunk

    def send(self, body: bytes | str) -> None:
        self._wait(self._socket.send(body))

    @property
    def end(self) -> StreamEnd | None:
        return self._socket.end


class BlockingAsyncGrpcClient:
    """An AsyncGrpcClient whose methods block, and whose streams are read chunk by chunk."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._client = AsyncGrpcClient(*args, **options)

    def close(self) -> None:
        self._loop.run_until_complete(self._client.aclose())
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def method(*args: Any, **options: Any) -> Any:
            result = getattr(self._client, name)(*args, **options)
            if hasattr(result, "__aiter__"):
                return self._iterate(result)
            return self._loop.run_until_complete(result)

        return method

    def _iterate(self, stream: Any) -> Iterator[Any]:
        try:
            while True:
                try:
                    yield self._loop.run_until_complete(anext(stream))
                except StopAsyncIteration:
                    return
        finally:
            self._loop.run_until_complete(stream.aclose())


async def _collect(chunks: AsyncIterator[Any]) -> list[Any]:
    return [chunk async for chunk in chunks]
