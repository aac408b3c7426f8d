"""What is asked of a server by gRPC, apart from how it is sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import EllipsisType
from typing import Any, Generic, Literal, NamedTuple, TypeVar

Port = Literal["inference", "management"]
_UNTIL_TAKEN = 5.0  # seconds; this server says so at once
T = TypeVar("T")


@dataclass(frozen=True)
class Ask:
    """One call of the method ``method`` of a service, whose generated class is ``stub``.

    ``within`` are the seconds for all of it: those of the client, none where it is None. ``once``: it is never sent
    again.
    """

    port: Port
    stub: Callable[[Any], Any]
    method: str
    message: Any
    metadata: Mapping[str, str] = field(default_factory=dict)
    within: float | EllipsisType | None = ...
    once: bool = False


class Answered(NamedTuple):
    """An answer, and what the trailing metadata said of it."""

    message: Any
    said: Mapping[str, str]


Talk = Generator[Ask, Answered, T]


@dataclass(frozen=True)
class Listen(Generic[T]):
    """A call whose answer is many messages, each of which ``piece`` reads; ``patient``: it may be silent for ever."""

    ask: Ask
    piece: Callable[[Any], T]
    patient: bool = False


class Requests:
    """The messages of a stream of requests, made of what its caller gives by ``make``, one by one as they are sent.

    Where the caller's own iterable fails, no more is sent, and ``failure`` is what it raised. ``call`` is the call of
    ``grpc.aio`` that they go with. It forgets why a call was refused if a message was on its way then, so the first
    of them waits for the server to take the call, as long as one may be expected to say so.
    """

    def __init__(self, given: Iterable[Any] | AsyncIterable[Any], make: Callable[[Any], Any]) -> None:
        self._given = given
        self._make = make
        self.failure: Exception | None = None
        self.call: Any = None

    def __iter__(self) -> Iterator[Any]:
        try:
            yield from map(self._make, self._given)  # type: ignore[arg-type]
        except Exception as failure:
            self.failure = failure

    async def __aiter__(self) -> AsyncIterator[Any]:
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.call.initial_metadata(), _UNTIL_TAKEN)
        if self.call.done():
            return
        try:
            if isinstance(self._given, AsyncIterable):
                async for one in self._given:
                    yield self._make(one)
            else:
                for one in self._given:
                    yield self._make(one)
        except Exception as failure:
            self.failure = failure


def document(message: Any) -> dict[str, Any]:
    """A message's fields by their names, as JSON would have them, but for its numbers, which stay numbers."""
    return {field.name: _plain(getattr(message, field.name), field) for field in message.DESCRIPTOR.fields}


def _plain(value: Any, field: Any) -> Any:
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [_plain(one, field) for one in value]
    if field.message_type is not None:
        return document(value)
    return field.enum_type.values_by_number[value].name if field.enum_type is not None else value
