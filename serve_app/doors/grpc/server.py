"""A server of gRPC for this process's event loop: calls over HTTP/2's streams, and the methods that answer them.

It takes what gRPC's generated code hands to a server: method handlers with coroutines as their behaviour.
https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md says what is on the wire.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import socket
import ssl
import struct
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import quote

import grpc
from grpc.aio import AbortError

from serve_app.doors.grpc.connection import Connection
from serve_app.doors.grpc.headers import Head, block
from serve_app.doors.grpc.messages import ENCODINGS, Messages, Refused
from serve_app.doors.grpc.stream import Stream

_MOST_METADATA = 16_384  # bytes of a call's head
_HELD = 1 << 20  # bytes of messages that wait to be read, before their sender waits
_LONGEST_WORDS = 4_096  # bytes of a status's details, percent-encoded: clients take 8 KiB of trailers
_LAST_WORDS = 1.0  # seconds in which what was written last may reach its reader
_PRINTABLE = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")
_PREFIX = struct.Struct(">BI")

_ACCEPTED = block([("content-type", "application/grpc"), ("grpc-accept-encoding", ",".join(ENCODINGS))])
_HEAD = b"\x88" + _ACCEPTED  # :status 200
_STATUS = {code: block([("grpc-status", str(code.value[0]))]) for code in grpc.StatusCode}
_Code = grpc.StatusCode

log = logging.getLogger("torchrelay.doors")


@dataclass(frozen=True)
class Limits:
    """``message`` and ``answer`` are in bytes; ages of connections in seconds. 0: without end."""

    message: int = 4 << 20
    answer: int = 0
    calls: int = 10_000
    age: float = 0.0
    grace: float = 0.0
    keepalive: float = 30.0


class Method(NamedTuple):
    """How a method is called: with one message or many, and so answered."""

    behaviour: Callable[[Any, Context], Any]
    parse: Callable[[bytes], Any] | None
    serialize: Callable[[Any], bytes] | None
    many_in: bool
    many_out: bool

    @classmethod
    def of(cls, handler: grpc.RpcMethodHandler) -> Method:
        many_in, many_out = bool(handler.request_streaming), bool(handler.response_streaming)
        kinds = (handler.unary_unary, handler.unary_stream, handler.stream_unary, handler.stream_stream)
        behaviour = kinds[2 * many_in + many_out]
        return cls(behaviour, handler.request_deserializer, handler.response_serializer, many_in, many_out)


class Context:
    """One call, as its method sees it. ``headers`` is its metadata, not to be changed."""

    __slots__ = (
        "_begun",
        "_deadline",
        "_ended",
        "_loop",
        "_message",
        "_messages",
        "_method",
        "_requests",
        "_server",
        "_stream",
        "_task",
        "_timer",
        "_trailers",
        "headers",
        "peer",
    )

    def __init__(self, server: Server, stream: Stream, head: Head, method: Method, peer: str) -> None:
        self._server = server
        self._stream = stream
        self._method = method
        self._loop = loop = asyncio.get_running_loop()
        self.headers: Mapping[str, str] = head.headers
        self.peer = peer
        self._messages = Messages(head.encoding, server.limits.message)
        self._message: bytes | None = None
        self._trailers: Sequence[tuple[str, str]] = ()
        self._begun = self._ended = False
        self._task: asyncio.Task[None] | None = None
        self._deadline: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        if head.timeout is not None:
            self._deadline = loop.time() + head.timeout
            self._timer = loop.call_at(self._deadline, self._expired)
        self._requests: _Requests | None = None
        if method.many_in:
            self._requests = _Requests(stream, method.parse)
            self._task = loop.create_task(self._run(self._requests))

    # What a method asks and says

    def time_remaining(self) -> float | None:
        """Seconds until the caller's deadline; None where it set none."""
        return None if self._deadline is None else self._deadline - self._loop.time()

    def set_trailing_metadata(self, fields: Sequence[tuple[str, str]]) -> None:
        self._trailers = fields

    def begin(self) -> None:
        """Tell the caller that its call is let in, before there is anything to say."""
        if not self._begun and not self._ended:
            self._begun = True
            self._stream.head(_HEAD)

    async def write(self, message: Any) -> None:
        """Send a message of a stream; it waits for a client that reads slowly."""
        self._send(message)
        await self._stream.drained()

    async def abort(self, code: grpc.StatusCode, details: str = "") -> None:
        """End the call with ``code``. Raises AbortError, always."""
        self.end(code, details)
        raise AbortError

    def end(self, code: grpc.StatusCode, details: str = "", reason: str = "") -> None:
        """The answer is whole, or nothing more will be of it. What is said later is not sent.

        ``reason`` is said beside the trailing metadata, and those of the method do not have it.
        """
        if self._ended:
            return
        self._ended = True
        if self._timer is not None:
            self._timer.cancel()
        fields = _STATUS[code]
        if details:
            fields += block([("grpc-message", _percent(details))])
        if self._trailers:
            fields += block(self._trailers)
        if reason:
            fields += _reason(reason)
        self._stream.end(fields if self._begun else _HEAD + fields)

    # What its stream tells

    def received(self, data: bytes, ended: bool) -> None:
        if self._ended:
            return
        try:
            messages = self._messages.feed(data) if data else ()
            if ended and self._messages.partial:
                raise Refused(_Code.INTERNAL, "The stream ended in the middle of a message.")
            if self._requests is not None:
                self._requests.put(messages, len(data), ended)
            elif self._one(messages, ended):
                self._task = self._loop.create_task(self._run(self._message))
            elif not ended:
                self._stream.grant(len(data))
        except Refused as refused:
            self._stop(refused.code, str(refused), refused.reason)

    def _one(self, messages: Sequence[bytes], ended: bool) -> bool:
        """The only message has come, and nothing comes after it. Raises Refused."""
        for message in messages:
            if self._message is not None:
                raise Refused(_Code.UNIMPLEMENTED, "The method takes one message, and more have come.")
            self._message = message
        if ended and self._message is None:
            raise Refused(_Code.UNIMPLEMENTED, "The method takes one message, and none has come.")
        return ended

    def lost(self) -> None:
        self._ended = True
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            self._task.cancel()
        self._server.ended(self)

    def over(self) -> None:
        self._server.ended(self)

    # How it is answered

    async def _run(self, request: Any) -> None:
        method = self._method
        try:
            if method.parse is not None and not method.many_in:
                request = method.parse(request)
            answer = method.behaviour(request, self)
            if not method.many_out:
                self._send(await answer)
            elif hasattr(answer, "__aiter__"):
                async for message in answer:
                    await self.write(message)
            else:
                await answer
            self.end(_Code.OK)
        except AbortError:
            pass
        except Refused as refused:
            self.end(refused.code, str(refused), refused.reason)
        except asyncio.CancelledError:
            self.end(_Code.CANCELLED)
            raise
        except ConnectionResetError:
            if not self._ended:
                raise
        except Exception:
            log.exception("A method of gRPC failed: a fault of this server")
            self.end(_Code.UNKNOWN, "A fault of this server.")

    def _send(self, message: Any) -> None:
        serialize = self._method.serialize
        data = serialize(message) if serialize is not None else message
        most = self._server.limits.answer
        if most and len(data) > most:
            words = f"The answer of {len(data)} bytes is larger than runtime.max_response_size, {most} bytes."
            self._trailers = self._trailers[:1]  # those of an answer that is not sent, but for its id
            raise Refused(_Code.RESOURCE_EXHAUSTED, words, "response_too_large")
        if self._ended:
            return
        self.begin()
        self._stream.send(_PREFIX.pack(0, len(data)) + data)

    def _expired(self) -> None:
        self._stop(_Code.DEADLINE_EXCEEDED, "The call's deadline is over.", "deadline")

    def _stop(self, code: grpc.StatusCode, words: str, reason: str = "") -> None:
        self.end(code, words, reason)
        if self._task is not None:
            self._task.cancel()

    def leave(self) -> None:
        """The server ends before the call does."""
        self._stop(_Code.UNAVAILABLE, "This server is ending.")


class _Requests:
    """The messages of a stream, as they are asked for; their sender waits when too many do."""

    def __init__(self, stream: Stream, parse: Callable[[bytes], Any] | None) -> None:
        self._stream = stream
        self._parse = parse
        self._waiting: deque[bytes] = deque()
        self._held = 0
        self._owed = 0
        self._ended = False
        self._come = asyncio.Event()

    def put(self, messages: Iterable[bytes], size: int, ended: bool) -> None:
        for message in messages:
            self._waiting.append(message)
            self._held += len(message) + 5
        self._ended = ended
        self._come.set()
        self._owed += size
        self._grant()

    def _grant(self) -> None:
        if self._held <= _HELD and self._owed:
            self._stream.grant(self._owed)
            self._owed = 0

    def __aiter__(self) -> _Requests:
        return self

    async def __anext__(self) -> Any:
        while not self._waiting:
            if self._ended:
                raise StopAsyncIteration
            self._come.clear()
            await self._come.wait()
        message = self._waiting.popleft()
        self._held -= len(message) + 5
        self._grant()
        return self._parse(message) if self._parse is not None else message


class Server:
    """Add its methods, let it ``serve`` sockets, and ``stop`` it."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self._methods: dict[str, Method] = {}
        self._listening: list[asyncio.AbstractServer] = []
        self._connections: dict[Connection, list[asyncio.TimerHandle]] = {}
        self._calls: set[Context] = set()
        self._empty = asyncio.Event()

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, grpc.RpcMethodHandler]) -> None:
        """The methods of ``service`` by their names."""
        for name, handler in handlers.items():
            self._methods[f"/{service}/{name}"] = Method.of(handler)

    def add_generic_rpc_handlers(self, handlers: Iterable[grpc.GenericRpcHandler]) -> None:
        """Generated code hands its methods over twice; the other way tells their names."""

    async def serve(self, sock: socket.socket, tls: ssl.SSLContext | None = None) -> None:
        """Take connections at ``sock``, which is bound."""
        if tls is not None:
            tls.set_alpn_protocols(["h2"])
        loop = asyncio.get_running_loop()
        self._listening.append(await loop.create_server(self._connection, sock=sock, ssl=tls, backlog=1024))

    async def stop(self, grace: float) -> None:
        """Take no further call, and end when those that are under way have ended, ``grace`` seconds at most."""
        for listening in self._listening:
            listening.close()
        for connection in list(self._connections):
            connection.leave()
        await self._emptied(grace)
        for call in list(self._calls):
            call.leave()
        for connection in list(self._connections):
            connection.close()
        await self._emptied(_LAST_WORDS)
        for connection in list(self._connections):
            connection.drop()

    async def _emptied(self, patience: float) -> None:
        self._empty.clear()
        if self._connections and patience > 0:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._empty.wait(), patience)

    def ended(self, call: Context) -> None:
        self._calls.discard(call)

    def _connection(self) -> Connection:
        return Connection(self, max(100, self.limits.calls), _MOST_METADATA, self.limits.keepalive)

    def connected(self, connection: Connection) -> None:
        timers = self._connections[connection] = []
        limits = self.limits
        if limits.age:
            age = limits.age * random.uniform(0.9, 1.1)  # not all at once
            loop = asyncio.get_running_loop()
            timers.append(loop.call_later(age, connection.leave))
            if limits.grace:
                timers.append(loop.call_later(age + limits.grace, connection.drop))

    def disconnected(self, connection: Connection) -> None:
        for timer in self._connections.pop(connection, ()):
            timer.cancel()
        if not self._connections:
            self._empty.set()

    def begun(self, connection: Connection, stream: Stream, head: Head) -> None:
        kind, _, rest = head.content_type.partition("application/grpc")
        if head.method != "POST":
            return stream.end(_plain(405))
        if kind or not rest and head.content_type != "application/grpc" or rest[:1] not in ("", "+", ";"):
            return stream.end(_plain(415))
        method = self._methods.get(head.path)
        if method is None:
            return _refuse(stream, _Code.UNIMPLEMENTED, f"There is no method {head.path[:200]} here.")
        if head.size > _MOST_METADATA:
            words = f"The metadata have {head.size} bytes, and {_MOST_METADATA} are taken."
            return _refuse(stream, _Code.RESOURCE_EXHAUSTED, words, _reason("too_large"))
        if head.encoding not in ENCODINGS:
            words = f"Messages may be {', '.join(ENCODINGS)}, not {head.encoding[:50]}."
            return _refuse(stream, _Code.UNIMPLEMENTED, words)
        if len(self._calls) >= self.limits.calls:
            words = f"{self.limits.calls} calls are under way, as many as grpc.max_concurrent_calls allows."
            return _refuse(stream, _Code.RESOURCE_EXHAUSTED, words, _AGAIN)
        call = Context(self, stream, head, method, connection.peer)
        self._calls.add(call)
        stream.receiver = call
        return None


def _refuse(stream: Stream, code: grpc.StatusCode, words: str, more: bytes = b"") -> None:
    stream.end(_HEAD + _STATUS[code] + block([("grpc-message", _percent(words))]) + more)


def _reason(word: str) -> bytes:
    return block([("x-torchrelay-reason", word)])


_AGAIN = _reason("quota") + block([("retry-after", "1")])


def _plain(status: int) -> bytes:
    """What is said to somebody who does not speak gRPC."""
    return b"\x08\x03%d" % status + _ACCEPTED


def _percent(words: str) -> str:
    """``words`` as a status's details go over the wire, as many as there is room for."""
    said = quote(words, safe=_PRINTABLE)
    while len(said) > _LONGEST_WORDS:
        words = words[: len(words) * _LONGEST_WORDS // len(said)]
        said = quote(words, safe=_PRINTABLE)
    return said
