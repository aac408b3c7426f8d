"""The listeners of Management's ports, and the console behind one of them."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterator

import grpc

from serve_app.control.api import ControlPlane
from serve_app.deployments.listeners.console_process import ConsoleProcess
from serve_app.deployments.listeners.grpc import ManagementGrpcListener
from serve_app.deployments.listeners.http import HttpListener
from serve_app.protocols.grpc_app import management_server
from serve_app.protocols.http_app import management_app, metrics_app
from serve_app.protocols.management.metrics import Render
from serve_app.settings import Settings
from serve_app.telemetry import access_log
from serve_app.telemetry.metrics import Meters


class ManagementListeners:
    """The ports of one Management; ``render`` returns the metrics page."""

    def __init__(self, control: ControlPlane, settings: Settings, meters: Meters, render: Render) -> None:
        self._control = control
        self._settings = settings
        self._meters = meters
        self._render = render
        self._console: ConsoleProcess | None = None
        self._open: list[HttpListener | ManagementGrpcListener] = []

    async def open(
        self,
        inference_port: int,
        context: ssl.SSLContext | None,
        credentials: grpc.ServerCredentials | None,
    ) -> None:
        """Open the ports that are not shared with the inference port. Raises ConfigurationError."""
        for listener in self._create(inference_port, context, credentials):
            await listener.open()
            self._open.append(listener)

    async def close(self) -> None:
        if self._console is not None:
            await asyncio.to_thread(self._console.close)
        for listener in self._open:
            await listener.close()

    def _create(
        self,
        inference_port: int,
        context: ssl.SSLContext | None,
        credentials: grpc.ServerCredentials | None,
    ) -> Iterator[HttpListener | ManagementGrpcListener]:
        settings, control, meters = self._settings, self._control, self._meters
        m, shared, g = settings.management, settings.inference, settings.grpc
        no_port = (0, inference_port)
        together = (m.host, m.port) == (m.metrics_host, m.metrics_port)
        log = access_log.access_log(settings)
        if g.management_port:
            server = management_server(control, settings, meters, log)
            where = g.management_host, g.management_port, "grpc.management_port"
            yield ManagementGrpcListener(server, *where, credentials)
        if not (shared.serve_management and m.port in no_port):
            render = self._render if m.enable_metrics_api and (together or m.serve_metrics) else None
            if settings.console.enabled:
                self._console = ConsoleProcess(settings, inference_port)
            api = management_app(control, settings, log, render=render, meters=meters, console=self._console)
            yield HttpListener(api, m.host, m.port, "management.port", context)
        alone = m.enable_metrics_api and not together
        if alone and not ((shared.serve_metrics or m.serve_metrics) and m.metrics_port in no_port):
            metrics = metrics_app(self._render, settings, lambda: control.access, meters)
            yield HttpListener(metrics, m.metrics_host, m.metrics_port, "management.metrics_port", context)
