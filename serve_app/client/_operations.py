"""Operations of the clients, independent of how they are sent.

An operation is written once, as a method of a mixin: a generator that yields requests and receives their
responses. ``Operation`` makes it a plain method of ``Client`` and a coroutine method of ``AsyncClient``.
``StreamOperation`` does the same for streamed responses.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from functools import wraps
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Concatenate, Generic, Literal, ParamSpec, Protocol, TypeVar, overload
from urllib.parse import quote

import httpx

if TYPE_CHECKING:
    from serve_app.client.http import AsyncClient, Client

Port = Literal["inference", "management", "metrics"]
JsonObject = dict[str, Any]
P = ParamSpec("P")
T = TypeVar("T")
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


@dataclass(frozen=True)
class StreamDescriptor(Generic[T]):
    """A request whose response is read chunk by chunk."""

    request: RequestDescriptor
    decoder: StreamDecoder[T]


class Operation(Generic[P, T]):
    """A method of both clients, made from a generator function that yields requests."""

    def __init__(self, flow: Callable[Concatenate[Any, P], RequestFlow[T]]) -> None:
        self._flow = flow
        self.__doc__ = flow.__doc__

    @overload
    def __get__(self, client: None, kind: type) -> Operation[P, T]: ...
    @overload
    def __get__(self, client: Client, kind: type) -> Callable[P, T]: ...
    @overload
    def __get__(self, client: AsyncClient, kind: type) -> Callable[P, Awaitable[T]]: ...
    def __get__(self, client: Any, kind: type) -> Any:
        if client is None:
            return self

        @wraps(self._flow)
        def method(*args: P.args, **options: P.kwargs) -> Any:
            return client._run(self._flow(client, *args, **options))

        return method


class StreamOperation(Generic[P, T]):
    """A method of both clients that returns an iterator, made from a function that describes the request."""

    def __init__(self, describe: Callable[Concatenate[Any, P], StreamDescriptor[T]]) -> None:
        self._describe = describe
        self.__doc__ = describe.__doc__

    @overload
    def __get__(self, client: None, kind: type) -> StreamOperation[P, T]: ...
    @overload
    def __get__(self, client: Client, kind: type) -> Callable[P, Generator[T, None, None]]: ...
    @overload
    def __get__(self, client: AsyncClient, kind: type) -> Callable[P, AsyncGenerator[T, None]]: ...
    def __get__(self, client: Any, kind: type) -> Any:
        if client is None:
            return self

        @wraps(self._describe)
        def method(*args: P.args, **options: P.kwargs) -> Any:
            return client._stream(self._describe(client, *args, **options))

        return method


def join_path(*parts: str | None) -> str:
    """Return the URL path of these parts, quoted; None and empty parts are left out."""
    return "".join("/" + quote(part, safe=":") for part in parts if part)


def management_request(
    method: str,
    *path: str | None,
    port: Port = "management",
    query: Mapping[str, Any] | None = None,
    document: Any = None,
    idle_timeout: float | EllipsisType | None = ...,
) -> RequestDescriptor:
    """Return a request to the management API, with ``document`` as its JSON body unless it is None."""
    headers, content = {}, b""
    if document is not None:
        headers["content-type"] = "application/json"
        content = json.dumps(document).encode()
    return RequestDescriptor(
        port, method, join_path(*path), query or {}, headers, content, idle_timeout=idle_timeout
    )


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


def fetch_text(request: RequestDescriptor, key: str = "status") -> RequestFlow[str]:
    """Send a request and return the text in a field of its response."""
    document = yield from fetch_object(request)
    text: str = document[key]
    return text


def fetch_pages(path: str, key: str) -> RequestFlow[list[JsonObject]]:
    """Return all items of a list that is served in pages."""
    items: list[JsonObject] = []
    token: str | None = "0"
    while token is not None:
        page = yield from fetch_object(management_request("GET", path, query={"next_page_token": token}))
        items += page[key]
        token = page.get("nextPageToken")
    return items
