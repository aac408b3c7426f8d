"""The gateway: every call that no replica's own route takes, answered through handles."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

from ray import serve

from serve_app import tls
from serve_app.controlplane import ControlPlane
from serve_app.dataplane import DataPlane, TableReader
from serve_app.deployments.grpc_listener import GrpcListener
from serve_app.deployments.homes import Homes, sequence_keys
from serve_app.deployments.keeper import RemoteKeeper
from serve_app.deployments.link import Link
from serve_app.deployments.remote import Remotes
from serve_app.doors import middleware
from serve_app.doors.app import inference_app
from serve_app.doors.grpc.app import inference_server
from serve_app.settings import Settings
from serve_app.shadow.mirror import Mirror
from serve_app.telemetry import access_log, logs, system, torchserve
from serve_app.telemetry.metrics import Meters


@serve.deployment
@serve.ingress()
class Gateway:
    """It holds no model: it is always right, and a replica's own route is only quicker."""

    @logs.told
    async def __init__(self, settings: Settings, management: Any) -> None:
        # The handle in ``management`` makes Serve start that deployment with this one; the link opens its own.
        replica = serve.get_replica_context().replica_id.unique_id
        logs.configure(settings, logs.Speaker(f"Gateway-{replica}"))
        self._settings = settings
        self._grpc: GrpcListener | None = None
        self._meters = Meters(torchserve.meters_of(settings))
        self._reader = TableReader()
        self._link = Link(self._reader, self._meters)
        remotes = Remotes(self._reader, settings)
        self._mirror = Mirror(lambda: self._reader.table, remotes, self._meters)
        self._plane = DataPlane(
            self._reader,
            self._meters,
            remotes,
            wake=remotes.wake,
            mirror=self._mirror,
            homes=Homes(self._reader, remotes, sequence_keys(settings)),
            most_items=settings.inference.max_workflow_items,
        )
        self._link.observed["trials"] = self._plane.observations.take
        self._link.observed["shadow"] = self._mirror.take
        self._access = access_log.access(settings)
        self._machine = system.collect(self._meters.torchserve, settings)
        self._keeper = RemoteKeeper(self._link.management)
        self._control = ControlPlane(self._keeper, settings, lambda: self._plane.access)
        context = await asyncio.to_thread(tls.of_grpc, settings)
        self._link.start()
        await self._link.first_table(timeout=60)
        if settings.grpc.port:
            server = inference_server(self._plane, self._control, settings, self._meters, self._access)
            self._grpc = GrpcListener(server, settings.grpc.host, settings.grpc.port, "grpc.port", context, shared=True)
            await self._grpc.open()
        gc.collect()
        gc.freeze()  # what imports have made is not looked through again, tens of milliseconds a time

    def __serve_build_asgi_app__(self) -> Any:
        shared = self._settings.inference
        doors = inference_app(
            self._plane,
            self._settings,
            self._meters,
            self._access,
            self._control,
            self._keeper.render if shared.also_metrics and self._settings.management.enable_metrics_api else None,
        )
        middleware.answer_with(doors, shared.max_request_size)
        return doors

    async def check_health(self) -> None:
        await asyncio.sleep(0)

    async def __del__(self) -> None:
        if self._grpc is not None:
            await self._grpc.close()
        await self._mirror.close()
        await self._link.leave()
