"""The two clients by gRPC: the same calls, sent and waited for in their own ways."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import aclosing, closing, suppress
from pathlib import Path
from typing import Any, TypeVar

import grpc
import grpc.aio
import httpx

from serve_app.client.ask import Awaits, Blocks
from serve_app.client.grpc import errors
from serve_app.client.grpc.ask import Answered, Ask, Listen
from serve_app.client.grpc.calling import Calling, Keys
from serve_app.client.grpc.channels import Address, Certificates, channel
from serve_app.client.grpc.health import Health
from serve_app.client.grpc.models import Models
from serve_app.client.grpc.open_inference import OpenInference
from serve_app.client.grpc.predictions import Predictions
from serve_app.client.grpc.silence import heard, heard_async
from serve_app.client.keys import Bearer, KeyFile
from serve_app.client.retries import USUAL, Retries

T = TypeVar("T")


class _Calls(Predictions, OpenInference, Models, Health):
    """Every call of every service."""


class _Ports(ABC):
    """Where a server's ports are, and the keys that each is shown.

    An address is ``HOST:PORT``, or ``https://HOST:PORT`` where TLS is spoken; ``root_certificates``, and
    ``certificate_chain`` with its ``private_key``, are files in PEM. ``token`` is the key that calls show. Without one
    it is looked up in ``key_file``, which is the server's own and may come later; gRPC has no call that renews an
    expired one, so ``tokens`` is the management port over HTTP. ``timeout`` are the seconds that a call has where it is
    not given its own, and those in which something must come of a stream; None is for ever. ``retries`` say when a call
    is sent again. ``options`` are gRPC's own of a channel, such as ``grpc.max_receive_message_length``.
    """

    def __init__(
        self,
        inference: str = "127.0.0.1:7070",
        management: str = "127.0.0.1:7071",
        timeout: float | None = 120.0,
        token: str = "",
        key_file: Path | None = None,
        *,
        root_certificates: Path | None = None,
        certificate_chain: Path | None = None,
        private_key: Path | None = None,
        tokens: str = "http://127.0.0.1:8081",
        retries: Retries = USUAL,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._addresses = {"inference": Address(inference), "management": Address(management)}
        self._certificates = Certificates(root_certificates, certificate_chain, private_key)
        self._options = options or {}
        self._keys: dict[str, Keys] = dict.fromkeys(self._addresses, Bearer(token) if token else None)
        if key_file is not None and not token:
            self._keys["inference"] = KeyFile(key_file, "inference", tokens)
            self._keys["management"] = KeyFile(key_file, "management", tokens)
        self._timeout = timeout
        self._retries = retries
        self._channels: dict[str, Any] = {}
        self._stubs: dict[tuple[str, Any], Any] = {}
        self._open()

    @abstractmethod
    def _open(self) -> None:
        """Make the channels, if they can be made now."""

    def _channel(self, kind: Any, port: str) -> Any:
        return channel(kind, self._addresses[port], self._certificates, self._options)

    def _method(self, ask: Ask) -> Any:
        stub = self._stubs.get((ask.port, ask.stub))
        if stub is None:
            stub = self._stubs[ask.port, ask.stub] = ask.stub(self._channels[ask.port])
        return getattr(stub, ask.method)


class GrpcClient(_Ports, _Calls, Blocks):
    """Speaks to both gRPC ports of one server; a ``with`` statement, or ``close``, closes its connections.

    May be used by several threads.
    """

    def _open(self) -> None:
        for port in self._addresses:
            self._channels[port] = self._channel(grpc, port)

    def __enter__(self) -> GrpcClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for one in self._channels.values():
            one.close()

    def _answer(self, ask: Ask) -> Answered:
        method, calling = self._method(ask), Calling(ask, self._keys[ask.port], self._retries, self._timeout)
        while True:
            try:
                message, call = method.with_call(ask.message, **calling.how())
                return Answered(message, dict(call.trailing_metadata()))
            except grpc.RpcError as error:
                self._pause(calling, error)

    def _listen(self, listen: Listen[T]) -> Iterator[T]:
        ask = listen.ask
        method, calling = self._method(ask), Calling(ask, self._keys[ask.port], self._retries, self._timeout)
        while True:
            call = method(iter(ask.message) if calling.many else ask.message, **calling.how())
            try:
                with closing(heard(call, calling.silence(listen))) as messages:
                    for message in messages:
                        calling.answered = True
                        yield listen.piece(message)
                return calling.ended()
            except grpc.RpcError as error:
                self._pause(calling, error)
            finally:
                call.cancel()

    def _pause(self, calling: Calling, error: grpc.RpcError) -> None:
        """Let the time pass until a call is sent again. Raises what became of it."""
        renewal = calling.renewal(error)
        if renewal is not None:
            with suppress(httpx.HTTPError), httpx.Client(verify=self._certificates.context()) as http:
                http.send(renewal)
        wait = calling.wait(error, renewal is not None)
        if wait is None:
            raise errors.of(error)
        time.sleep(wait)


class AsyncGrpcClient(_Ports, _Calls, Awaits):
    """The same for asyncio: calls are awaited, streams are iterated over with ``async for``."""

    def _open(self) -> None:
        """Channels belong to the event loop in which they are made: that of the first call."""

    async def __aenter__(self) -> AsyncGrpcClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        for one in self._channels.values():
            await one.close()

    def _method(self, ask: Ask) -> Any:
        if ask.port not in self._channels:
            self._channels[ask.port] = self._channel(grpc.aio, ask.port)
        return super()._method(ask)

    async def _answer(self, ask: Ask) -> Answered:
        method, calling = self._method(ask), Calling(ask, self._keys[ask.port], self._retries, self._timeout)
        while True:
            call = method(ask.message, **calling.how())
            try:
                message = await call
                return Answered(message, dict(await call.trailing_metadata()))
            except grpc.RpcError as error:
                await self._pause(calling, error)

    async def _listen(self, listen: Listen[T]) -> AsyncIterator[T]:
        ask = listen.ask
        method, calling = self._method(ask), Calling(ask, self._keys[ask.port], self._retries, self._timeout)
        while True:
            call = method(ask.message, **calling.how())
            if calling.many:
                ask.message.call = call
            try:
                async with aclosing(heard_async(call, calling.silence(listen))) as messages:
                    async for message in messages:
                        calling.answered = True
                        yield listen.piece(message)
                calling.ended()
                return
            except grpc.RpcError as error:
                await self._pause(calling, error)
            finally:
                call.cancel()

    async def _pause(self, calling: Calling, error: grpc.RpcError) -> None:
        """Let the time pass until a call is sent again. Raises what became of it."""
        renewal = calling.renewal(error)
        if renewal is not None:
            with suppress(httpx.HTTPError):
                async with httpx.AsyncClient(verify=self._certificates.context()) as http:
                    await http.send(renewal)
        wait = calling.wait(error, renewal is not None)
        if wait is None:
            raise errors.of(error)
        await asyncio.sleep(wait)
