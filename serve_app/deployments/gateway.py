"""The gateway: answers every request that no replica's own route takes, through other replicas."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
from typing import Any

from ray import serve

from serve_app.control.api import ControlPlane
from serve_app.dataplane.data_plane import RoutingTableReader
from serve_app.deployments.cluster_data_plane import create_data_plane
from serve_app.deployments.listeners.grpc import GrpcListener
from serve_app.deployments.management_client import SERVER, ManagementClient
from serve_app.deployments.ray_internals import metrics as ray_metrics
from serve_app.deployments.ray_internals.metrics import ExportedLoad, ExportedProcess
from serve_app.deployments.transport.control_rpc import ControlClient
from serve_app.net import tls
from serve_app.net.private_files import restrict_umask
from serve_app.protocols.grpc_app import inference_server
from serve_app.protocols.http.server import ray_bypass
from serve_app.protocols.http_app import inference_app
from serve_app.settings import Settings
from serve_app.telemetry import access_log, host_metrics, logs, torchserve, tracing
from serve_app.telemetry.metrics import Meters

log = logging.getLogger(__name__)


class Gateway:
    """A gateway without a model; it can answer every request, and a replica's own route is only faster."""

    @logs.report_start_failure
    async def __init__(self, settings: Settings, management: Any) -> None:  # type: ignore[misc]  # Serve awaits it
        # The handle in ``management`` makes Serve start that deployment with this one; the client opens its
        # own handle.
        restrict_umask()
        replica = serve.get_replica_context().replica_id.unique_id
        logs.configure(settings, logs.ProcessIdentity(f"Gateway-{replica}"))
        tracing.configure(settings, "gateway", replica=replica)
        self._settings = settings
        self._grpc: GrpcListener | None = None
        self._meters = Meters(torchserve.create_recorders(settings))
        reader = RoutingTableReader()
        self._management_client = ManagementClient(reader, self._meters, settings.counts_dir)
        self._plane, self._mirror = create_data_plane(
            reader, self._meters, settings, self._management_client.reports
        )
        self._management_client.key_limiter = self._plane.key_limiter
        self._access = access_log.access_log(settings)
        self._host_metrics = host_metrics.start(self._meters.torchserve, settings)
        self._control_client = ControlClient(self._management_client.management)
        self._control = ControlPlane(self._control_client, settings, lambda: self._plane.access)
        context = await asyncio.to_thread(tls.grpc_context, settings)
        self._management_client.start()
        await self._management_client.wait_for_table(timeout=60)
        if settings.grpc.port:
            server = inference_server(self._plane, self._control, settings, self._meters, self._access)
            self._grpc = GrpcListener(
                server, settings.grpc.host, settings.grpc.port, "grpc.port", context, shared=True
            )
            await self._grpc.open()
        log.info("The gateway has started (pid %d)", os.getpid())  # again, after it was killed
        process = ExportedProcess(SERVER, replica, "/")
        self._ray_metrics = ray_metrics.start(settings, self._meters, process, self._measure_load)
        gc.collect()
        # Objects made by imports are excluded from garbage collection, which takes tens of milliseconds.
        gc.freeze()

    def _measure_load(self) -> ExportedLoad:
        return ExportedLoad(grpc=self._grpc.calls if self._grpc is not None else 0)

    def __serve_build_asgi_app__(self) -> Any:
        shared = self._settings.inference
        app = inference_app(
            self._plane,
            self._settings,
            self._meters,
            self._access,
            self._control,
            self._control_client.render
            if shared.serve_metrics and self._settings.management.enable_metrics_api
            else None,
        )
        ray_bypass.set_app(app, shared.max_request_size, app.callback_app)
        return app

    async def check_health(self) -> None:
        await asyncio.sleep(0)

    async def __del__(self) -> None:
        if self._grpc is not None:
            await self._grpc.close()
        await self._mirror.close()
        await asyncio.to_thread(tracing.shutdown)
        await self._management_client.disconnect()
