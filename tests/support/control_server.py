"""A management API over the real control plane, served from a thread of this process."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import uvicorn

from serve_app.control.api import ControlPlane
from serve_app.domain.access import AccessTable
from serve_app.protocols.http_app import management_app
from tests.support.control_services import ControlServices
from tests.support.ports import free_port

T = TypeVar("T")


class ControlServer:
    """A served management API with its metrics page, and the services behind it.

    ``services`` belong to the loop of the thread; ``run`` calls them.
    """

    def __init__(self, services: ControlServices, loop: asyncio.AbstractEventLoop, url: str) -> None:
        self.services = services
        self.url = url
        self.store = Path(services.settings.home) / "model_store"
        self._loop = loop

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)


@contextlib.contextmanager
def serve_control(home: Path, access: AccessTable | None = None, **control: Any) -> Iterator[ControlServer]:
    """Start the control plane with a management port of its own; ``control`` has its settings."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def run(coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(60)

    async def create() -> tuple[ControlServices, uvicorn.Server, asyncio.Task[None]]:
        services = ControlServices(home, **control)
        await services.start()
        services.control = ControlPlane(services.control.api, services.settings, lambda: access)
        app = management_app(services.control, services.settings, render=services.metrics.render)
        port = free_port()
        options: dict[str, Any] = {"log_config": None, "lifespan": "off", "timeout_keep_alive": 600}
        server = uvicorn.Server(uvicorn.Config(app, port=port, **options))
        task = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.005)
        return services, server, task

    services, server, task = run(create())

    async def close() -> None:
        server.should_exit = True
        await task
        await services.close()

    try:
        yield ControlServer(services, loop, f"http://127.0.0.1:{server.config.port}")
    finally:
        run(close())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
