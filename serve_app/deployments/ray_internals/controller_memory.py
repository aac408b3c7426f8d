"""A bound on the memory of Ray Serve's controller, which keeps something of every replica that ever ran.

A register/unregister cycle costs it about 0.25 MiB. Requests and replicas continue without it, and a new one
is back in about 4 s (see tests/chaos), so it is replaced once it is too large.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import psutil
import ray
from ray.serve.context import _get_global_client

log = logging.getLogger(__name__)

_CHECK_PERIOD_S = 60.0


async def bound_controller_memory(limit_mib: int) -> None:
    """Replace the controller whenever it holds more than ``limit_mib`` MiB; 0 means no limit.

    The controller runs on this machine, the head node, as Management does.
    """
    if not limit_mib:
        return
    controller = _get_global_client()._controller
    while True:
        await asyncio.sleep(_CHECK_PERIOD_S)
        try:
            await restart_if_large(
                controller.get_pid.remote, lambda: ray.kill(controller, no_restart=False), limit_mib << 20
            )
        except Exception as error:  # it is being replaced already
            log.info("the Serve controller's memory is unknown (%s)", type(error).__name__)


async def restart_if_large(
    get_pid: Callable[[], Awaitable[int]], restart: Callable[[], None], limit: int
) -> bool:
    """Call ``restart`` where the process holds more than ``limit`` bytes; return whether it does.

    Raises psutil.Error where the process has ended.
    """
    resident = psutil.Process(await get_pid()).memory_info().rss
    if resident <= limit:
        return False
    log.warning(
        "The Serve controller holds %d MiB, more than control.controller_memory_limit (%d MiB). "
        "It is replaced; requests and replicas continue.",
        resident >> 20,
        limit >> 20,
    )
    restart()
    return True
