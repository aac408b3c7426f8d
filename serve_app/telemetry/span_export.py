"""The export of spans over OTLP: their queue, its thread and their encoding.

Only ``serve_app.telemetry.tracing`` imports this module, and only where traces are switched on: it needs the
extra ``otel``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

# Private: the conversion of a value of an attribute that is neither text nor an integer.
from opentelemetry.exporter.otlp.proto.common._internal import _encode_value
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as SpanMessage
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from serve_app.settings import TelemetrySettings
from serve_app.telemetry.spans import RequestSpan

log = logging.getLogger(__name__)

_SHUTDOWN_MS = 3_000
_WARNING_PERIOD_S = 60.0
_KINDS = {
    "INTERNAL": SpanMessage.SPAN_KIND_INTERNAL,
    "SERVER": SpanMessage.SPAN_KIND_SERVER,
    "CLIENT": SpanMessage.SPAN_KIND_CLIENT,
}
_LOCAL, _REMOTE = 0x100, 0x300  # OTLP's flags: whether a context is remote is known, and whether it is

_Encode = Callable[[Sequence[Any]], ExportTraceServiceRequest]


def create_exporter(telemetry: TelemetrySettings, resource: Resource) -> SpanExporter:
    """Return the OTLP exporter of the settings. Raises ImportError where it is not installed.

    Its headers and certificates are those of OpenTelemetry's environment variables.
    """
    endpoint, timeout = telemetry.otlp_endpoint, telemetry.otlp_timeout
    module: Any
    if telemetry.otlp_protocol == "http":
        from opentelemetry.exporter.otlp.proto.http import trace_exporter

        module = trace_exporter

        url = endpoint.rstrip("/").removesuffix("/v1/traces") + "/v1/traces"
        exporter = module.OTLPSpanExporter(url, timeout=timeout)
    else:
        from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as grpc_exporter

        module = grpc_exporter
        is_insecure = not endpoint.startswith("https")
        exporter = module.OTLPSpanExporter(endpoint, insecure=is_insecure, timeout=int(timeout) or 1)
    # The exporters have no option for it. Their own encoder takes five times as long.
    module.encode_spans = SpanEncoder(resource, module.encode_spans)
    return cast(SpanExporter, exporter)


class SpanEncoder:
    """The encoder of the server's spans; those that handlers start by the SDK are the library's to encode."""

    def __init__(self, resource: Resource, encode_others: _Encode) -> None:
        self._resource = {"attributes": _encode_attributes(resource.attributes)}
        self._schema_url = resource.schema_url
        self._encode_others = encode_others

    def __call__(self, spans: Sequence[RequestSpan | ReadableSpan]) -> ExportTraceServiceRequest:
        messages = [_encode_span(span) for span in spans if isinstance(span, RequestSpan)]
        if len(messages) == len(spans):
            request = ExportTraceServiceRequest()
        else:
            request = self._encode_others([span for span in spans if not isinstance(span, RequestSpan)])
        if messages:
            group = request.resource_spans.add(resource=self._resource, schema_url=self._schema_url)
            group.scope_spans.add(scope={"name": "torchrelay"}, spans=messages)
        return request


class SpanProcessor(BatchSpanProcessor):
    """The library's queue and thread, with the number of lost spans."""

    def __init__(self, exporter: SpanExporter) -> None:
        # Their messages repeat for each batch; the counter and our own warning replace them.
        for name in ("opentelemetry.exporter", "opentelemetry.sdk"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        self.limits = SpanLimits()
        self._dropped = 0
        self._warned_at = -_WARNING_PERIOD_S
        self._size = self._default_max_queue_size()
        export = exporter.export

        def count_failures(spans: Sequence[Any]) -> SpanExportResult:
            result = export(spans)
            if result is not SpanExportResult.SUCCESS:
                self.count_dropped(len(spans))
            return result

        exporter.export = count_failures  # type: ignore[method-assign]
        super().__init__(exporter, self._size)

    def on_end(self, span: ReadableSpan) -> None:
        self.add(span)

    def add(self, span: RequestSpan | ReadableSpan) -> None:
        """Queue a span that has ended, in place of the oldest one where the queue is full."""
        is_full = len(self._batch_processor._queue) >= self._size
        self._batch_processor.emit(span)  # type: ignore[arg-type]
        if is_full:  # logged afterwards: the export thread could empty the queue meanwhile
            self.count_dropped(1)

    def count_dropped(self, spans: int) -> None:
        self._dropped += spans
        if time.monotonic() - self._warned_at > _WARNING_PERIOD_S:
            self._warned_at = time.monotonic()
            log.warning("The OTLP collector accepts no spans: %d are dropped, and requests continue", spans)

    def take_dropped(self) -> int:
        dropped, self._dropped = self._dropped, 0
        return dropped

    def close(self) -> None:
        self._batch_processor.shutdown(timeout_millis=_SHUTDOWN_MS)


def _encode_span(span: RequestSpan) -> SpanMessage:
    fields = _to_fields(span)
    try:
        return SpanMessage(**fields)
    except ValueError:  # text that is no UTF-8, or an integer of more than 64 bits: a handler's
        fields |= {"name": _to_utf8(span.name), "events": (), "status": {"code": fields["status"]["code"]}}
        fields["attributes"] = [one for one in fields["attributes"] if _is_encodable(one)]
        return SpanMessage(**fields)


def _to_fields(span: RequestSpan) -> dict[str, Any]:
    status, attributes = span.status, span.limited_attributes()
    fields: dict[str, Any] = {
        "trace_id": bytes.fromhex(span.trace_id),
        "span_id": bytes.fromhex(span.span_id),
        "parent_span_id": bytes.fromhex(span.parent_id),
        "name": span.name,
        "kind": _KINDS[span.kind],
        "start_time_unix_nano": span.start_time,
        "end_time_unix_nano": span.end_time,
        "attributes": _encode_attributes(attributes),
        "dropped_attributes_count": getattr(attributes, "dropped", 0),
        "flags": _REMOTE if span.is_parent_remote else _LOCAL,
        "status": {} if status is None else {"code": status.status_code.value, "message": status.description},
    }
    if span.tracestate:
        fields["trace_state"] = span.get_span_context().trace_state.to_header()
    if span.links:
        fields["links"] = [
            {
                "trace_id": bytes.fromhex(trace_id),
                "span_id": bytes.fromhex(span_id),
                "attributes": _encode_attributes(attributes),
                "flags": _REMOTE,
            }
            for trace_id, span_id, attributes in span.links
        ]
        fields["dropped_links_count"] = span.dropped_links
    if span.events:
        fields["events"] = [
            {
                "name": event.name,
                "time_unix_nano": event.timestamp,
                "attributes": _encode_attributes(event.attributes),
                "dropped_attributes_count": event.dropped_attributes,
            }
            for event in span.events
        ]
        fields["dropped_events_count"] = span.events.dropped
    return fields


def _encode_attributes(attributes: Mapping[str, Any]) -> list[dict[str, Any]]:
    # Messages of dicts: a third of the cost of messages of messages.
    return [{"key": name, "value": _to_value(value)} for name, value in attributes.items()]


def _to_value(value: Any) -> Any:
    if type(value) is str:
        return {"string_value": value}
    if type(value) is int:
        return {"int_value": value}
    return _encode_value(value)


def _is_encodable(attribute: dict[str, Any]) -> bool:
    try:
        KeyValue(**attribute)
    except ValueError:
        return False
    return True


def _to_utf8(text: str) -> str:
    return text.encode(errors="replace").decode()
