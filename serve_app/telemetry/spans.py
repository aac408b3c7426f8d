"""Spans of traced requests: the API of OpenTelemetry at a fraction of its SDK's cost.

A span holds its ids as text, as the header ``traceparent`` has them, and its attributes in a plain dict. The
thread that exports, or a handler that uses the API, converts them. Only ``serve_app.telemetry.tracing``
imports this module, and only where traces are switched on: it needs the extra ``otel``.

Sources: W3C Trace Context, the specification of OpenTelemetry's trace API.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from contextvars import Token
from types import TracebackType
from typing import Any, Literal, Protocol

from opentelemetry import context as contexts
from opentelemetry.attributes import BoundedAttributes
from opentelemetry.sdk.trace import Event, SpanLimits
from opentelemetry.sdk.trace import Span as SdkSpan
from opentelemetry.sdk.util import BoundedList
from opentelemetry.trace import (
    Link,
    Span,
    SpanContext,
    Status,
    StatusCode,
    TraceFlags,
    TraceState,
    set_span_in_context,
)

Kind = Literal["SERVER", "CLIENT", "INTERNAL"]

_TRACEPARENT = re.compile(
    r"[ \t]*(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*|[ \t]*)"
)
_MAX_TRACEPARENT, _MAX_TRACESTATE = 512, 8192  # characters; longer headers are ignored, as by the library
_SAMPLED, _RANDOM = 1, 2  # bits of the flags
_randbits = random.getrandbits


class ParentContext:
    """The context of a span's parent: ids in hexadecimal, flags, and the text of ``tracestate``."""

    __slots__ = ("flags", "is_remote", "span_id", "trace_id", "tracestate")

    def __init__(self, trace_id: str, span_id: str, flags: int, tracestate: str, is_remote: bool) -> None:
        self.trace_id = trace_id
        self.span_id = span_id
        self.flags = flags
        self.tracestate = tracestate
        self.is_remote = is_remote

    @property
    def is_sampled(self) -> bool:
        return bool(self.flags & _SAMPLED)


def parse_context(traceparent: str, tracestate: str = "") -> ParentContext | None:
    """Return the context of two headers; None where ``traceparent`` is invalid."""
    match = _TRACEPARENT.fullmatch(traceparent) if len(traceparent) <= _MAX_TRACEPARENT else None
    if match is None:
        return None
    version, trace_id, span_id, flags, rest = match.groups()
    if version == "00" and rest[:1] == "-":  # only later versions have further fields
        return None
    return ParentContext(trace_id, span_id, int(flags, 16), tracestate, True)


class SpanQueue(Protocol):
    """The receiver of ended spans, with the limits of their contents."""

    limits: SpanLimits

    def add(self, span: RequestSpan) -> None: ...


class RequestSpan(Span):
    """A span of the server or of a handler's stage."""

    __slots__ = (
        "_context",
        "attributes",
        "dropped_links",
        "end_time",
        "events",
        "flags",
        "is_parent_remote",
        "kind",
        "links",
        "name",
        "parent_id",
        "queue",
        "span_id",
        "start_time",
        "status",
        "trace_id",
        "tracestate",
    )

    def __init__(
        self,
        queue: SpanQueue,
        name: str,
        kind: Kind,
        parent: ParentContext | RequestSpan | None,
        attributes: dict[str, Any],
        start_time: int = 0,
    ) -> None:
        self.queue = queue
        self.name = name
        self.kind = kind
        self.span_id = f"{_randbits(64) or 1:016x}"
        if parent is None:
            self.trace_id = f"{_randbits(128) or 1:032x}"
            self.parent_id = self.tracestate = ""
            self.flags = _SAMPLED | _RANDOM
            self.is_parent_remote = False
        else:
            self.trace_id = parent.trace_id
            self.parent_id = parent.span_id
            self.tracestate = parent.tracestate
            self.flags = _SAMPLED | parent.flags & _RANDOM
            self.is_parent_remote = type(parent) is ParentContext
        self.attributes: MutableMapping[str, Any] = attributes
        self.links: Sequence[tuple[str, str, Mapping[str, Any]]] = ()  # trace, span and attributes
        self.dropped_links = 0
        self.events: Any = ()
        self.status: Status | None = None
        self._context: SpanContext | None = None
        self.end_time = 0
        self.start_time = start_time or time.time_ns()

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{self.flags:02x}"

    def link_to(self, parents: Iterable[ParentContext]) -> None:
        """Link this span to others."""
        links: list[tuple[str, str, Mapping[str, Any]]]
        links = [(parent.trace_id, parent.span_id, {}) for parent in parents]
        limit = self.queue.limits.max_links
        self.links = links if limit is None else links[:limit]
        self.dropped_links = len(links) - len(self.links)

    def fail(self, reason: str) -> None:
        """Set the status of an error, with its reason as ``error.type``."""
        self.attributes["error.type"] = reason
        self.set_status(StatusCode.ERROR, reason)

    def limited_attributes(self) -> MutableMapping[str, Any]:
        """Return the attributes within the limits of ``OTEL_SPAN_ATTRIBUTE_*``."""
        limits = self.queue.limits
        count, length = limits.max_span_attributes, limits.max_span_attribute_length
        if isinstance(self.attributes, BoundedAttributes) or (
            length is None and (count is None or len(self.attributes) <= count)
        ):
            return self.attributes
        return BoundedAttributes(count, self.attributes, False, length)

    def stage(self, name: str) -> CurrentSpan:
        """Return a context manager that starts a span below this one and makes it the current one."""
        return CurrentSpan(RequestSpan(self.queue, name, "INTERNAL", self, {}), records_exceptions=True)

    # The methods of the API, for handlers

    def end(self, end_time: int | None = None) -> None:
        if not self.end_time:
            self.end_time = end_time or time.time_ns()
            self.queue.add(self)

    def get_span_context(self) -> SpanContext:
        if self._context is None:
            state = self.tracestate if len(self.tracestate) <= _MAX_TRACESTATE else ""
            self._context = SpanContext(
                int(self.trace_id, 16),
                int(self.span_id, 16),
                False,
                TraceFlags(self.flags),
                TraceState.from_header([state]) if state else None,
            )
        return self._context

    def is_recording(self) -> bool:
        return not self.end_time

    def set_attributes(self, attributes: Mapping[str, Any]) -> None:
        if self.end_time:
            return
        if type(self.attributes) is dict:  # the library checks and limits the values of handlers
            limits = self.queue.limits
            self.attributes = BoundedAttributes(
                limits.max_span_attributes, self.attributes, False, limits.max_span_attribute_length
            )
        for name, value in attributes.items():
            self.attributes[name] = value

    def set_attribute(self, key: str, value: Any) -> None:
        self.set_attributes({key: value})

    def add_event(
        self, name: str, attributes: Mapping[str, Any] | None = None, timestamp: int | None = None
    ) -> None:
        if self.end_time:
            return
        limits = self.queue.limits
        if not self.events:
            self.events = BoundedList(limits.max_events)
        limited = BoundedAttributes(
            limits.max_event_attributes, attributes, max_value_len=limits.max_attribute_length
        )
        self.events.append(Event(name, limited, timestamp))

    def add_link(self, context: SpanContext, attributes: Mapping[str, Any] | None = None) -> None:
        if self.end_time or not (context.is_valid or attributes or context.trace_state):
            return
        limits = self.queue.limits
        if limits.max_links is not None and len(self.links) >= limits.max_links:
            self.dropped_links += 1
            return
        link = Link(context, attributes)
        limited = BoundedAttributes(
            limits.max_link_attributes, link.attributes, max_value_len=limits.max_attribute_length
        )
        ids = f"{context.trace_id:032x}", f"{context.span_id:016x}"
        self.links = [*self.links, (*ids, limited)]

    def update_name(self, name: str) -> None:
        if not self.end_time:
            self.name = name

    def set_status(self, status: Status | StatusCode, description: str | None = None) -> None:
        new = status if isinstance(status, Status) else Status(status, description)
        is_final = self.end_time or (self.status is not None and self.status.status_code is StatusCode.OK)
        if not is_final and new.status_code is not StatusCode.UNSET:
            self.status = new

    def record_exception(
        self,
        exception: BaseException,
        attributes: Mapping[str, Any] | None = None,
        timestamp: int | None = None,
        escaped: bool = False,
    ) -> None:
        # The library's method uses nothing of its span but add_event.
        SdkSpan.record_exception(self, exception, attributes, timestamp, escaped)  # type: ignore[arg-type]


class CurrentSpan:
    """A block in which a span is the current one; the span ends with it, with the error that leaves it."""

    __slots__ = ("_records_exceptions", "_span", "_token")

    def __init__(self, span: RequestSpan, *, records_exceptions: bool) -> None:
        self._span = span
        self._records_exceptions = records_exceptions
        self._token: Token[Any] | None = None

    def __enter__(self) -> RequestSpan:
        self._token = contexts.attach(set_span_in_context(self._span))
        return self._span

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._token is not None
        contexts.detach(self._token)
        if isinstance(error, Exception):
            if self._records_exceptions:
                self._span.record_exception(error)
            self._span.set_status(StatusCode.ERROR, f"{type(error).__name__}: {error}")
        self._span.end()
