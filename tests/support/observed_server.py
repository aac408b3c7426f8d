"""The server of traces, metrics and captured requests, with the peers that receive them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.http_server import read_body, respond, serving
from tests.support.otlp_receiver import Collector, collect_grpc
from tests.support.s3_server import running_s3
from tests.support.server import Server

BUCKET = "captured"
METRICS = """
dimensions: [&model ModelName, &level Level]
ts_metrics:
  counter:
    - {name: Requests2XX, unit: Count, dimensions: [*level, Hostname]}
    - {name: Requests4XX, unit: Count, dimensions: [*level, Hostname]}
    - {name: ts_inference_requests_total, unit: Count, dimensions: [model_name, model_version, hostname]}
    - name: ts_inference_latency_microseconds
      unit: Microseconds
      dimensions: [model_name, model_version, hostname]
    - name: ts_queue_latency_microseconds
      unit: Microseconds
      dimensions: [model_name, model_version, hostname]
  gauge:
    - {name: QueueTime, unit: Milliseconds, dimensions: [*level, Hostname]}
    - {name: WorkerThreadTime, unit: Milliseconds, dimensions: [*level, Hostname]}
    - {name: WorkerLoadTime, unit: Milliseconds, dimensions: [WorkerName, *level, Hostname]}
    - {name: MemoryUsed, unit: Megabytes, dimensions: [*level, Hostname]}
model_metrics:
  counter:
    - {name: Loaded, unit: Count, dimensions: [*model, *level]}
    - {name: Words, unit: Count, dimensions: [*model, *level]}
    - {name: Bad, unit: unit, dimensions: [*level]}
  gauge:
    - {name: PredictionTime, unit: ms, dimensions: [*model, *level]}
    - {name: Share, unit: percent, dimensions: [*model, *level]}
  histogram:
    - {name: Length, unit: things, dimensions: [Shelf, *model]}
"""


class Webhooks(NamedTuple):
    """A receiver of webhooks, and the headers of each."""

    url: str
    headers: list[dict[str, str]]


class Observed(NamedTuple):
    """A server, the collector of its traces, the receiver of its webhooks, and its object store."""

    server: Server
    collector: Collector
    webhooks: Webhooks
    s3: Any  # a client of boto3; the bucket is BUCKET


@contextlib.contextmanager
def receive_webhooks() -> Iterator[Webhooks]:
    headers: list[dict[str, str]] = []

    def answer(handler: Any) -> None:
        read_body(handler)
        headers.append({name.lower(): value for name, value in handler.headers.items()})
        respond(handler, 200)

    with serving(answer) as address:
        yield Webhooks(f"{address}/hook", headers)


@contextlib.contextmanager
def run_observed(home: Path) -> Iterator[Observed]:
    with collect_grpc() as (collector, endpoint), receive_webhooks() as webhooks, running_s3(BUCKET) as s3:
        (home / "metrics.yaml").write_text(METRICS)
        storage = {"endpoint_url": s3.meta.endpoint_url, "key": "any", "secret": "any"}
        server = Server(
            home,
            {"HOOK_SECRET": "secret", "OTEL_BSP_SCHEDULE_DELAY": "100"},
            store={"allowed_urls": ["file://.*"], "storage_options": {"s3": storage}},
            telemetry={
                "otlp_endpoint": endpoint,
                "trace_sampling": 0.0,
                "log_format": "json",
                "metrics_config": "metrics.yaml",
                "system_metrics_period": 0.5,
                "capture_destinations": [f"s3://{BUCKET}/.*"],
            },
            async_predictions={"webhook_urls": [webhooks.url], "webhook_secret": "env:HOOK_SECRET"},
        )
        try:
            server.start()
            yield Observed(server, collector, webhooks, s3)
        finally:
            server.close()
