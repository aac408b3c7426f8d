"""What is asked of a server, apart from how it is sent: each call is written once, for both clients.

A call is a method of a mixin that yields what it asks and is given the answers; ``operation`` makes it a plain method
of ``Client``, and a coroutine of ``AsyncClient``. ``streaming`` does the same for what answers piece by piece, and
``connecting`` for what opens a connection.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass, field
from functools import partial, wraps
from types import EllipsisType
from typing import Any, Concatenate, Generic, Literal, ParamSpec, Protocol, TypeVar, overload
from urllib.parse import quote

import httpx

from serve_app.client.sockets import AsyncSocket, Socket

Port = Literal["inference", "socket", "management", "metrics"]
P = ParamSpec("P")
T = TypeVar("T")
PieceT = TypeVar("PieceT", covariant=True)


@dataclass(frozen=True)
class Ask:
    """One request. ``query``: what is None is left out.

    ``within`` are the seconds for all of it, which the server is told; with ``hurries``, the client's own timeout is
    where there are none. ``silence`` are the seconds in which something must come, if not the client's. ``once``: it is
    never sent again. ``also``: statuses besides those of success that are answers, and no errors.
    """

    port: Port
    method: str
    path: str
    query: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    content: bytes = b""
    within: float | None = None
    hurries: bool = False
    silence: float | EllipsisType | None = ...
    once: bool = False
    also: tuple[int, ...] = ()


Talk = Generator[Ask, httpx.Response, T]


class Reader(Protocol[PieceT]):
    """What makes pieces of the bytes of a streamed answer, in whatever cuts they come."""

    def feed(self, data: bytes) -> Iterator[PieceT]: ...


@dataclass(frozen=True)
class Listen(Generic[PieceT]):
    """A request whose answer is read piece by piece."""

    ask: Ask
    reader: Reader[PieceT]


@dataclass(frozen=True)
class Dial:
    """A request that opens a connection; ``within`` are the seconds for each answer that comes over it."""

    ask: Ask
    within: float | None


class Blocks(ABC):
    """A client whose calls come back with their answers, whatever it speaks."""

    @abstractmethod
    def _answer(self, ask: Any) -> Any:
        """Send what a call asks for, and give what was answered."""

    @abstractmethod
    def _listen(self, listen: Any) -> Iterator[Any]:
        """Send what a call asks for, and give its pieces."""

    def _hold(self, talk: Generator[Any, Any, T]) -> T:
        """A call from its beginning to its end."""
        step = partial(next, talk)
        while True:
            try:
                ask = step()
            except StopIteration as end:
                return end.value
            try:
                step = partial(talk.send, self._answer(ask))
            except Exception as failure:
                step = partial(talk.throw, failure)


class Awaits(ABC):
    """A client whose calls are awaited, whatever it speaks."""

    @abstractmethod
    async def _answer(self, ask: Any) -> Any:
        """Send what a call asks for, and give what was answered."""

    @abstractmethod
    def _listen(self, listen: Any) -> AsyncIterator[Any]:
        """Send what a call asks for, and give its pieces."""

    async def _hold(self, talk: Generator[Any, Any, T]) -> T:
        """A call from its beginning to its end."""
        step = partial(next, talk)
        while True:
            try:
                ask = step()
            except StopIteration as end:
                return end.value
            try:
                step = partial(talk.send, await self._answer(ask))
            except Exception as failure:
                step = partial(talk.throw, failure)


class operation(Generic[P, T]):
    """A method of both clients, from the function that holds its talk."""

    def __init__(self, talk: Callable[Concatenate[Any, P], Generator[Any, Any, T]]) -> None:
        self._talk = talk
        self.__doc__ = talk.__doc__

    @overload
    def __get__(self, client: None, kind: type) -> operation[P, T]: ...
    @overload
    def __get__(self, client: Blocks, kind: type) -> Callable[P, T]: ...
    @overload
    def __get__(self, client: Awaits, kind: type) -> Callable[P, Awaitable[T]]: ...
    def __get__(self, client: Any, kind: type) -> Any:
        if client is None:
            return self
        talk = self._talk.__get__(client)

        @wraps(talk)
        def method(*args: Any, **named: Any) -> Any:
            return client._hold(talk(*args, **named))

        return method


class streaming(Generic[P, T]):
    """A method of both clients that gives an iterator, from the function that says what to listen to."""

    def __init__(self, listen: Callable[Concatenate[Any, P], Listen[T]]) -> None:
        self._what = listen
        self.__doc__ = listen.__doc__

    @overload
    def __get__(self, client: None, kind: type) -> streaming[P, T]: ...
    @overload
    def __get__(self, client: Blocks, kind: type) -> Callable[P, Iterator[T]]: ...
    @overload
    def __get__(self, client: Awaits, kind: type) -> Callable[P, AsyncIterator[T]]: ...
    def __get__(self, client: Any, kind: type) -> Any:
        if client is None:
            return self
        what = self._what.__get__(client)

        @wraps(what)
        def method(*args: Any, **named: Any) -> Any:
            return client._listen(what(*args, **named))

        return method


class connecting(Generic[P]):
    """A method of both clients that opens a connection, from the function that says whereto."""

    def __init__(self, dial: Callable[Concatenate[Any, P], Dial]) -> None:
        self._dial = dial
        self.__doc__ = dial.__doc__

    @overload
    def __get__(self, client: None, kind: type) -> connecting[P]: ...
    @overload
    def __get__(self, client: Blocks, kind: type) -> Callable[P, AbstractContextManager[Socket]]: ...
    @overload
    def __get__(self, client: Awaits, kind: type) -> Callable[P, AbstractAsyncContextManager[AsyncSocket]]: ...
    def __get__(self, client: Any, kind: type) -> Any:
        if client is None:
            return self
        dial = self._dial.__get__(client)

        @wraps(dial)
        def method(*args: Any, **named: Any) -> Any:
            return client._connect(dial(*args, **named))

        return method


def path(*parts: str | None) -> str:
    """A path of these parts, whatever stands in them; None and what is empty is left out."""
    return "".join("/" + quote(part, safe=":") for part in parts if part)


def of_json(value: Any) -> dict[str, Any]:
    """The fields of an ``Ask`` whose body is JSON; without a body where ``value`` is None."""
    if value is None:
        return {}
    return {"headers": {"content-type": "application/json"}, "content": json.dumps(value).encode()}
