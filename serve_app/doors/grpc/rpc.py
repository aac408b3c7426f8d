"""One gRPC call and its answer, and what the calls of one port have in common.

Each call is let in, answered, counted and logged once. A door gives its methods to ``Port.unary`` and
``Port.stream``, which make of them what a gRPC server calls.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import lru_cache
from typing import Any, NamedTuple

import grpc
from google.protobuf.message import DecodeError

from serve_app.doors import auth
from serve_app.doors.exchange import author_headers, deadline, priority, uuid4
from serve_app.doors.grpc.errors import Table, look_up
from serve_app.doors.grpc.server import Context
from serve_app.errors import HandlerSaid, InvalidBody, OfStep, RelayError, WrongModel, reason
from serve_app.telemetry.access_log import AccessLog
from serve_app.types import Access, Call, Grant, Input, Priority, Reply, Right

LONGEST_DETAILS = 2_000  # characters: a status travels in a header, and clients take 8 KiB of those
_MOST_HEADERS = 4_096  # bytes of what a handler set itself
_KEY = re.compile(r"(?!grpc-)[0-9a-z_.-]+(?<!-bin)")
_OK = grpc.StatusCode.OK
_CANCELLED = grpc.StatusCode.CANCELLED

_log = logging.getLogger("torchrelay.doors")


class Rpc:
    """``headers`` are the call's metadata, without binary values; of a repeated one the last.

    ``model`` and ``version`` are what answered, for the log. ``grant`` is what the caller's key allows; None where
    no key is wanted.
    """

    __slots__ = ("_trailers", "context", "grant", "headers", "model", "request_id", "version")

    def __init__(self, context: Context) -> None:
        self.context = context
        self.headers = dict(context.headers)
        self.request_id = uuid4()
        self.model = self.version = ""
        self.grant: Grant | None = None
        self._trailers = [("x-request-id", self.request_id)]
        self.finish()  # what the server itself ends has its id, too

    def renew(self) -> None:
        """What comes now is a request of its own, with an id of its own: one of a stream of them."""
        self.request_id = uuid4()
        self._trailers = [("x-request-id", self.request_id)]

    def cover(self, model: str) -> None:
        """Raises WrongModel where the caller's key is not for ``model``."""
        if self.grant is not None and not self.grant.covers(model):
            raise WrongModel(model)

    @property
    def within(self) -> tuple[str, ...]:
        """The models, as patterns, that the caller's key is for."""
        return self.grant.models if self.grant is not None else ("*",)

    def call(self, model: str, version: str, inputs: tuple[Input, ...], headers: dict[str, str] | None = None) -> Call:
        """A prediction in nobody's dialect; its deadline is the caller's own. Raises BadRequest and WrongModel."""
        self.model, self.version = model, version
        self.cover(model)
        said = {**self.headers, "url_path": "", "explain": "False"}
        if headers:
            said.update(headers)
        return Call(model, version or None, inputs, said, "predict", self.request_id, self.deadline, self.priority)

    @property
    def priority(self) -> Priority:
        """How urgent it is. Raises BadRequest."""
        return priority(self.headers)

    @property
    def deadline(self) -> float | None:
        """When the caller stops waiting: what it told gRPC, or what it says in its metadata. Raises BadRequest."""
        left, said = self.context.time_remaining(), deadline(self.headers)
        if left is None:
            return said
        until = time.time() + left
        return until if said is None else min(until, said)

    def answered(self, reply: Reply) -> None:
        """``reply`` answers this call: what HTTP has in headers goes into the trailing metadata."""
        self.version = reply.version
        trailers = [self._trailers[0], ("x-model-version", _value(reply.version))]
        times = reply.timings
        if times.batch_size:
            said = "queue;dur=%.3f, inference;dur=%.3f, batch;desc=%d"
            trailers.append(("server-timing", said % (times.queue * 1000, times.inference * 1000, times.batch_size)))
        if reply.arm:
            trailers.append(("x-torchrelay-arm", _value(reply.arm)))
        if reply.content_type or reply.headers:
            trailers += _authors(reply)
        if reply.status != 200:
            trailers.append(("x-status", _value(f"{reply.status} {reply.phrase}")))
        self._trailers = trailers

    def failed(self, error: Exception) -> None:
        """``error`` answers this call, or its last part so far."""
        if not isinstance(error, RelayError):
            _log.error("%s failed: a fault of this server", self.request_id, exc_info=error)
        trailers = [self._trailers[0], ("x-torchrelay-reason", reason(error))]
        if isinstance(error, RelayError):
            self.version = error.version or self.version
            if error.retry_after is not None:
                trailers.append(("retry-after", str(error.retry_after)))
            if error.version:
                trailers.append(("x-model-version", _value(error.version)))
            if error.arm:
                trailers.append(("x-torchrelay-arm", _value(error.arm)))
            if isinstance(error, OfStep):
                trailers.append(("x-torchrelay-step", _value(error.step)))  # the steps before it have run
            if isinstance(error, HandlerSaid):
                trailers.append(("x-status", str(error.code)))
        self._trailers = trailers

    @property
    def trailers(self) -> dict[str, str]:
        """What the trailing metadata say, if nothing comes between."""
        return dict(self._trailers)

    async def write(self, message: Any) -> None:
        """Send a message of a stream; it waits for a client that reads slowly."""
        await self.context.write(message)

    def finish(self) -> None:
        self.context.set_trailing_metadata(self._trailers)


Unary = Callable[[Any, Rpc], Awaitable[Any]]
Stream = Callable[[Any, Rpc], Awaitable[None]]  # it writes its messages itself


class Dialect(NamedTuple):
    """A service, and how it says what went wrong."""

    service: str
    table: Table
    words: Callable[[Exception, Rpc], str]


class Port:
    """``access`` says who may do what; ``count`` is told each status that was answered.

    Messages are parsed here and not by gRPC, which would answer malformed ones in words of its own.
    """

    def __init__(
        self,
        access: Callable[[], Access | None],
        count: Callable[[str], None] | None = None,
        log: AccessLog | None = None,
    ) -> None:
        self._access = access
        self._count = count
        self._access_log = log

    def unary(self, dialect: Dialect, name: str, kind: Any, answer: Unary, *rights: Right) -> grpc.RpcMethodHandler:
        """The method ``name``, one answer to one message of ``kind``. Without ``rights`` everybody may call it."""
        path = f"/{dialect.service}/{name}"
        parse = kind.FromString

        async def behaviour(data: bytes, context: Context) -> Any:
            started = time.perf_counter()
            rpc = Rpc(context)
            code = _CANCELLED
            try:
                if rights:
                    self._admit(rpc, *rights)
                message = await answer(_parsed(parse, data), rpc)
                code = _OK
                rpc.finish()
                return message
            except Exception as error:
                code = look_up(error, dialect.table)
                await _refuse(error, code, rpc, dialect.words)
            finally:
                self._ended(path, rpc, code, started)

        return grpc.unary_unary_rpc_method_handler(behaviour, None, _written)

    def stream(
        self, dialect: Dialect, name: str, kind: Any, answer: Stream, *rights: Right, many: bool = False
    ) -> grpc.RpcMethodHandler:
        """A method whose answer is a stream, to one message or, where there may be ``many``, to a stream as well."""
        path = f"/{dialect.service}/{name}"
        parse = kind.FromString

        async def each(data: AsyncIterator[bytes]) -> AsyncIterator[Any]:
            async for message in data:
                yield _parsed(parse, message)

        async def behaviour(data: Any, context: Context) -> None:
            started = time.perf_counter()
            rpc = Rpc(context)
            code = _CANCELLED
            try:
                if rights:
                    self._admit(rpc, *rights)
                if many:
                    context.begin()  # its requests may come: some clients wait with them
                await answer(each(data) if many else _parsed(parse, data), rpc)
                code = _OK
                rpc.finish()
            except Exception as error:
                code = look_up(error, dialect.table)
                await _refuse(error, code, rpc, dialect.words)
            finally:
                self._ended(path, rpc, code, started)

        made = grpc.stream_stream_rpc_method_handler if many else grpc.unary_stream_rpc_method_handler
        return made(behaviour, None, _written)

    def _admit(self, rpc: Rpc, *rights: Right) -> None:
        """The key is taken off the metadata: no handler and no log gets to see it. Raises AccessDenied."""
        access = self._access()
        if access is not None:
            rpc.grant = auth.grant(access, rpc.headers.pop("authorization", None), *rights)

    def _ended(self, path: str, rpc: Rpc, code: grpc.StatusCode, started: float) -> None:
        if self._count is not None:
            self._count(code.name)
        log = self._access_log
        if log is None:
            return
        came_with = None
        if log.json:
            came_with = {key: rpc.headers[key] for key in ("x-request-id", "traceparent") if key in rpc.headers}
        milliseconds = (time.perf_counter() - started) * 1000
        client, number = rpc.context.peer, code.value[0]
        log.write(client, "gRPC", path, "2", number, milliseconds, rpc.request_id, rpc.model, rpc.version, came_with)


async def _refuse(error: Exception, code: grpc.StatusCode, rpc: Rpc, words: Callable[[Exception, Rpc], str]) -> None:
    rpc.failed(error)
    rpc.finish()
    await rpc.context.abort(code, words(error, rpc)[:LONGEST_DETAILS])


def _parsed(parse: Callable[[bytes], Any], data: bytes) -> Any:
    try:
        return parse(data)
    except DecodeError:
        kind = parse.__self__.__name__
        raise InvalidBody(f"The message of {len(data)} bytes is no {kind}; its framing is malformed.") from None


def _written(message: Any) -> bytes:
    return message.SerializeToString()


def _authors(reply: Reply) -> list[tuple[str, str]]:
    """What the handler set, as far as gRPC has room for it; its content type is ``x-content-type``."""
    found = []
    size = 0
    for key, value in author_headers(reply.content_type, reply.headers):
        name = "x-content-type" if key == b"content-type" else key.decode("latin-1")
        size += len(name) + len(value)
        if _KEY.fullmatch(name) and size <= _MOST_HEADERS:
            found.append((name, _value(value.decode("latin-1"))))
    return found


@lru_cache(maxsize=1024)
def _value(text: str) -> str:
    """``text`` as gRPC takes it for a value: printable ASCII."""
    return "".join(letter if " " <= letter <= "~" else "?" for letter in text)
