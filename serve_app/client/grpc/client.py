"""The blocking client and the asyncio client over gRPC."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import aclosing, closing, suppress
from pathlib import Path
from typing import Any, TypeVar

import grpc
import grpc.aio
import httpx

from serve_app.client._operations import AsyncExecutor, SyncExecutor
from serve_app.client.grpc import errors
from serve_app.client.grpc._idle_timeout import iterate_with_timeout, iterate_with_timeout_async
from serve_app.client.grpc._operations import GrpcReply, GrpcRequestDescriptor, GrpcStreamDescriptor
from serve_app.client.grpc._retry import GrpcRetryLoop, Keys
from serve_app.client.grpc.channels import GrpcAddress, TlsFiles, create_channel
from serve_app.client.grpc.health import GrpcHealthOperations
from serve_app.client.grpc.models import GrpcModelOperations
from serve_app.client.grpc.open_inference import GrpcOpenInferenceOperations
from serve_app.client.grpc.predictions import GrpcPredictionOperations
from serve_app.client.keys import BearerAuth, KeyFile
from serve_app.client.retries import DEFAULT_RETRIES, Retries

T = TypeVar("T")


class _GrpcOperations(
    GrpcPredictionOperations, GrpcOpenInferenceOperations, GrpcModelOperations, GrpcHealthOperations
):
    """The operations of every service."""


class _GrpcEndpoints(ABC):
    """The addresses of a server's ports, and the key for each.

    An address is ``HOST:PORT``, or ``https://HOST:PORT`` for TLS; ``root_certificates``, and
    ``certificate_chain`` with its ``private_key``, are PEM files. ``token`` is the key that is sent with
    calls. Without one it is read from ``key_file``, the server's own, which may be created later. gRPC has no
    call that renews an expired key, so ``token_url`` is the management port over HTTP. ``timeout`` are the
    seconds for a call without a timeout of its own, and those in which a message of a stream must arrive;
    None is no limit. ``retries`` configures when a call is sent again. ``options`` are options of gRPC's
    channels, such as ``grpc.max_receive_message_length``.
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
        token_url: str = "http://127.0.0.1:8081",
        retries: Retries = DEFAULT_RETRIES,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._addresses = {"inference": GrpcAddress(inference), "management": GrpcAddress(management)}
        self._tls_files = TlsFiles(root_certificates, certificate_chain, private_key)
        self._options = options or {}
        self._keys: dict[str, Keys] = dict.fromkeys(self._addresses, BearerAuth(token) if token else None)
        if key_file is not None and not token:
            self._keys["inference"] = KeyFile(key_file, "inference", token_url)
            self._keys["management"] = KeyFile(key_file, "management", token_url)
        self._timeout = timeout
        self._retries = retries
        self._channels: dict[str, Any] = {}
        self._stubs: dict[tuple[str, Any], Any] = {}
        self._create_channels()

    @abstractmethod
    def _create_channels(self) -> None:
        """Create the channels, if they can be created now."""

    def _create_channel(self, grpc_module: Any, port: str) -> Any:
        return create_channel(grpc_module, self._addresses[port], self._tls_files, self._options)

    def _method(self, request: GrpcRequestDescriptor) -> Any:
        stub = self._stubs.get((request.port, request.stub))
        if stub is None:
            stub = self._stubs[request.port, request.stub] = request.stub(self._channels[request.port])
        return getattr(stub, request.method)

    def _retry_loop(self, request: GrpcRequestDescriptor) -> GrpcRetryLoop:
        return GrpcRetryLoop(request, self._keys[request.port], self._retries, self._timeout)


class GrpcClient(_GrpcEndpoints, _GrpcOperations, SyncExecutor[GrpcRequestDescriptor, GrpcReply]):
    """A client of both gRPC ports of one server; a ``with`` statement, or ``close``, closes its connections.

    Several threads may use it.
    """

    def _create_channels(self) -> None:
        for port in self._addresses:
            self._channels[port] = self._create_channel(grpc, port)

    def __enter__(self) -> GrpcClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for channel in self._channels.values():
            channel.close()

    def _send(self, request: GrpcRequestDescriptor) -> GrpcReply:
        method, attempts = self._method(request), self._retry_loop(request)
        while True:
            try:
                message, call = method.with_call(request.message, **attempts.call_options())
                return GrpcReply(message, dict(call.trailing_metadata()))
            except grpc.RpcError as error:
                self._wait_for_retry(attempts, error)

    def _stream(self, stream: GrpcStreamDescriptor[T]) -> Generator[T, None, None]:
        request = stream.request
        method, attempts = self._method(request), self._retry_loop(request)
        while True:
            messages = iter(request.message) if attempts.is_request_stream else request.message
            call = method(messages, **attempts.call_options())
            try:
                with closing(iterate_with_timeout(call, attempts.idle_timeout(stream))) as received:
                    for message in received:
                        attempts.has_response = True
                        yield stream.decode(message)
                return attempts.raise_request_failure()
            except grpc.RpcError as error:
                self._wait_for_retry(attempts, error)
            finally:
                call.cancel()

    def _wait_for_retry(self, attempts: GrpcRetryLoop, error: grpc.RpcError) -> None:
        """Sleep until the call is to be sent again. Raises the call's error where it is final."""
        renewal = attempts.renewal_request(error)
        if renewal is not None:
            with suppress(httpx.HTTPError), httpx.Client(verify=self._tls_files.ssl_context()) as http:
                http.send(renewal)
        delay = attempts.retry_delay(error, renewal is not None)
        if delay is None:
            raise errors.from_rpc_error(error)
        time.sleep(delay)


class AsyncGrpcClient(_GrpcEndpoints, _GrpcOperations, AsyncExecutor[GrpcRequestDescriptor, GrpcReply]):
    """A client for asyncio: methods are awaited, streams are iterated over with ``async for``."""

    def _create_channels(self) -> None:
        """Create no channel: channels belong to the event loop of the first call."""

    async def __aenter__(self) -> AsyncGrpcClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        for channel in self._channels.values():
            await channel.close()

    def _method(self, request: GrpcRequestDescriptor) -> Any:
        if request.port not in self._channels:
            self._channels[request.port] = self._create_channel(grpc.aio, request.port)
        return super()._method(request)

    async def _send(self, request: GrpcRequestDescriptor) -> GrpcReply:
        method, attempts = self._method(request), self._retry_loop(request)
        while True:
            call = method(request.message, **attempts.call_options())
            try:
                message = await call
                return GrpcReply(message, dict(await call.trailing_metadata()))
            except grpc.RpcError as error:
                await self._wait_for_retry(attempts, error)

    async def _stream(self, stream: GrpcStreamDescriptor[T]) -> AsyncGenerator[T, None]:
        request = stream.request
        method, attempts = self._method(request), self._retry_loop(request)
        while True:
            call = method(request.message, **attempts.call_options())
            if attempts.is_request_stream:
                request.message.call = call
            try:
                timeout = attempts.idle_timeout(stream)
                async with aclosing(iterate_with_timeout_async(call, timeout)) as received:
                    async for message in received:
                        attempts.has_response = True
                        yield stream.decode(message)
                attempts.raise_request_failure()
                return
            except grpc.RpcError as error:
                await self._wait_for_retry(attempts, error)
            finally:
                call.cancel()

    async def _wait_for_retry(self, attempts: GrpcRetryLoop, error: grpc.RpcError) -> None:
        """Sleep until the call is to be sent again. Raises the call's error where it is final."""
        renewal = attempts.renewal_request(error)
        if renewal is not None:
            with suppress(httpx.HTTPError):
                async with httpx.AsyncClient(verify=self._tls_files.ssl_context()) as http:
                    await http.send(renewal)
        delay = attempts.retry_delay(error, renewal is not None)
        if delay is None:
            raise errors.from_rpc_error(error)
        await asyncio.sleep(delay)
