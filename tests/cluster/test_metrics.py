"""A cluster's metrics as a scraper sees them: a handler's own of all kinds, and the server's, over two
replicas.
"""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.archives import make_archive
from tests.support.observed_server import Observed
from tests.support.server import Server

pytestmark = [pytest.mark.cluster("observed"), pytest.mark.slow]

HOST = socket.gethostname()
HANDLER = """
import time
from ts.metrics.dimension import Dimension
from ts.metrics.metric_type_enum import MetricTypes
class Handler:
    def initialize(self, context):
        context.metrics.add_counter("Loaded", 1)
        self.length = context.metrics.get_metric("Length", MetricTypes.HISTOGRAM)
    def handle(self, data, context):
        metrics = context.metrics
        for i, row in enumerate(data):
            word = row["body"].decode()
            metrics.add_counter("Words", 1, i)
            metrics.add_percent("Share", 40, i)
            metrics.add_error("Bad", 0.5)
            self.length.add_or_update(len(word), ["top", context.model_name], context.get_request_id(i))
            metrics.add_counter("Undeclared", 1, i)
        time.sleep(0.002)
        return ["ok"] * len(data)
"""
LABELS = f'ModelName="counted",Level="Model",Hostname="{HOST}",'


@pytest.fixture(scope="module")
def server(observed: Observed) -> Server:
    return observed.server


def scrape(server: Server, **parameters: str) -> dict[str, float]:
    """Return the page's samples by what precedes their values."""
    text = server.read_metrics(**parameters)
    assert list(text_string_to_metric_families(text)), text
    samples = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {head: float(value) for head, _, value in samples}


def count_recent(server: Server) -> int:
    """Return how many latencies of the model the page has, by which percentiles of few requests are exact."""
    page = scrape(server, **{"name[]": "torchrelay_request_latency_seconds_recent"})
    (values,) = (head.split('"')[3] for head in page if 'model="counted"' in head)
    assert all(0 < float(value) < 30 for value in values.split())
    return len(values.split())


def test_every_count_of_every_replica(server: Server) -> None:
    assert (
        server.register(make_archive(server.home, "counted", HANDLER), initial_workers=2).status_code == 200
    )
    server.wait(lambda: len(server.pids("counted")) == 2, description="two replicas")

    def ask(i: int) -> int:
        # Through the gateway (it spreads the rows) and by the model's own route, with and without its
        # version.
        path = ("/%70redictions/counted", "/predictions/counted", "/predictions/counted/1.0")[i % 3]
        return httpx.post(server.url + path, content=b"x" * (i % 10 + 1), timeout=30).status_code

    before = scrape(server)
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(ask, range(60))) == {200}
    assert httpx.post(f"{server.url}/predictions/nobody", content=b"x", timeout=60).status_code == 404
    page = scrape(server)
    assert page[f"Words{{{LABELS}}}"] == 60
    assert page[f"Loaded{{{LABELS}}}"] == 2
    assert page[f'Bad{{Level="Error",Hostname="{HOST}",}}'] == 30
    assert page[f"Share{{{LABELS}}}"] == 40, "of a gauge the newest value, not the sum"
    shelf = f'Shelf="top",ModelName="counted",Hostname="{HOST}",'
    assert page[f'Length_bucket{{{shelf}le="5.0",}}'] == 30
    assert page[f"Length_count{{{shelf}}}"] == 60 and page[f"Length_sum{{{shelf}}}"] == 330
    assert not [head for head in page if head.startswith("Undeclared")]
    assert 2 <= page[f"PredictionTime{{{LABELS}}}"] < 5000
    default, named = (
        f'model_name="counted",model_version="{v}",hostname="{HOST}",' for v in ("default", "1.0")
    )
    assert page[f"ts_inference_requests_total{{{default}}}"] == 40
    assert page[f"ts_inference_requests_total{{{named}}}"] == 20
    for counter in ("ts_inference_latency_microseconds", "ts_queue_latency_microseconds"):
        assert page[f"{counter}{{{named}}}"] > 0
    assert page[f"ts_inference_latency_microseconds{{{default}}}"] >= 40 * 2000
    host = f'Level="Host",Hostname="{HOST}",'
    assert page[f"Requests2XX{{{host}}}"] >= before[f"Requests2XX{{{host}}}"] + 60 + 1, (
        "each scrape is one, too"
    )
    assert page[f"Requests4XX{{{host}}}"] == before.get(f"Requests4XX{{{host}}}", 0) + 1
    assert page[f"QueueTime{{{host}}}"] >= 0 and page[f"WorkerThreadTime{{{host}}}"] >= 0
    loads = {
        head: value
        for head, value in page.items()
        if head.startswith("WorkerLoadTime") and "-counted_1.0" in head
    }
    workers = {
        f'WorkerLoadTime{{WorkerName="W-{w["id"]}-counted_1.0",{host}}}' for w in server.workers("counted")
    }
    assert set(loads) == workers and all(value > 0 for value in loads.values())
    assert page['torchrelay_requests_total{model="counted",status="ok",version="1.0"}'] == 60
    assert count_recent(server) == 60
    server.wait(lambda: f"MemoryUsed{{{host}}}" in scrape(server), description="a reading of this node")


def test_what_a_replica_counted_stays_when_it_ends(server: Server) -> None:
    server.management.put("/models/counted", params={"min_worker": 1, "synchronous": "true"})
    server.wait(lambda: len(server.workers("counted")) == 1, description="one replica")
    page = scrape(server)
    assert page[f"Words{{{LABELS}}}"] == 60 and page[f"Loaded{{{LABELS}}}"] == 2
    assert count_recent(server) == 60
