"""A guard of gRPC's own server: the key, the number of calls and their pace are checked before messages."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio


@dataclass(frozen=True)
class CallLimits:
    """The limits of calls: their number, with and without a key, and the seconds until a message."""

    max_calls: int = 64
    message_timeout: float = 10.0


class CallGuard(grpc.aio.ServerInterceptor):
    """An interceptor that reads a call's message only where the call has a key and a place.

    gRPC passes a call to interceptors with its metadata, and reads the message of a unary request before it
    calls the method. So each method becomes one with a stream of requests, which is the same on the wire.
    ``refuses`` returns whether the method at a path would refuse the metadata; such a method is called with
    an empty message, and answers as it always does. Calls that need no key are counted on their own.
    """

    def __init__(
        self,
        refuses: Callable[[str, Mapping[str, str]], bool],
        needs_key: Callable[[str], bool],
        limits: CallLimits = CallLimits(),
    ) -> None:
        self._refuses = refuses
        self._needs_key = needs_key
        self._limits = limits
        self._calls: Counter[bool] = Counter()  # running calls, by whether they need a key

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        """Return the guarded handler of a call."""
        handler = await continuation(details)
        if handler is None:  # an unknown method
            return None
        metadata = {key: value for key, value in details.invocation_metadata or () if isinstance(value, str)}
        is_refused = self._refuses(details.method, metadata)
        kind = self._needs_key(details.method)
        method = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream

        async def run(requests: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> Any:
            if is_refused:
                return await method(b"", context)
            if self._calls[kind] >= self._limits.max_calls:
                await context.abort(
                    grpc.StatusCode.RESOURCE_EXHAUSTED,
                    f"{self._limits.max_calls} calls are running, which is "
                    "grpc.management_max_concurrent_calls; retry later.",
                )
            self._calls[kind] += 1
            try:
                if handler.request_streaming:
                    result = method(self._read_each(requests, context), context)
                else:
                    result = method(await self._read(requests, context), context)
                if not hasattr(result, "__aiter__"):
                    return await result
                async for message in result:
                    await context.write(message)
            finally:
                self._calls[kind] -= 1

        create = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
        return create(run, handler.request_deserializer, handler.response_serializer)

    async def _read(self, requests: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> Any:
        try:
            return await asyncio.wait_for(anext(requests), self._limits.message_timeout)
        except StopAsyncIteration:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "The call has no message.")
        except asyncio.TimeoutError:
            await context.abort(
                grpc.StatusCode.DEADLINE_EXCEEDED,
                f"No message came within {self._limits.message_timeout:.0f} seconds.",
            )

    async def _read_each(
        self, requests: AsyncIterator[Any], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[Any]:
        while True:
            try:
                message = await asyncio.wait_for(anext(requests), self._limits.message_timeout)
            except StopAsyncIteration:
                return
            except asyncio.TimeoutError:
                await context.abort(
                    grpc.StatusCode.DEADLINE_EXCEEDED,
                    f"No further message came within {self._limits.message_timeout:.0f} seconds.",
                )
            yield message
