"""Traces of requests, sent over OTLP (OpenTelemetry; extra ``otel``).

A traced request carries the W3C context of its current span in the header ``traceparent``, which every
protocol and transport passes on. So each layer finds its parent there, and a request without it costs one
look-up a layer. Spans wait in a bounded queue for a thread that exports them (``span_export``): no request
waits for a collector.

Sources: W3C Trace Context, OpenTelemetry's semantic conventions for HTTP and RPC spans.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from serve_app.domain.model import ModelRef
from serve_app.domain.request import InferenceRequest
from serve_app.errors import ConfigurationError, RelayError
from serve_app.settings import Settings

if TYPE_CHECKING:
    from serve_app.telemetry.spans import Kind, ParentContext, RequestSpan

TRACEPARENT, TRACESTATE = "traceparent", "tracestate"

_NOT_SAMPLED = tuple("02468ace")  # the last digits of a context whose flag "sampled" is not set
_PROBES = frozenset(("ping", "metrics", "health"))  # first segments of paths that are not sampled

_tracer: _Tracer | None = None


class _Tracer:
    """The tracer of this process."""

    def __init__(self, settings: Settings, process: str, attributes: Mapping[str, str]) -> None:
        from opentelemetry import context, trace
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.sampling import ALWAYS_ON

        from serve_app.telemetry import span_export, spans

        self.api = trace
        self.contexts = context
        self.spans = spans
        self.process = process
        self.ratio = settings.telemetry.trace_sampling
        service = os.environ.get("OTEL_SERVICE_NAME", "torchrelay")
        resource = Resource.create({"service.name": service, "torchrelay.process": process, **attributes})
        self.processor = span_export.SpanProcessor(span_export.create_exporter(settings.telemetry, resource))
        # For spans that handlers start. Requests are sampled before, by begin_request.
        provider = TracerProvider(sampler=ALWAYS_ON, resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(self.processor)
        trace.set_tracer_provider(provider)

    def start(
        self,
        name: str,
        kind: Kind,
        parent: ParentContext | None,
        attributes: dict[str, Any],
        start_time: int = 0,
    ) -> RequestSpan:
        return self.spans.RequestSpan(self.processor, name, kind, parent, attributes, start_time)

    def sampled_parent(self, headers: Mapping[str, str]) -> ParentContext | None:
        """Return the context that headers carry where it is sampled, else None."""
        parent = self.spans.parse_context(headers[TRACEPARENT], headers.get(TRACESTATE, ""))
        return parent if parent is not None and parent.is_sampled else None


def configure(settings: Settings, process: str, **attributes: str) -> None:
    """Start the tracer of this process where ``telemetry.otlp_endpoint`` is set; a second call does nothing.

    ``attributes`` describe the process, as ``model`` and ``version``. The tracer also serves what a handler
    obtains from ``opentelemetry.trace``. Raises ConfigurationError where the exporter is not installed.
    """
    global _tracer
    if not settings.telemetry.otlp_endpoint or _tracer is not None:
        return
    named = {f"torchrelay.{name}": value for name, value in attributes.items() if value}
    try:
        _tracer = _Tracer(settings, process, named)
    except ImportError as error:
        cure = f"traces need a package that is not installed ({error}): pip install 'torchrelay[otel]'"
        raise ConfigurationError("telemetry.otlp_endpoint", cure) from None


def shutdown() -> None:
    """Export the remaining spans, for at most three seconds."""
    global _tracer
    tracer, _tracer = _tracer, None
    if tracer is not None:
        tracer.processor.close()


def take_dropped() -> tuple[str, int]:
    """Return the name of this process, and the number of its spans that were lost since the last call."""
    return ("", 0) if _tracer is None else (_tracer.process, _tracer.processor.take_dropped())


def begin_request(method: str, path: str, headers: dict[str, str], request_id: str) -> RequestSpan | None:
    """Start the span of a request that a protocol received, and enter its context into ``headers``.

    A request with a context is traced where that is sampled, another one by ``telemetry.trace_sampling``.
    Returns None for one that is not traced. ``path`` is the request's route or the name of a gRPC method.
    """
    tracer = _tracer
    if tracer is None:
        return None
    parent = None
    if traceparent := headers.get(TRACEPARENT):
        if traceparent.endswith(_NOT_SAMPLED):
            return None
        # An invalid context is as none: W3C Trace Context, 3.2.2
        parent = tracer.spans.parse_context(traceparent, headers.get(TRACESTATE, ""))
    if parent is not None:
        if not parent.is_sampled:
            return None
    elif random.random() >= tracer.ratio or method == "GET" or path.split("/", 2)[1:2][0] in _PROBES:
        return None
    span = tracer.start(f"{method} {path}", "SERVER", parent, {"torchrelay.request_id": request_id})
    headers[TRACEPARENT] = span.traceparent
    return span


def begin(
    request: InferenceRequest, name: str = "", kind: Kind = "INTERNAL"
) -> tuple[InferenceRequest, RequestSpan | None]:
    """Start a span for a traced request; return the request with the span's context, and the span.

    The name is by default that of the process: gateway or replica.
    """
    tracer = _tracer
    if tracer is None or TRACEPARENT not in request.headers:
        return request, None
    if (parent := tracer.sampled_parent(request.headers)) is None:
        return request, None
    attributes = {"torchrelay.model": request.model, "torchrelay.request_id": request.request_id}
    span = tracer.start(name or tracer.process, kind, parent, attributes)
    return request.with_headers({**request.headers, TRACEPARENT: span.traceparent}), span


def begin_call(traceparent: str, name: str) -> tuple[dict[str, str], RequestSpan | None]:
    """Start a span for an HTTP request that this server sends, as a webhook.

    ``traceparent`` is the context of its cause, empty for none. Returns that of the span, as headers to send,
    and the span.
    """
    tracer = _tracer
    if tracer is None or (parent := tracer.sampled_parent({TRACEPARENT: traceparent})) is None:
        return {}, None
    span = tracer.start(name, "CLIENT", parent, {})
    return {TRACEPARENT: span.traceparent}, span


def end(
    span: RequestSpan,
    error: BaseException | str | None = None,
    attributes: Mapping[str, str | int] | None = None,
    **named: str | int,
) -> None:
    """End a span. ``error`` is an exception or a reason.

    ``attributes`` have the names of OpenTelemetry's conventions; the ``named`` get the prefix torchrelay.
    """
    if not span.is_recording():
        return
    if attributes is not None:
        span.attributes.update(attributes)
    for name, value in named.items():
        if value not in ("", None):
            span.attributes[f"torchrelay.{name}"] = value
    if error:
        span.fail(error if isinstance(error, str) else _error_type(error))
    span.end()


@contextmanager
def ended(span: RequestSpan | None) -> Iterator[None]:
    """End a span at the end of the block, with the error that leaves it; None is no span."""
    try:
        yield
    except BaseException as error:
        if span is not None:
            end(span, error)
        raise
    if span is not None:
        end(span)


def end_with(span: RequestSpan, on_done: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return a callback that ends a span before it passes the outcome on."""

    def complete(outcome: Any) -> None:
        end(span, outcome if isinstance(outcome, Exception) else None)
        on_done(outcome)

    return complete


def record(request: InferenceRequest, name: str, started_at: float, ended_at: float) -> None:
    """Record a span that has ended already; the times are those of ``time.monotonic``."""
    tracer = _tracer
    if tracer is None or TRACEPARENT not in request.headers:
        return
    if (parent := tracer.sampled_parent(request.headers)) is not None:
        offset = time.time_ns() - int(time.monotonic() * 1e9)
        span = tracer.start(name, "INTERNAL", parent, {}, offset + int(started_at * 1e9))
        span.end(offset + int(ended_at * 1e9))


def has_traced(requests: Iterable[InferenceRequest]) -> bool:
    """Return whether a request of a batch may be traced."""
    if _tracer is not None:
        for request in requests:  # half the time of any() for a batch of one
            if TRACEPARENT in request.headers:
                return True
    return False


def batch(requests: Sequence[InferenceRequest], ref: ModelRef) -> AbstractContextManager[Any]:
    """Return a context manager in which the span of a batch is the current one.

    The span belongs to the trace of the first traced request, and links to all of them. No span is started
    where no request is traced.
    """
    tracer = _tracer
    if tracer is None:
        return nullcontext()
    traced = (request.headers for request in requests if TRACEPARENT in request.headers)
    parents = [parent for headers in traced if (parent := tracer.sampled_parent(headers)) is not None]
    if not parents:
        return nullcontext()
    attributes = {
        "torchrelay.model": ref.name,
        "torchrelay.version": ref.version,
        "torchrelay.batch_size": len(requests),
    }
    span = tracer.start("batch", "INTERNAL", parents[0], attributes)
    span.link_to(parents)
    return tracer.spans.CurrentSpan(span, records_exceptions=False)


def attach(span: RequestSpan) -> None:
    """Make a span the current one of this asyncio task, so that its log records have the trace's id."""
    if _tracer is not None:
        _tracer.contexts.attach(_tracer.api.set_span_in_context(span))


def current_trace_id() -> str:
    """Return the id of the current trace, as in ``traceparent``; empty where none is recorded."""
    if _tracer is None:
        return ""
    context = _tracer.api.get_current_span().get_span_context()
    return f"{context.trace_id:032x}" if context.is_valid else ""


def _error_type(error: BaseException) -> str:
    return error.reason if isinstance(error, RelayError) else type(error).__name__
