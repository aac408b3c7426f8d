"""Requests and responses of the gRPC clients, independent of how they are sent."""

from __future__ import annotations

import asyncio
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Callable,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import suppress
from dataclasses import dataclass, field
from types import EllipsisType
from typing import Any, Literal, NamedTuple, TypeVar

from serve_app.client._operations import BaseStreamDescriptor

Port = Literal["inference", "management"]
_ACCEPT_TIMEOUT = 5.0  # seconds; this server accepts a call at once
T = TypeVar("T")


@dataclass(frozen=True)
class GrpcRequestDescriptor:
    """A call of the method ``method`` of a service, whose generated class is ``stub``.

    ``timeout`` limits all attempts together, in seconds, by default the client's; None is no limit. A call
    that is not ``retryable`` is sent once.
    """

    port: Port
    stub: Callable[[Any], Any]
    method: str
    message: Any
    metadata: Mapping[str, str] = field(default_factory=dict)
    timeout: float | EllipsisType | None = ...
    retryable: bool = True


class GrpcReply(NamedTuple):
    """A response message with the call's trailing metadata."""

    message: Any
    metadata: Mapping[str, str]


GrpcFlow = Generator[GrpcRequestDescriptor, GrpcReply, T]


@dataclass(frozen=True)
class GrpcStreamDescriptor(BaseStreamDescriptor[T]):
    """A call whose response is many messages, each converted by ``decode``.

    With ``may_idle`` there is no limit of the time between two messages.
    """

    request: GrpcRequestDescriptor
    decode: Callable[[Any], T]
    may_idle: bool = False


class RequestStream:
    """The messages of a stream of requests, built from the caller's ``items`` by ``build_message`` as sent.

    Where the caller's own iterable raises, the stream ends and ``failure`` is the exception. ``call`` is the
    call of ``grpc.aio`` that sends them. ``grpc.aio`` loses the status of a refused call if a message is
    being sent at that moment. The first message therefore waits until the server accepts the call, at most 5
    s.
    """

    def __init__(
        self, items: Iterable[Any] | AsyncIterable[Any], build_message: Callable[[Any], Any]
    ) -> None:
        self._items = items
        self._build_message = build_message
        self.failure: Exception | None = None
        self.call: Any = None

    def __iter__(self) -> Iterator[Any]:
        try:
            yield from map(self._build_message, self._items)  # type: ignore[arg-type]
        except Exception as failure:
            self.failure = failure

    async def __aiter__(self) -> AsyncIterator[Any]:
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.call.initial_metadata(), _ACCEPT_TIMEOUT)
        if self.call.done():
            return
        try:
            if isinstance(self._items, AsyncIterable):
                async for item in self._items:
                    yield self._build_message(item)
            else:
                for item in self._items:
                    yield self._build_message(item)
        except Exception as failure:
            self.failure = failure


def fetch_message_text(request: GrpcRequestDescriptor) -> GrpcFlow[str]:
    """Send a call of TorchServe's management service and return the text of its response."""
    reply = yield request
    text: str = reply.message.msg
    return text


def to_document(message: Any) -> dict[str, Any]:
    """Return a message's fields by name, as in its JSON form except that numbers stay numbers."""
    return {field.name: _to_plain(getattr(message, field.name), field) for field in message.DESCRIPTOR.fields}


def _to_plain(value: Any, field: Any) -> Any:
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [_to_plain(item, field) for item in value]
    if field.message_type is not None:
        return to_document(value)
    return field.enum_type.values_by_number[value].name if field.enum_type is not None else value
