"""A browser, consoles in processes of their own, and an in-process server whose state a test sets."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, sync_playwright

from serve_app.control.api import ControlPlane
from serve_app.dataplane.data_plane import DataPlane, RoutingTableReader
from serve_app.domain.access import AccessTable
from serve_app.domain.routing_table import ModelRoute, RoutingTable, VersionRoute
from serve_app.protocols.http_app import inference_app, management_app
from serve_app.settings import Settings
from serve_app.telemetry.metrics import Meters
from serve_app.telemetry.metrics_aggregator import MetricsAggregator
from tests.support.ports import free_port
from tests.support.protocol_fakes import FakeBackend, FakeControlAPI, echo
from tests.support.protocol_servers import over_http

__all__ = ["over_http"]
_WAIT_MS = 60_000


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """Return a headless browser; skip where Debian's package chromium is not installed.

    Playwright runs an event loop in this thread, in which other modules could not call ``asyncio.run``.
    """
    path = shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("needs chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@dataclass
class Visitor:
    """A page of a browser; ``problems`` are the errors that it logged, and its requests to other hosts."""

    page: Page
    origin: str
    problems: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.set_default_timeout(_WAIT_MS)
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on(
            "console", lambda message: message.type == "error" and self.problems.append(message.text)
        )
        self.page.on("request", self._check_host)

    def open(self, path: str) -> Page:
        """Open a page of the console, and wait until it is connected."""
        self.page.goto(self.origin + path)
        self.page.wait_for_function("window.socket && window.socket.connected")
        return self.page

    def assert_accessible(self) -> None:
        """Assert that axe finds no serious violation."""
        found = Axe().run(self.page).response["violations"]
        serious = [
            (each["id"], [node["html"][:200] for node in each["nodes"]])
            for each in found
            if each["impact"] in ("serious", "critical")
        ]
        assert not serious, serious

    def _check_host(self, request: Any) -> None:
        host = self.origin.partition("://")[2].partition("/")[0]
        if not request.url.startswith(("data:", "blob:")) and f"//{host}/" not in request.url:
            self.problems.append(f"a request to {request.url}")


@pytest.fixture
def visit(chromium: Browser) -> Iterator[Callable[..., Visitor]]:
    """Return a function that opens a browser context of its own for the console at an address."""
    with contextlib.ExitStack() as stack:

        def open_context(origin: str, **options: Any) -> Visitor:
            context = chromium.new_context(viewport={"width": 1200, "height": 900}, **options)
            stack.callback(context.close)
            return Visitor(context.new_page(), origin)

        yield open_context


@contextlib.contextmanager
def running_console(management: str, inference: str, metrics: str, port: int = 0) -> Iterator[str]:
    """Run ``torchrelay console`` and yield its address."""
    port = port or free_port()
    command = [sys.executable, "-m", "serve_app.cli", "console", "--server", management]
    command += ["--inference", inference, "--metrics", metrics, "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 60
        while True:
            with socket.socket() as probe:
                if not probe.connect_ex(("127.0.0.1", port)):
                    break
            assert process.poll() is None, process.stdout.read() if process.stdout else ""
            assert time.monotonic() < deadline
            time.sleep(0.02)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)
        if process.stdout:
            process.stdout.close()


@dataclass
class FakeServer:
    """An in-process server over a control API in memory, and its addresses."""

    control_api: FakeControlAPI
    management: str
    inference: str
    meters: Meters


@pytest.fixture
def fake_server(over_http: Callable[..., str]) -> Callable[..., FakeServer]:
    """Return the builder of a server with models by name, which answers with what it receives."""

    def build(models: tuple[str, ...] = ("m",), access: AccessTable | None = None) -> FakeServer:
        control_api, settings, meters = FakeControlAPI(), Settings(), Meters()
        versions = {"1.0": VersionRoute("1.0", "ready", 1)}
        table = RoutingTable(
            1,
            {name: ModelRoute("1.0", versions) for name in models},
            startup_complete=True,
            access=access,
        )
        plane = DataPlane(RoutingTableReader(table), meters, lambda ref, row: FakeBackend(echo).at(ref))
        aggregator = MetricsAggregator()

        async def render(names: frozenset[str] | None) -> bytes:
            aggregator.put("server", meters.report())
            return aggregator.render(names)

        control = ControlPlane(control_api, settings, lambda: access)
        management = over_http(management_app(control, settings, render=render))
        inference = over_http(inference_app(plane, settings, meters, control=control))
        return FakeServer(control_api, management, inference, meters)

    return build
