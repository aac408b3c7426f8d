"""The two clients: the same calls, sent and waited for in their own ways."""

from __future__ import annotations

import asyncio
import re
import ssl
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx

from serve_app.client import errors
from serve_app.client.ask import Ask, Awaits, Blocks, Dial, Listen
from serve_app.client.asynchronous import Asynchronous
from serve_app.client.health import Health
from serve_app.client.keys import Bearer, KeyFile
from serve_app.client.models import Models
from serve_app.client.open_inference import OpenInference
from serve_app.client.openai import OpenAI
from serve_app.client.predictions import Predictions
from serve_app.client.retries import USUAL, Retries
from serve_app.client.sending import Sending
from serve_app.client.sockets import AsyncSocket, Socket
from serve_app.client.traffic import Traffic
from serve_app.client.upgrade import AsyncUpgrade, Upgrade
from serve_app.client.workflows import Workflows

T = TypeVar("T")
_SOCKETS = ("ws://", "wss://")


class _Calls(Predictions, Asynchronous, OpenInference, OpenAI, Models, Traffic, Workflows, Health):
    """Every call of every door."""


class _Ports(ABC):
    """Where a server's ports are, and the keys that each is shown.

    ``token`` is the key that requests show. Without one it is looked up in ``key_file``, which is the server's
    own and may come later; ``verify`` is the client's side of TLS, as httpx takes it. ``timeout`` are the seconds in
    which something must come; a prediction that is not streamed has them for all of it where it is not given its own,
    and None is for ever. ``retries`` say when a request is sent again, ``limits`` how many connections there may be, if
    not httpx's usual hundred.
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
        retries: Retries = USUAL,
        limits: httpx.Limits | None = None,
    ) -> None:
        socket = re.sub("^http", "ws", inference, flags=re.IGNORECASE)
        self._addresses = {"inference": inference, "socket": socket, "management": management, "metrics": metrics}
        self._keys: dict[str, httpx.Auth | None] = dict.fromkeys(self._addresses, Bearer(token) if token else None)
        if key_file is not None and not token:
            self._keys["inference"] = self._keys["socket"] = KeyFile(key_file, "inference", management)
            self._keys["management"] = self._keys["metrics"] = KeyFile(key_file, "management", management)
        self._timeout = timeout
        self._retries = retries
        self._open(verify, {} if limits is None else {"limits": limits})

    @abstractmethod
    def _open(self, verify: ssl.SSLContext | bool, more: Mapping[str, Any]) -> None:
        """Make the connections' pools."""

    def _attempts(self, ask: Ask) -> Sending:
        return Sending(ask, self._addresses[ask.port], self._retries, self._timeout)


class Client(_Ports, _Calls, Blocks):
    """Speaks to all ports of one server; a ``with`` statement, or ``close``, closes its connections.

    May be used by several threads.
    """

    def _open(self, verify: ssl.SSLContext | bool, more: Mapping[str, Any]) -> None:
        self._http = httpx.Client(verify=verify, mounts=dict.fromkeys(_SOCKETS, Upgrade(verify)), **more)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def _listen(self, listen: Listen[T]) -> Iterator[T]:
        answer = self._answer(listen.ask, stream=True)
        try:
            for data in answer.iter_bytes():
                yield from listen.reader.feed(data)
        finally:
            answer.close()

    @contextmanager
    def _connect(self, dial: Dial) -> Iterator[Socket]:
        with self._answer(dial.ask).extensions["line"] as line:
            yield Socket(line, self._timeout, dial.within)

    def _answer(self, ask: Ask, stream: bool = False) -> httpx.Response:
        http, attempts, keys = self._http, self._attempts(ask), self._keys[ask.port]
        while True:
            outcome: httpx.Response | httpx.TransportError
            try:
                outcome = http.send(attempts.request(http), stream=stream, auth=keys)
                if outcome.is_success or outcome.status_code in ask.also:
                    return outcome
                outcome.read()
            except httpx.TransportError as error:
                outcome = error
            wait = attempts.wait(outcome)
            if wait is None:
                raise outcome if isinstance(outcome, Exception) else errors.of(outcome)
            time.sleep(wait)


class AsyncClient(_Ports, _Calls, Awaits):
    """The same for asyncio: calls are awaited, streams are iterated over with ``async for``."""

    def _open(self, verify: ssl.SSLContext | bool, more: Mapping[str, Any]) -> None:
        self._http = httpx.AsyncClient(verify=verify, mounts=dict.fromkeys(_SOCKETS, AsyncUpgrade(verify)), **more)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._http.aclose()

    async def _listen(self, listen: Listen[T]) -> AsyncIterator[T]:
        answer = await self._answer(listen.ask, stream=True)
        try:
            async with aclosing(answer.aiter_bytes()) as received:
                async for data in received:
                    for piece in listen.reader.feed(data):
                        yield piece
        finally:
            await answer.aclose()

    @asynccontextmanager
    async def _connect(self, dial: Dial) -> AsyncIterator[AsyncSocket]:
        answer = await self._answer(dial.ask)
        async with answer.extensions["line"] as line:
            yield AsyncSocket(line, self._timeout, dial.within)

    async def _answer(self, ask: Ask, stream: bool = False) -> httpx.Response:
        http, attempts, keys = self._http, self._attempts(ask), self._keys[ask.port]
        while True:
            outcome: httpx.Response | httpx.TransportError
            try:
                outcome = await http.send(attempts.request(http), stream=stream, auth=keys)
                if outcome.is_success or outcome.status_code in ask.also:
                    return outcome
                await outcome.aread()
            except httpx.TransportError as error:
                outcome = error
            wait = attempts.wait(outcome)
            if wait is None:
                raise outcome if isinstance(outcome, Exception) else errors.of(outcome)
            await asyncio.sleep(wait)
