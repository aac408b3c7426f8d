"""Operations of the clients, independent of how they are sent.

An operation is written once, as a method of a mixin: a generator that yields requests and receives their
responses. ``Operation`` makes it a plain method of ``Client`` and a coroutine method of ``AsyncClient``.
``StreamOperation`` does the same for streamed responses, and ``ConnectOperation`` for connections.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass, field
from functools import partial, wraps
from types import EllipsisType
from typing import Any, Concatenate, Generic, Literal, ParamSpec, Protocol, TypedDict, TypeVar, overload
from urllib.parse import quote

import httpx

from serve_app.client.websocket import AsyncSocket, Socket

Port = Literal["inference", "socket", "management", "metrics"]
JsonObject = dict[str, Any]
P = ParamSpec("P")
T = TypeVar("T")
RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")
ChunkT = TypeVar("ChunkT")
DecodedT = TypeVar("DecodedT", covariant=True)


@dataclass(frozen=True)
class RequestDescriptor:
    """A request, apart from the server's address; values of ``query`` that are None are left out.

    ``timeout`` limits all attempts together, in seconds, and is sent to the server. With
    ``use_client_timeout`` it defaults to the client's own. ``idle_timeout`` are the seconds in which some
    data must arrive, by default the client's. A request that is not ``retryable`` is sent once.
    ``accepted_statuses`` are statuses besides those of success that raise no error.
    """

    port: Port
    method: str
    path: str
    query: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    content: bytes = b""
    timeout: float | None = None
    use_client_timeout: bool = False
    idle_timeout: float | EllipsisType | None = ...
    retryable: bool = True
    accepted_statuses: tuple[int, ...] = ()


RequestFlow = Generator[RequestDescriptor, httpx.Response, T]


class StreamDecoder(Protocol[DecodedT]):
    """A decoder of a streamed response, whose bytes may be split anywhere."""

    def feed(self, data: bytes) -> Iterator[DecodedT]: ...


class BaseStreamDescriptor(Generic[ChunkT]):
    """A request of any transport whose response is read chunk by chunk."""


@dataclass(frozen=True)
class StreamDescriptor(BaseStreamDescriptor[ChunkT]):
    """A request over HTTP whose response is read chunk by chunk."""

    request: RequestDescriptor
    decoder: StreamDecoder[ChunkT]


@dataclass(frozen=True)
class ConnectDescriptor:
    """A request that opens a connection; ``timeout`` are the seconds for each response over it."""

    request: RequestDescriptor
    timeout: float | None


class SyncExecutor(ABC, Generic[RequestT, ResponseT]):
    """A client whose methods return their results, over any transport."""

    @abstractmethod
    def _send(self, request: RequestT) -> ResponseT:
        """Send a request and return its response."""

    @abstractmethod
    def _stream(self, stream: Any) -> Generator[Any, None, None]:
        """Send the request of ``stream`` and yield the chunks of its response."""

    def _run(self, flow: Generator[RequestT, ResponseT, T]) -> T:
        """Send every request that an operation yields; return the operation's result."""
        resume: Callable[[], RequestT] = partial(next, flow)
        while True:
            try:
                request = resume()
            except StopIteration as end:
                result: T = end.value
                return result
            try:
                resume = partial(flow.send, self._send(request))
            except Exception as failure:
                resume = partial(flow.throw, failure)


class AsyncExecutor(ABC, Generic[RequestT, ResponseT]):
    """A client whose methods are awaited, over any transport."""

    @abstractmethod
    async def _send(self, request: RequestT) -> ResponseT:
        """Send a request and return its response."""

    @abstractmethod
    def _stream(self, stream: Any) -> AsyncGenerator[Any, None]:
        """Send the request of ``stream`` and yield the chunks of its response."""

    async def _run(self, flow: Generator[RequestT, ResponseT, T]) -> T:
        """Send every request that an operation yields; return the operation's result."""
        resume: Callable[[], RequestT] = partial(next, flow)
        while True:
            try:
                request = resume()
            except StopIteration as end:
                result: T = end.value
                return result
            try:
                resume = partial(flow.send, await self._send(request))
            except Exception as failure:
                resume = partial(flow.throw, failure)


class Operation(Generic[P, T]):
    """A method of both clients, made from a generator function that yields requests."""

    def __init__(self, flow: Callable[Concatenate[Any, P], Generator[Any, Any, T]]) -> None:
        self._flow = flow
        self.__doc__ = flow.__doc__

    @overload
    def __get__(self, client: None, kind: type) -> Operation[P, T]: ...
    @overload
    def __get__(self, client: SyncExecutor[Any, Any], kind: type) -> Callable[P, T]: ...
    @overload
    def __get__(self, client: AsyncExecutor[Any, Any], kind: type) -> Callable[P, Awaitable[T]]: ...
    def __get__(self, client: Any, kind: type) -> Any:
        if client is None:
            return self
        flow = self._flow.__get__(client)

        @wraps(flow)
        def method(*args: Any, **options: Any) -> Any:
            return client._run(flow(*args, **options))

        return method


class StreamOperation(Generic[P, T]):
    """A method of both clients that returns an iterator, made from a function that describes the request."""

    def __init__(self, describe: Callable[Concatenate[Any, P], BaseStreamDescriptor[T]]) -> None:
        self._describe = describe
        self.__doc__ = describe.__doc__

    @overload
    def __get__(self, client: None, kind: type) -> StreamOperation[P, T]: ...
    @overload
    def __get__(
        self, client: SyncExecutor[Any, Any], kind: type
    ) -> Callable[P, Generator[T, None, None]]: ...
    @overload
    def __get__(
        self, client: AsyncExecutor[Any, Any], kind: type
    ) -> Callable[P, AsyncGenerator[T, None]]: ...
    def __get__(self, client: Any, kind: type) -> Any:
        if client is None:
            return self
        describe = self._describe.__get__(client)

        @wraps(describe)
        def method(*args: Any, **options: Any) -> Any:
            return client._stream(describe(*args, **options))

        return method


class ConnectOperation(Generic[P]):
    """A method of both clients that opens a connection, made from a function that describes the request."""

    def __init__(self, describe: Callable[Concatenate[Any, P], ConnectDescriptor]) -> None:
        self._describe = describe
        self.__doc__ = describe.__doc__

    @overload
    def __get__(self, client: None, kind: type) -> ConnectOperation[P]: ...
    @overload
    def __get__(
        self, client: SyncExecutor[Any, Any], kind: type
    ) -> Callable[P, AbstractContextManager[Socket]]: ...
    @overload
    def __get__(
        self, client: AsyncExecutor[Any, Any], kind: type
    ) -> Callable[P, AbstractAsyncContextManager[AsyncSocket]]: ...
    def __get__(self, client: Any, kind: type) -> Any:
        if client is None:
            return self
        describe = self._describe.__get__(client)

        @wraps(describe)
        def method(*args: Any, **options: Any) -> Any:
            return client._connect(describe(*args, **options))

        return method


def join_path(*parts: str | None) -> str:
    """Return the URL path of these parts, quoted; None and empty parts are left out."""
    return "".join("/" + quote(part, safe=":") for part in parts if part)


class JsonBody(TypedDict, total=False):
    """The fields of a ``RequestDescriptor`` that carry a JSON body."""

    headers: dict[str, str]
    content: bytes


def json_body(value: Any) -> JsonBody:
    """Return the fields of a request whose body is JSON; none where ``value`` is None."""
    if value is None:
        return {}
    return {"headers": {"content-type": "application/json"}, "content": json.dumps(value).encode()}


def fetch_json(request: RequestDescriptor) -> RequestFlow[Any]:
    """Send a request and return the JSON value of its response."""
    response = yield request
    return response.json()


def fetch_object(request: RequestDescriptor) -> RequestFlow[JsonObject]:
    """Send a request and return its response, a JSON object."""
    document: JsonObject = yield from fetch_json(request)
    return document


def fetch_list(request: RequestDescriptor, key: str = "") -> RequestFlow[list[JsonObject]]:
    """Send a request and return its response, a list of JSON objects, which may be a field ``key``."""
    document = yield from fetch_json(request)
    objects: list[JsonObject] = document[key] if key else document
    return objects


def fetch_text(request: RequestDescriptor, key: str) -> RequestFlow[str]:
    """Send a request and return the text in a field of its response."""
    document = yield from fetch_object(request)
    text: str = document[key]
    return text
