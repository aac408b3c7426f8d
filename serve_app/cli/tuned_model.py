"""The model of ``torchrelay tune``: an archive, and its versions on the server."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from serve_app.cli.api_client import CliClient
from serve_app.cli.terminal import fail
from serve_app.cli.variant_search import find_archive
from serve_app.model_store.archive import unpack
from serve_app.model_store.manifest import HUGGING_FACE, Manifest, handler_module
from serve_app.model_store.model_check import check_model
from serve_app.model_store.model_config import ModelConfig
from serve_app.settings import ModelStoreSettings
from serve_app.tuning.candidate import PLAIN, Candidate

_SHOWN_DELAY = 100  # a description has this maxBatchDelay where none is set
_GENERATION_HANDLERS = ("llm",)


@dataclass(frozen=True)
class TunedModel:
    """A model to tune: its unpacked archive, its configuration, and its versions on the server."""

    directory: Path
    manifest: Manifest
    config: ModelConfig
    served: list[dict[str, Any]]
    digest: str

    @property
    def is_generation(self) -> bool:
        return handler_module(self.manifest.handler) in _GENERATION_HANDLERS

    @property
    def baseline(self) -> Candidate:
        """Return the current configuration."""
        config = self.config
        candidate = Candidate(
            PLAIN, config.min_workers or 1, config.threads, config.batch_size or 1, config.max_batch_delay
        )
        if not self.served:
            return candidate
        version = self.served[0]
        delay = version["maxBatchDelay"]
        if delay == _SHOWN_DELAY and config.max_batch_delay != _SHOWN_DELAY:
            delay = None
        workers = max(1, version["minWorkers"])
        return replace(
            candidate, workers=workers, batch_size=version["batchSize"], max_batch_delay=delay or None
        )


def read_model(name: str, store: Path, client: CliClient, version: str | None, temporary: Path) -> TunedModel:
    """Unpack and check an archive, or that of a served model. Raises RelayError; exits for unknown names."""
    archive, served = find_archive(name, store, client, version)
    directory = (
        archive.resolve()
        if archive.is_dir()
        else unpack(archive, temporary / "archive", ModelStoreSettings())
    )
    manifest = Manifest.read(directory, archive.name)
    if served:  # the registration may have overridden the archive
        manifest = replace(manifest, model_name=served[0]["modelName"], version=served[0]["modelVersion"])
    trusted = ModelConfig.read(directory, manifest).trusted is True
    config = check_model(directory, manifest, served[0].get("task") if served else None, trusted)
    if served and manifest.handler == HUGGING_FACE and "task" not in served[0]:
        fail(f"{name} was registered with its own handler. Pass its archive, {archive}, instead.")
    return TunedModel(directory, manifest, config, served, _digest(archive))


def _digest(archive: Path) -> str:
    """Return a digest of an archive, or of a model folder's names, sizes and times."""
    if archive.is_file():
        with archive.open("rb") as file:
            found = hashlib.sha256()
            while block := file.read(1 << 20):
                found.update(block)
            return found.hexdigest()
    stats = [(str(f.relative_to(archive)), f.stat()) for f in sorted(archive.rglob("*")) if f.is_file()]
    return hashlib.sha256(repr([(n, s.st_size, s.st_mtime_ns) for n, s in stats]).encode()).hexdigest()
