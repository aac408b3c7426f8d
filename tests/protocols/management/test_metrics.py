"""The metrics route that Prometheus scrapes, request by request."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from serve_app.protocols.http_app import ASGIApp, metrics_app
from serve_app.settings import Settings
from serve_app.telemetry.metrics import Meters
from serve_app.telemetry.metrics_aggregator import MetricsAggregator


class Page:
    """The metrics route over the sum of one process's meters."""

    def __init__(self) -> None:
        self.meters = Meters()
        self.requested: list[frozenset[str] | None] = []
        self.app: ASGIApp = metrics_app(self.render, Settings(), lambda: None, self.meters)

    async def render(self, names: frozenset[str] | None) -> bytes:
        self.requested.append(names)
        total = MetricsAggregator(self.meters.torchserve.initial)
        total.put("here", self.meters.report())
        return total.render(names)

    def ask(self, method: str, target: str) -> httpx.Response:
        async def main() -> httpx.Response:
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                return await client.request(method, target)

        return asyncio.run(main())


@pytest.fixture
def page() -> Page:
    return Page()


@pytest.mark.parametrize("target", ["/metrics", "/metrics/", "/metrics/more"])
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE", "OPTIONS"])
def test_the_page_answers_to_every_method(page: Page, method: str, target: str) -> None:
    response = page.ask(method, target)
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert response.headers["pragma"] == "no-cache" and len(response.headers["x-request-id"]) == 36
    assert "# TYPE Requests2XX counter\n" in response.text
    assert page.requested == [None]


def test_the_latest_latencies_are_only_on_pages_that_name_them(page: Page) -> None:
    for seconds in (0.25, 0.125):
        page.meters.request("m", "1.0", "ok", seconds)
    name = "torchrelay_request_latency_seconds_recent"
    assert name not in page.ask("GET", "/metrics").text
    line = page.ask("GET", f"/metrics?name[]={name}").text.splitlines()[-1]
    assert line.startswith(f'{name}{{model="m",values="0.25 0.125",version="1.0"}} ')


def test_repeated_names_are_all_used(page: Page) -> None:
    page.ask("GET", "/metrics")
    some = page.ask("GET", "/metrics?name[]=Requests2XX&other=x&name%5B%5D=Requests4XX")
    assert page.requested[1] == {"Requests2XX", "Requests4XX"}
    assert some.text.count("# TYPE") == 1 and "\nRequests2XX{" in some.text
    assert page.ask("GET", "/metrics?name[]=").text == ""
    assert page.requested[2] == {""}
    assert page.ask("GET", "/metrics?name=Requests2XX").text.count("# TYPE") > 20
    assert page.requested[3] is None


def test_responses_are_counted(page: Page) -> None:
    page.ask("GET", "/metrics")
    page.ask("GET", "/other")
    text = page.ask("GET", "/metrics?name[]=Requests2XX&name[]=Requests4XX").text
    assert [line.rpartition(" ")[2] for line in text.splitlines() if not line.startswith("#")] == [
        "1.0",
        "1.0",
    ]


@pytest.mark.parametrize(("method", "target"), [("OPTIONS", "/"), ("GET", "/api-description")])
def test_metrics_port_has_a_document(page: Page, method: str, target: str) -> None:
    response = page.ask(method, target)
    assert response.status_code == 200
    assert list(json.loads(response.text)["paths"]) == ["/metrics"]


@pytest.mark.parametrize(
    ("target", "code", "kind", "message"),
    [
        (
            "/",
            405,
            "MethodNotAllowedException",
            "Requested method is not allowed, please refer to API document.",
        ),
        (
            "/models",
            404,
            "ResourceNotFoundException",
            "Requested resource is not found, please refer to API document.",
        ),
    ],
)
def test_everything_else_is_refused(page: Page, target: str, code: int, kind: str, message: str) -> None:
    response = page.ask("GET", target)
    assert (response.status_code, response.json()) == (code, {"code": code, "type": kind, "message": message})
