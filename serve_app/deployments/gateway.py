"""The gateway: every call that no replica's own route takes, answered through handles."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

from ray import serve

from serve_app.controlplane import ControlPlane
from serve_app.dataplane import DataPlane, TableReader
from serve_app.deployments.keeper import RemoteKeeper
from serve_app.deployments.link import Link
from serve_app.deployments.remote import Remotes
from serve_app.doors import middleware
from serve_app.doors.app import inference_app
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
        self._meters = Meters(torchserve.meters_of(settings))
        self._reader = TableReader()
        self._link = Link(self._reader, self._meters)
        remotes = Remotes(self._reader, settings)
        self._mirror = Mirror(lambda: self._reader.table, remotes, self._meters)
        self._plane = DataPlane(self._reader, self._meters, remotes, wake=remotes.wake, mirror=self._mirror)
        self._link.observed["trials"] = self._plane.observations.take
        self._link.observed["shadow"] = self._mirror.take
        self._access = access_log.access(settings)
        self._machine = system.collect(self._meters.torchserve, settings)
        self._link.start()
        await self._link.first_table(timeout=60)
        gc.collect()
        gc.freeze()  # what imports have made is not looked through again, tens of milliseconds a time

    def __serve_build_asgi_app__(self) -> Any:
        keeper, shared = RemoteKeeper(self._link.management), self._settings.inference
        doors = inference_app(
            self._plane,
            self._settings,
            self._meters,
            self._access,
            ControlPlane(keeper, self._settings, lambda: self._plane.access),
            keeper.render if shared.also_metrics and self._settings.management.enable_metrics_api else None,
        )
        middleware.answer_with(doors)
        return doors

    async def check_health(self) -> None:
        await asyncio.sleep(0)

    async def __del__(self) -> None:
        await self._mirror.close()
        await self._link.leave()
