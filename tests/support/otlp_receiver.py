"""A collector of traces for tests: OTLP over gRPC and over HTTP."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as messages
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as services

from tests.support.http_server import read_body, respond, serving

Tree = dict[str, Any]  # spans by name, each with its children


@dataclass
class ReceivedSpan:
    """A span, with the name of the process that exported it."""

    name: str
    trace: str
    id: str
    parent: str
    kind: int
    process: str
    attributes: dict[str, Any]
    links: list[str]
    seconds: float
    message: Any  # the span as it was sent


@dataclass
class Collector(services.TraceServiceServicer):
    """The spans of all requests; an export waits until ``accepts`` is set."""

    accepts: threading.Event
    spans: list[ReceivedSpan] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)
    called: threading.Event = field(default_factory=threading.Event)  # set by the first export

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802  (gRPC's name)
        self.called.set()
        self.accepts.wait()
        for resource in request.resource_spans:
            process = _attributes(resource.resource.attributes)["torchrelay.process"]
            for scope in resource.scope_spans:
                with self.changed:
                    self.spans += [_to_span(span, process) for span in scope.spans]
                    self.changed.notify_all()
        return messages.ExportTraceServiceResponse()

    def tree(self, trace: str, is_complete: Callable[[Tree], bool], timeout: float = 120.0) -> Tree:
        """Return the spans of a trace by name, once ``is_complete`` holds."""
        with self.changed:
            assert self.changed.wait_for(lambda: is_complete(self._tree(trace)), timeout), self._tree(trace)
            return self._tree(trace)

    def find(self, trace: str, name: str) -> ReceivedSpan:
        return next(span for span in self.spans if span.trace == trace and span.name == name)

    def _tree(self, trace: str) -> Tree:
        spans = [span for span in self.spans if span.trace == trace]
        ids = {span.id for span in spans}

        def children(parent: str) -> Tree:
            return {span.name: children(span.id) for span in spans if span.parent == parent}

        return {span.name: children(span.id) for span in spans if span.parent not in ids}


@contextmanager
def collect_grpc(accepts: bool = True) -> Iterator[tuple[Collector, str]]:
    """Serve OTLP over gRPC; yield the collector and its endpoint. Exports wait unless it ``accepts`` them."""
    collector = Collector(_event(accepts))
    server = grpc.server(ThreadPoolExecutor(8))
    services.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield collector, f"http://127.0.0.1:{port}"
    finally:
        collector.accepts.set()
        server.stop(0).wait()


@contextmanager
def collect_http() -> Iterator[tuple[Collector, str]]:
    """Serve OTLP over HTTP with protobuf; yield the collector and its endpoint."""
    collector = Collector(_event(True))

    def answer(handler: Any) -> None:
        body = read_body(handler)
        found = handler.path == "/v1/traces"
        if found:
            collector.Export(messages.ExportTraceServiceRequest.FromString(body), None)
        respond(handler, 200 if found else 404)

    with serving(answer) as address:
        yield collector, address


def _event(is_set: bool) -> threading.Event:
    event = threading.Event()
    if is_set:
        event.set()
    return event


def _to_span(span: Any, process: str) -> ReceivedSpan:
    return ReceivedSpan(
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.kind,
        process,
        _attributes(span.attributes),
        [link.trace_id.hex() for link in span.links],
        (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9,
        span,
    )


def _attributes(attributes: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}
