"""Traces of requests, sent over OTLP (OpenTelemetry; extra ``otel``).

A traced request carries the W3C context of its current span in the header ``traceparent``, which every
protocol and transport passes on. So each layer finds its parent there, and a request without it costs one
look-up a layer. Spans wait in a bounded queue for a thread that exports them: no request waits for a
collector.

Sources: W3C Trace Context, OpenTelemetry's semantic conventions for HTTP and RPC spans.
"""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from serve_app.domain.model import ModelRef
from serve_app.domain.request import InferenceRequest
from serve_app.errors import ConfigurationError, RelayError
from serve_app.settings import Settings

if TYPE_CHECKING:
    from opentelemetry.trace import Span

log = logging.getLogger("torchrelay.tracing")

TRACEPARENT, TRACESTATE = "traceparent", "tracestate"
Kind = Literal["SERVER", "CLIENT", "INTERNAL"]

_NOT_SAMPLED = tuple("02468ace")  # the last digits of a context whose flag "sampled" is not set
_PROBES = frozenset(("ping", "metrics", "health"))  # first segments of paths that are not sampled
_SHUTDOWN_MS = 3_000
_WARNING_PERIOD_S = 60.0

_tracer: _Tracer | None = None


class _Tracer:
    """The tracer of this process."""

    def __init__(self, settings: Settings, process: str, attributes: Mapping[str, str]) -> None:
        from opentelemetry import trace
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.sampling import ALWAYS_ON
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        telemetry = settings.telemetry
        self.api = trace
        self.process = process
        self.ratio = telemetry.trace_sampling
        self.propagator = TraceContextTextMapPropagator()
        service = os.environ.get("OTEL_SERVICE_NAME", "torchrelay")
        resource = Resource.create({"service.name": service, "torchrelay.process": process, **attributes})
        # Requests are sampled before, by begin_request.
        self.provider = TracerProvider(sampler=ALWAYS_ON, resource=resource, shutdown_on_exit=False)
        self.processor = _create_processor(_create_exporter(settings))
        self.provider.add_span_processor(self.processor)
        self.tracer = self.provider.get_tracer("torchrelay")

    def start(
        self,
        name: str,
        parent: Any,
        kind: Kind,
        started_at: float | None = None,
        links: Sequence[Any] = (),
        attributes: Mapping[str, Any] | None = None,
    ) -> Span:
        return self.tracer.start_span(
            name,
            parent,
            self.api.SpanKind[kind],
            attributes,
            links,
            None if started_at is None else _to_nanoseconds(started_at),
        )

    def sampled_parent(self, headers: Mapping[str, str]) -> Any:
        """Return the context that headers carry where it is sampled, else None."""
        if TRACEPARENT not in headers:
            return None
        context = self.propagator.extract(headers)
        return context if self.span_context(context).trace_flags.sampled else None

    def span_context(self, context: Any) -> Any:
        """Return the identifiers of a context's span; they are invalid where it has none."""
        return self.api.get_current_span(context).get_span_context()

    def inject(self, span: Span, headers: Mapping[str, str]) -> dict[str, str]:
        """Return headers with the context of a span."""
        carrier = dict(headers)
        self.propagator.inject(carrier, self.api.set_span_in_context(span))
        return carrier


def configure(settings: Settings, process: str, **attributes: str) -> None:
    """Start the tracer of this process where ``telemetry.otlp_endpoint`` is set; a second call does nothing.

    ``attributes`` describe the process, as ``model`` and ``version``. The tracer also serves what a handler
    obtains from ``opentelemetry.trace``. Raises ConfigurationError where the exporter is not installed.
    """
    global _tracer
    if not settings.telemetry.otlp_endpoint or _tracer is not None:
        return
    named = {f"torchrelay.{name}": value for name, value in attributes.items() if value}
    _tracer = _Tracer(settings, process, named)
    _tracer.api.set_tracer_provider(_tracer.provider)


def shutdown() -> None:
    """Export the remaining spans, for at most three seconds."""
    global _tracer
    tracer, _tracer = _tracer, None
    if tracer is not None:
        tracer.processor.close()


def take_dropped() -> tuple[str, int]:
    """Return the name of this process, and the number of its spans that were lost since the last call."""
    return ("", 0) if _tracer is None else (_tracer.process, _tracer.processor.take_dropped())


def begin_request(method: str, path: str, headers: dict[str, str], request_id: str) -> Span | None:
    """Start the span of a request that a protocol received, and enter its context into ``headers``.

    A request with a context is traced where that is sampled, another one by ``telemetry.trace_sampling``.
    Returns None for one that is not traced. ``path`` is the request's route or the name of a gRPC method.
    """
    tracer = _tracer
    if tracer is None:
        return None
    context = None
    if parent := headers.get(TRACEPARENT):
        if parent.endswith(_NOT_SAMPLED):
            return None
        context = tracer.propagator.extract(headers)
        if not tracer.span_context(context).is_valid:  # as without one: W3C Trace Context, 3.2.2
            context = None
    if context is not None:
        if not tracer.span_context(context).trace_flags.sampled:
            return None
    elif random.random() >= tracer.ratio or method == "GET" or path.split("/", 2)[1:2][0] in _PROBES:
        return None
    attributes = {"torchrelay.request_id": request_id}
    span = tracer.start(f"{method} {path}", context, "SERVER", attributes=attributes)
    headers |= tracer.inject(span, headers)
    return span


def begin(
    request: InferenceRequest, name: str = "", kind: Kind = "INTERNAL"
) -> tuple[InferenceRequest, Span | None]:
    """Start a span for a traced request; return the request with the span's context, and the span.

    The name is by default that of the process: gateway or replica.
    """
    tracer = _tracer
    if tracer is None or (parent := tracer.sampled_parent(request.headers)) is None:
        return request, None
    attributes = {"torchrelay.model": request.model, "torchrelay.request_id": request.request_id}
    span = tracer.start(name or tracer.process, parent, kind, attributes=attributes)
    return replace(request, headers=tracer.inject(span, request.headers)), span


def begin_call(traceparent: str, name: str) -> tuple[dict[str, str], Span | None]:
    """Start a span for an HTTP request that this server sends, as a webhook.

    ``traceparent`` is the context of its cause, empty for none. Returns that of the span, as headers to send,
    and the span.
    """
    tracer = _tracer
    if tracer is None or (parent := tracer.sampled_parent({TRACEPARENT: traceparent})) is None:
        return {}, None
    span = tracer.start(name, parent, "CLIENT")
    return tracer.inject(span, {}), span


def end(span: Span, error: BaseException | str | None = None, **attributes: Any) -> None:
    """End a span. ``error`` is an exception or a reason; the attributes' names get the prefix torchrelay."""
    tracer = _tracer
    for name, value in attributes.items():
        if value not in ("", None):
            span.set_attribute(f"torchrelay.{name}", value)
    if error and tracer is not None:
        reason = error if isinstance(error, str) else _error_type(error)
        span.set_attribute("error.type", reason)
        span.set_status(tracer.api.Status(tracer.api.StatusCode.ERROR, reason))
    span.end()


@contextmanager
def ended(span: Span | None) -> Iterator[None]:
    """End a span at the end of the block, with the error that leaves it; None is no span."""
    try:
        yield
    except BaseException as error:
        if span is not None:
            end(span, error)
        raise
    if span is not None:
        end(span)


def end_with(span: Span, on_done: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return a callback that ends a span before it passes the outcome on."""

    def complete(outcome: Any) -> None:
        end(span, outcome if isinstance(outcome, Exception) else None)
        on_done(outcome)

    return complete


def record(request: InferenceRequest, name: str, started_at: float, ended_at: float) -> None:
    """Record a span that has ended already; the times are those of ``time.monotonic``."""
    tracer = _tracer
    if tracer is not None and (parent := tracer.sampled_parent(request.headers)) is not None:
        tracer.start(name, parent, "INTERNAL", started_at).end(_to_nanoseconds(ended_at))


def has_traced(requests: Iterable[InferenceRequest]) -> bool:
    """Return whether a request of a batch may be traced."""
    if _tracer is not None:
        for request in requests:  # half the time of any() for a batch of one
            if TRACEPARENT in request.headers:
                return True
    return False


@contextmanager
def batch(requests: Sequence[InferenceRequest], ref: ModelRef) -> Iterator[None]:
    """Make the span of a batch the current one in the block, where a request of it is traced.

    It belongs to the trace of the first such request, and links to all of them.
    """
    tracer = _tracer
    parents = []
    if tracer is not None:
        parents = [parent for r in requests if (parent := tracer.sampled_parent(r.headers)) is not None]
    if tracer is None or not parents:
        yield
        return
    attributes = {
        "torchrelay.model": ref.name,
        "torchrelay.version": ref.version,
        "torchrelay.batch_size": len(requests),
    }
    links = [tracer.api.Link(tracer.span_context(parent)) for parent in parents]
    span = tracer.start("batch", parents[0], "INTERNAL", links=links, attributes=attributes)
    with tracer.api.use_span(span, end_on_exit=True, record_exception=False):
        yield


def attach(span: Span) -> None:
    """Make a span the current one of this asyncio task, so that its log records have the trace's id."""
    from opentelemetry import context

    if _tracer is not None:
        context.attach(_tracer.api.set_span_in_context(span))


def current_trace_id() -> str:
    """Return the id of the current trace, as in ``traceparent``; empty where none is recorded."""
    if _tracer is None:
        return ""
    context = _tracer.api.get_current_span().get_span_context()
    return f"{context.trace_id:032x}" if context.is_valid else ""


def _error_type(error: BaseException) -> str:
    return error.reason if isinstance(error, RelayError) else type(error).__name__


def _to_nanoseconds(monotonic: float) -> int:
    """Return the Unix time of a moment of the monotonic clock."""
    return time.time_ns() - int((time.monotonic() - monotonic) * 1e9)


def _create_exporter(settings: Settings) -> Any:
    """Return the OTLP exporter of the settings.

    Its headers and certificates are those of OpenTelemetry's environment variables.
    """
    telemetry = settings.telemetry
    endpoint, timeout = telemetry.otlp_endpoint, telemetry.otlp_timeout
    try:
        if telemetry.otlp_protocol == "http":
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

            url = endpoint.rstrip("/").removesuffix("/v1/traces") + "/v1/traces"
            return HttpExporter(url, timeout=timeout)
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        return GrpcExporter(endpoint, insecure=not endpoint.startswith("https"), timeout=int(timeout) or 1)
    except ImportError as error:
        cure = f"traces need a package that is not installed ({error}): pip install 'torchrelay[otel]'"
        raise ConfigurationError("telemetry.otlp_endpoint", cure) from None


def _create_processor(exporter: Any) -> Any:
    """Return a span processor that exports in a thread and counts the spans that it drops."""
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult

    # Their messages repeat for each batch; the counter and our own warning replace them.
    for name in ("opentelemetry.exporter", "opentelemetry.sdk"):
        logging.getLogger(name).setLevel(logging.CRITICAL)

    class Processor(BatchSpanProcessor):
        """The library's processor, with the number of lost spans."""

        def __init__(self) -> None:
            self._dropped = 0
            self._warned_at = -_WARNING_PERIOD_S
            self._size = self._default_max_queue_size()
            export = exporter.export

            def count_failures(spans: Sequence[Any]) -> Any:
                result = export(spans)
                if result is not SpanExportResult.SUCCESS:
                    self.count_dropped(len(spans))
                return result

            exporter.export = count_failures
            super().__init__(exporter, self._size)

        def on_end(self, span: Any) -> None:
            if len(self._batch_processor._queue) >= self._size:
                self.count_dropped(1)
            super().on_end(span)

        def count_dropped(self, spans: int) -> None:
            self._dropped += spans
            if time.monotonic() - self._warned_at > _WARNING_PERIOD_S:
                self._warned_at = time.monotonic()
                message = "The OTLP collector accepts no spans: %d are dropped, and requests continue"
                log.warning(message, spans)

        def take_dropped(self) -> int:
            dropped, self._dropped = self._dropped, 0
            return dropped

        def close(self) -> None:
            self._batch_processor.shutdown(timeout_millis=_SHUTDOWN_MS)

    return Processor()
