"""The blocking client and the asyncio client."""

from __future__ import annotations

import asyncio
import ssl
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing
from pathlib import Path
from typing import Any, TypeVar, cast

import httpx

from serve_app.client import errors
from serve_app.client._operations import RequestDescriptor, RequestFlow, StreamDescriptor
from serve_app.client.async_predictions import AsyncPredictionOperations
from serve_app.client.health import HealthOperations
from serve_app.client.keys import KeyFile
from serve_app.client.management import (
    AdapterOperations,
    DriftOperations,
    KeyOperations,
    ObservationOperations,
    WorkflowOperations,
)
from serve_app.client.models import ModelOperations
from serve_app.client.predictions import PredictionOperations
from serve_app.client.protocols import ProtocolOperations
from serve_app.client.retries import DEFAULT_RETRIES, Retries, RetryLoop
from serve_app.client.traffic import TrafficOperations

T = TypeVar("T")


class _HttpClient(
    PredictionOperations,
    AsyncPredictionOperations,
    ModelOperations,
    TrafficOperations,
    DriftOperations,
    AdapterOperations,
    WorkflowOperations,
    KeyOperations,
    HealthOperations,
    ObservationOperations,
    ProtocolOperations,
    ABC,
):
    """The operations of a server's APIs, the addresses of its ports, and the key for each.

    ``token`` is the key that is sent with requests. Without one it is read from ``key_file``, the server's
    own, which may be created later. ``verify`` configures TLS, as in httpx. ``timeout`` are the seconds in
    which some data must arrive, and the limit of a whole prediction that is not streamed and has no timeout
    of its own; None is no limit. ``retries`` configures when a request is sent again, ``limits`` the number
    of connections (httpx allows 100 by default).
    """

    def __init__(
        self,
        inference: str = "http://127.0.0.1:8080",
        management: str = "http://127.0.0.1:8081",
        timeout: float | None = 120.0,
        token: str = "",
        key_file: Path | None = None,
        verify: ssl.SSLContext | bool = True,
        *,
        metrics: str = "http://127.0.0.1:8082",
        retries: Retries = DEFAULT_RETRIES,
        limits: httpx.Limits | None = None,
    ) -> None:
        self._addresses = {"inference": inference, "management": management, "metrics": metrics}
        self._keys: dict[str, httpx.Auth | None] = dict.fromkeys(self._addresses)
        if key_file is not None and not token:
            self._keys["inference"] = KeyFile(key_file, "inference", management)
            self._keys["management"] = self._keys["metrics"] = KeyFile(key_file, "management", management)
        self._timeout = timeout
        self._retries = retries
        self._create_pool(
            verify=verify,
            headers={"authorization": f"Bearer {token}"} if token else {},
            **({} if limits is None else {"limits": limits}),
        )

    @abstractmethod
    def _create_pool(self, **options: Any) -> None:
        """Create the connection pool."""

    def _retry_loop(self, request: RequestDescriptor) -> RetryLoop:
        return RetryLoop(request, self._addresses[request.port], self._retries, self._timeout)


class Client(_HttpClient):
    """A client of all ports of one server; a ``with`` statement, or ``close``, closes its connections.

    Several threads may use it.
    """

    def _create_pool(self, **options: Any) -> None:
        self._http = httpx.Client(**options)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def _run(self, flow: RequestFlow[T]) -> T:
        """Send every request that an operation yields; return the operation's result."""
        try:
            request = next(flow)
            while True:
                try:
                    response = self._send(request)
                except Exception as failure:
                    request = flow.throw(failure)
                else:
                    request = flow.send(response)
        except StopIteration as end:
            return cast("T", end.value)

    def _stream(self, stream: StreamDescriptor[T]) -> Generator[T, None, None]:
        """Send the request of ``stream`` and yield the chunks of its response."""
        response = self._send(stream.request, stream=True)
        try:
            for data in response.iter_bytes():
                yield from stream.decoder.feed(data)
        finally:
            response.close()

    def _send(self, request: RequestDescriptor, stream: bool = False) -> httpx.Response:
        http, attempts, key = self._http, self._retry_loop(request), self._keys[request.port]
        while True:
            outcome: httpx.Response | httpx.TransportError
            try:
                outcome = http.send(attempts.build_request(http), stream=stream, auth=key)
                if outcome.is_success or outcome.status_code in request.accepted_statuses:
                    return outcome
                outcome.read()
            except httpx.TransportError as error:
                outcome = error
            delay = attempts.retry_delay(outcome)
            if delay is None:
                raise errors.from_outcome(outcome)
            time.sleep(delay)


class AsyncClient(_HttpClient):
    """A client for asyncio: methods are awaited, streams are iterated over with ``async for``."""

    def _create_pool(self, **options: Any) -> None:
        self._http = httpx.AsyncClient(**options)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._http.aclose()

    async def _run(self, flow: RequestFlow[T]) -> T:
        """Send every request that an operation yields; return the operation's result."""
        try:
            request = next(flow)
            while True:
                try:
                    response = await self._send(request)
                except Exception as failure:
                    request = flow.throw(failure)
                else:
                    request = flow.send(response)
        except StopIteration as end:
            return cast("T", end.value)

    async def _stream(self, stream: StreamDescriptor[T]) -> AsyncGenerator[T, None]:
        """Send the request of ``stream`` and yield the chunks of its response."""
        response = await self._send(stream.request, stream=True)
        try:
            async with aclosing(cast("AsyncGenerator[bytes, None]", response.aiter_bytes())) as received:
                async for data in received:
                    for chunk in stream.decoder.feed(data):
                        yield chunk
        finally:
            await response.aclose()

    async def _send(self, request: RequestDescriptor, stream: bool = False) -> httpx.Response:
        http, attempts, key = self._http, self._retry_loop(request), self._keys[request.port]
        while True:
            outcome: httpx.Response | httpx.TransportError
            try:
                outcome = await http.send(attempts.build_request(http), stream=stream, auth=key)
                if outcome.is_success or outcome.status_code in request.accepted_statuses:
                    return outcome
                await outcome.aread()
            except httpx.TransportError as error:
                outcome = error
            delay = attempts.retry_delay(outcome)
            if delay is None:
                raise errors.from_outcome(outcome)
            await asyncio.sleep(delay)
