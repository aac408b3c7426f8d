"""The gateway: every call that no replica's own route takes, answered through handles."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

from ray import serve

from serve_app.dataplane import DataPlane, TableReader
from serve_app.deployments.link import Link
from serve_app.deployments.remote import Remotes
from serve_app.doors import middleware
from serve_app.doors.app import inference_app
from serve_app.settings import Settings
from serve_app.telemetry import logs
from serve_app.telemetry.metrics import Meters


@serve.deployment
@serve.ingress()
class Gateway:
    """It holds no model: it is always right, and a replica's own route is only quicker."""

    async def __init__(self, settings: Settings, management: Any) -> None:
        # The handle in ``management`` makes Serve start that deployment with this one; the link opens its own.
        logs.configure(settings.telemetry.log_level)
        self._settings = settings
        self._meters = Meters()
        self._reader = TableReader()
        self._link = Link(self._reader, self._meters)
        self._plane = DataPlane(self._reader, self._meters, remote=Remotes(self._reader, settings))
        self._access = logs.access(settings)
        self._link.start()
        await self._link.first_table(timeout=60)
        gc.collect()
        gc.freeze()  # what imports have made is not looked through again, tens of milliseconds a time

    def __serve_build_asgi_app__(self) -> Any:
        doors = inference_app(self._plane, self._settings, self._meters, self._access)
        middleware.answer_with(doors)
        return doors

    async def check_health(self) -> None:
        await asyncio.sleep(0)

    async def __del__(self) -> None:
        await self._link.leave()
