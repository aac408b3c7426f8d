"""Spans of one process, as a collector receives them."""

from __future__ import annotations

import contextvars
import itertools
import secrets
import time
from collections.abc import Iterator
from dataclasses import fields

import pytest
from opentelemetry import trace
from opentelemetry.trace import Link, SpanContext, StatusCode, TraceFlags
from opentelemetry.util._once import Once

from handlers.tracing import stage_spans
from serve_app.domain.model import ModelRef
from serve_app.domain.request import InferenceRequest
from serve_app.errors import ModelNotFound
from serve_app.settings import Settings, TelemetrySettings
from serve_app.telemetry import span_export, tracing
from serve_app.telemetry.spans import RequestSpan, parse_context
from tests.support.otlp_receiver import Collector, ReceivedSpan, collect_grpc, collect_http

_REF = ModelRef("echo", "1.0")
_TRACE, _SPAN = "a" * 32, "b" * 16
_SAMPLED = f"00-{_TRACE}-{_SPAN}-01"
_LIMITS = {
    "SPAN_ATTRIBUTE_COUNT_LIMIT": "3",
    "SPAN_EVENT_COUNT_LIMIT": "2",
    "SPAN_LINK_COUNT_LIMIT": "2",
    "ATTRIBUTE_VALUE_LENGTH_LIMIT": "4",
}
_SMALL_QUEUE = {
    "BSP_MAX_QUEUE_SIZE": "8",
    "BSP_MAX_EXPORT_BATCH_SIZE": "8",
    "BSP_SCHEDULE_DELAY": "600000",  # a full batch is exported at once, and no other
}
_numbers = itertools.count()


class TracedProcess:
    """A process with its collector: that of the tests."""

    def __init__(self, collector: Collector) -> None:
        self.collector = collector

    def export(self) -> list[ReceivedSpan]:
        """Return the spans of the test."""
        tracing.shutdown()
        return self.collector.spans


@pytest.fixture
def process(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[TracedProcess]:
    """Yield a traced process; the parameter is a protocol, or the values of OpenTelemetry's variables."""
    parameter = getattr(request, "param", "grpc")
    for name, value in (parameter if isinstance(parameter, dict) else {}).items():
        monkeypatch.setenv(f"OTEL_{name}", value)
    # A process has one provider, which cannot be replaced; each test needs its own.
    monkeypatch.setattr("opentelemetry.trace._TRACER_PROVIDER", None)
    monkeypatch.setattr("opentelemetry.trace._TRACER_PROVIDER_SET_ONCE", Once())
    monkeypatch.setattr(span_export, "_SHUTDOWN_MS", 120_000)  # also a stalled machine exports its spans
    protocol = "http" if parameter == "http" else "grpc"
    with (collect_http if protocol == "http" else collect_grpc)() as (collector, endpoint):
        telemetry = TelemetrySettings(
            otlp_endpoint=endpoint, otlp_protocol=protocol, otlp_timeout=120.0, trace_sampling=1.0
        )
        tracing.configure(Settings(telemetry=telemetry), "replica", model="echo")
        try:
            yield TracedProcess(collector)
        finally:
            tracing.shutdown()


def _begin(**headers: str) -> tuple[dict[str, str], RequestSpan]:
    span = tracing.begin_request("POST", "/predictions", headers, f"request-{next(_numbers)}")
    assert span is not None
    return headers, span


def _request(headers: dict[str, str]) -> InferenceRequest:
    return InferenceRequest("echo", headers=headers, request_id="1")


@pytest.mark.parametrize("process", ["grpc", "http"], indirect=True)
def test_a_request_has_spans_with_ids_times_and_attributes(process: TracedProcess) -> None:
    headers, span = _begin(traceparent=_SAMPLED.replace("-01", "-03"), tracestate="vendor=1, bad")
    assert headers["traceparent"] == span.traceparent
    request, below = tracing.begin(_request(headers))
    assert below is not None and request.headers["traceparent"] == below.traceparent
    now = time.monotonic()
    tracing.record(request, "queue", now - 2.0, now - 1.0)
    tracing.end(below, version="1.0", arm="")
    tracing.end(span, None, {"http.response.status_code": 200})

    queue, replica, received = process.export()
    assert (received.trace, received.parent, received.kind) == (_TRACE, _SPAN, 2)
    assert received.process == "replica"
    assert received.attributes["http.response.status_code"] == 200
    assert received.message.trace_state == ""  # a member is invalid: W3C Trace Context, 3.3.1.3
    assert headers["traceparent"].endswith("-03")  # the trace's id is random: W3C Trace Context 2
    assert received.message.flags == 0x300  # a remote parent
    assert (replica.parent, replica.attributes["torchrelay.version"]) == (received.id, "1.0")
    assert "torchrelay.arm" not in replica.attributes
    assert (queue.parent, queue.kind) == (replica.id, 1)
    assert queue.seconds == pytest.approx(1.0, abs=0.01)
    assert time.time() - queue.message.end_time_unix_nano / 1e9 < 120


def test_a_request_without_a_context_starts_a_trace(process: TracedProcess) -> None:
    for sent in ({}, {"traceparent": "00-nonsense-01"}, {"traceparent": f"00-{'0' * 32}-{_SPAN}-01"}):
        headers, span = _begin(**sent)
        context = parse_context(headers["traceparent"])
        assert context is not None and context.is_sampled
        tracing.end(span)
    first, *_ = spans = process.export()
    assert len({span.trace for span in spans}) == 3
    assert (first.parent, first.message.flags) == ("", 0x100)


@pytest.mark.parametrize(
    "traceparent",
    [
        "",
        "00-nonsense-01",
        f"ff-{_TRACE}-{_SPAN}-01",
        f"00-{_TRACE}-{_SPAN}-01-more",
        f"00-{'0' * 32}-{_SPAN}-01",
        f"00-{_TRACE}-{'0' * 16}-01",
        f"00-{_TRACE.upper()}-{_SPAN}-01",
        f"01-{_TRACE}-{_SPAN}-01-{'x' * 500}",
        f"00-{_TRACE}-{_SPAN}-00",
    ],
)
def test_an_invalid_or_unsampled_context_is_no_parent(process: TracedProcess, traceparent: str) -> None:
    request = _request({"traceparent": traceparent})
    assert tracing.begin(request) == (request, None)
    assert tracing.begin_call(traceparent, "webhook") == ({}, None)
    tracing.record(request, "queue", 0.0, 1.0)
    with tracing.batch([request], _REF):
        assert not trace.get_current_span().is_recording()
    assert process.export() == []


def test_a_context_of_a_later_version_is_a_parent() -> None:
    context = parse_context(f"01-{_TRACE}-{_SPAN}-09-more")
    assert context is not None and (context.trace_id, context.is_sampled) == (_TRACE, True)


def test_gets_probes_and_unsampled_contexts_are_not_traced(process: TracedProcess) -> None:
    assert tracing.begin_request("GET", "/v2/models", {}, "1") is None
    assert tracing.begin_request("POST", "/ping", {}, "1") is None
    assert tracing.begin_request("POST", "/predictions", {"traceparent": _SAMPLED[:-1] + "0"}, "1") is None
    assert tracing.begin_request("GET", "/predictions", {"traceparent": _SAMPLED}, "1") is not None


def test_the_state_of_a_trace_is_exported_and_passed_on(process: TracedProcess) -> None:
    headers, span = _begin(traceparent=_SAMPLED, tracestate="vendor=1 , other=2")
    tracing.end(span)
    assert headers["tracestate"] == "vendor=1 , other=2"
    [received] = process.export()
    assert received.message.trace_state in ("vendor=1,other=2", "vendor=1 ,other=2")


def test_a_batch_links_to_its_traced_requests_and_has_the_stages(process: TracedProcess) -> None:
    traced = [_begin() for _ in range(2)]
    requests = [_request(headers) for headers, _ in traced]
    with tracing.batch([_request({}), *requests], _REF):
        assert tracing.current_trace_id() == traced[0][1].trace_id
        start = stage_spans()
        assert start is not None
        with start("preprocess") as span:
            assert isinstance(span, RequestSpan)
        with pytest.raises(ValueError, match="wrong"), start("inference"):
            raise ValueError("wrong")
        author = trace.get_tracer("author")
        with author.start_as_current_span("own"), author.start_span("x"):
            assert stage_spans() is not None
    assert stage_spans() is None and tracing.current_trace_id() == ""

    spans = {span.name: span for span in process.export()}
    batch = spans["batch"]
    assert batch.links == [span.trace_id for _, span in traced]
    assert batch.attributes["torchrelay.batch_size"] == 3
    assert {spans[name].parent for name in ("inference", "own")} == {batch.id}
    assert (spans["own"].process, spans["x"].parent) == ("replica", spans["own"].id)
    [event] = spans["inference"].message.events
    sent = {attribute.key: attribute.value.string_value for attribute in event.attributes}
    assert (sent["exception.type"], sent["exception.message"]) == ("ValueError", "wrong")
    assert "raise ValueError" in sent["exception.stacktrace"]
    assert spans["inference"].message.status.message == "ValueError: wrong"


def test_the_stages_of_a_handler_are_below_its_own_span(process: TracedProcess) -> None:
    headers, _ = _begin()
    with tracing.batch([_request(headers)], _REF), trace.get_tracer("author").start_as_current_span("own"):
        start = stage_spans()
        assert start is not None
        with start("inference"):
            pass
    spans = {span.name: span for span in process.export()}
    assert spans["inference"].parent == spans["own"].id


def test_an_error_is_the_status_of_a_span(process: TracedProcess) -> None:
    with pytest.raises(ModelNotFound), tracing.ended(_begin()[1]):
        raise ModelNotFound("echo")
    tracing.end_with(_begin()[1], lambda outcome: None)(ValueError("x"))
    tracing.end(_begin()[1], "caller_left")
    spans = process.export()
    reasons = ["model_not_found", "ValueError", "caller_left"]
    assert [span.attributes["error.type"] for span in spans] == reasons
    assert [(span.message.status.code, span.message.status.message) for span in spans] == [
        (2, reason) for reason in reasons
    ]


def test_a_handler_uses_the_api(process: TracedProcess) -> None:
    headers, _ = _begin()
    other = SpanContext(1, 2, True, TraceFlags(1))
    with tracing.batch([_request(headers)], _REF):
        span = trace.get_current_span()
        context = span.get_span_context()
        assert (context.is_valid, context.is_remote, context.trace_flags) == (True, False, 3)
        span.set_attribute("rows", 2)
        span.set_attributes({"share": 0.5, "names": ["a", "b"], "is_cold": True})
        span.add_event("loaded", {"bytes": 5}, timestamp=7)
        span.add_link(other, {"why": "cause"})
        span.update_name("renamed")
        span.set_status(StatusCode.OK)
        span.set_status(StatusCode.ERROR, "after OK: ignored")
    span.set_attribute("late", 1)
    span.add_event("late")
    span.add_link(other)
    span.update_name("late")
    span.end()
    [received] = process.export()
    assert received.id == f"{context.span_id:016x}"
    assert received.name == "renamed"
    assert received.attributes["rows"] == 2 and received.attributes["share"] == 0.5
    assert [value.string_value for value in received.attributes["names"].values] == ["a", "b"]
    assert received.attributes["is_cold"] is True and "late" not in received.attributes
    assert received.attributes["torchrelay.model"] == "echo"
    [event] = received.message.events
    assert (event.name, event.time_unix_nano, event.attributes[0].key) == ("loaded", 7, "bytes")
    assert received.links[1:] == [f"{1:032x}"]
    assert received.message.links[1].attributes[0].value.string_value == "cause"
    assert received.message.status.code == StatusCode.OK.value


def test_a_handler_starts_a_span_below_an_attached_one(process: TracedProcess) -> None:
    _, span = _begin()

    def handle() -> None:
        tracing.attach(span)
        assert tracing.current_trace_id() == span.trace_id
        with trace.get_tracer("author").start_as_current_span("own", links=[Link(span.get_span_context())]):
            pass

    contextvars.copy_context().run(handle)
    [received] = process.export()
    assert (received.trace, received.parent, received.links) == (span.trace_id, span.span_id, [span.trace_id])


@pytest.mark.parametrize("process", [_LIMITS], indirect=True)
def test_limits_of_a_span(process: TracedProcess) -> None:
    requests = [_request(_begin()[0]) for _ in range(3)]
    with tracing.batch(requests, _REF):
        span = trace.get_current_span()
        span.set_attributes({"long": "123456", "b": 2})
        for number in range(5):
            span.add_event(f"event {number}", {"long": "123456"})
        span.add_link(SpanContext(1, 2, True))
    tracing.end(_begin()[1], None, {"one": 1, "two": 2, "url.path": "/predictions"})
    batch, plain = process.export()
    assert (len(batch.attributes), batch.message.dropped_attributes_count) == (3, 2)
    assert batch.attributes["long"] == "1234"
    assert (len(batch.message.events), batch.message.dropped_events_count) == (2, 3)
    assert batch.message.events[0].attributes[0].value.string_value == "1234"
    assert (len(batch.links), batch.message.dropped_links_count) == (2, 2)
    assert (plain.attributes["url.path"], plain.message.dropped_attributes_count) == ("/pre", 1)


def test_values_that_cannot_be_encoded_are_left_out(process: TracedProcess) -> None:
    headers, _ = _begin()
    with tracing.batch([_request(headers)], _REF):
        span = trace.get_current_span()
        span.update_name("bad \ud800")
        span.set_attributes({"big": 2**70, "text": "\ud800", "good": 1})
        span.set_status(StatusCode.ERROR, "\ud800")
    tracing.end(_begin()[1])
    bad, _ = process.export()
    assert (bad.name, bad.attributes["good"], bad.message.status.code) == ("bad ?", 1, 2)
    assert not {"big", "text"} & set(bad.attributes)


@pytest.mark.parametrize("process", [_SMALL_QUEUE], indirect=True)
def test_spans_beyond_the_queue_are_counted(process: TracedProcess) -> None:
    process.collector.accepts.clear()
    for _ in range(8):
        tracing.end(_begin()[1])
    assert process.collector.called.wait(120)  # the thread waits for the collector, and the queue is empty
    for _ in range(20):
        tracing.end(_begin()[1])
    assert tracing.take_dropped() == ("replica", 12)
    assert tracing.take_dropped() == ("replica", 0)
    process.collector.accepts.set()
    assert len(process.export()) == 16


def test_a_copy_of_a_request_with_other_headers_keeps_the_rest() -> None:
    request = InferenceRequest("m", "1", (), {"a": "b"}, "explain", secrets.token_hex(4), 5.0, "high")
    copy = request.with_headers({})
    assert copy.headers == {}
    names = [field.name for field in fields(request) if field.name != "headers"]
    assert [getattr(copy, name) for name in names] == [getattr(request, name) for name in names]
