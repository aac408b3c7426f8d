"""A version's archive on the node of this process: its files, what it requires, and a runner over them."""

from __future__ import annotations

import asyncio
import logging
import tempfile
from pathlib import Path
from typing import Any

import ray

from handlers.metrics import MetricCache
from serve_app.errors import ArchiveNotFound
from serve_app.runtime.environments import Environments
from serve_app.runtime.runner import Runner
from serve_app.settings import Settings
from serve_app.store.cache import Cache
from serve_app.store.manifest import Manifest
from serve_app.types import ModelSpec

log = logging.getLogger("torchrelay.archive")

_PIECE = 4 << 20  # bytes of an archive that come from Management at a time


class Archive:
    """``management`` is Management's handle: it has the archive where no disk that this node sees does."""

    def __init__(self, spec: ModelSpec, settings: Settings, management: Any) -> None:
        self._spec = spec
        self._settings = settings
        self._management = management

    async def open(self) -> Path:
        """The model's directory on this node. Raises RelayError."""
        spec = self._spec
        cache = await asyncio.to_thread(Cache, self._settings.state_dir, self._settings.store)
        try:
            return await asyncio.to_thread(cache.open, spec.archive, spec.digest)
        except ArchiveNotFound:
            log.info("%s is not on this node; asking Management for it", spec.archive)
        with tempfile.TemporaryDirectory(prefix="torchrelay-") as place:
            copy = Path(place) / Path(spec.archive).name
            with copy.open("wb") as file:
                while piece := await self._management.archive.remote(spec.ref, file.tell(), _PIECE):
                    await asyncio.to_thread(file.write, piece)
            return await asyncio.to_thread(cache.open, copy.as_uri(), spec.digest)

    def install(self, directory: Path) -> None:
        """From here on this process imports what the archive requires; it is built where this node has it not yet."""
        spec, settings = self._spec, self._settings
        environments = Environments(settings.state_dir / "environments", settings.runtime)
        environments.enter(spec.name, directory, spec.requirements, spec.digest)

    def runner(self, directory: Path, metrics: MetricCache) -> Runner:
        """What runs the archive's handler, on the GPU that this process has; not loaded yet."""
        spec, settings = self._spec, self._settings
        manifest = Manifest.read(directory, Path(spec.archive).name, settings.store.default_service_handler)
        gpu = 0 if ray.get_gpu_ids() else None
        return Runner(spec, directory, manifest.raw, settings.runtime, gpu, metrics, settings.log_dir / "profiles")
