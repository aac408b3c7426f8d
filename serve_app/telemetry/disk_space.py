"""The space on the disks of the server's folders, which may be volumes of their own."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path

from serve_app.settings import MIB
from serve_app.telemetry.metrics import Meters

log = logging.getLogger(__name__)

_PERIOD_S = 30.0  # seconds between two measurements
_ALMOST_FULL = 0.95  # of a disk
_FREE_AGAIN = 0.9


class DiskSpace:
    """The used shares of the disks of ``folders``, by name, as gauges; little space is logged as an error.

    The host metrics of TorchServe are of the root file system only.
    """

    def __init__(self, folders: Mapping[str, Path], meters: Meters) -> None:
        self._folders = folders
        self._meters = meters
        self._reported: set[str] = set()

    async def run(self) -> None:
        """Measure regularly, until cancelled."""
        while True:
            await self.measure()
            await asyncio.sleep(_PERIOD_S)

    async def measure(self) -> None:
        """Set the gauges; of a folder that cannot be measured there is none."""
        shares: dict[tuple[str, ...], float] = {}
        for name, folder in self._folders.items():
            try:
                usage = await asyncio.to_thread(shutil.disk_usage, folder)  # a lost network disk blocks
            except OSError:
                continue
            shares[(name,)] = share = usage.used / max(1, usage.used + usage.free)
            if share >= _ALMOST_FULL and name not in self._reported:
                self._reported.add(name)
                log.error(
                    "The disk of %s (%s) is %.0f %% full, and %d MiB are left. On a full disk changes are "
                    "refused, and logs are lost. Remove unused versions and old logs, or enlarge the volume",
                    name,
                    folder,
                    100 * share,
                    usage.free // MIB,
                )
            elif share < _FREE_AGAIN:
                self._reported.discard(name)
        self._meters.replace_gauge("torchrelay_disk_used_ratio", shares)
