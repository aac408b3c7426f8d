"""From an archive's address to a spec: fetched, stored, and checked before anything is changed."""

from __future__ import annotations

import dataclasses
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path

from serve_app.control.specs import spec_from, workflow_spec
from serve_app.errors import ArchiveNotFound, WorkflowArchiveNotFound
from serve_app.settings import Settings
from serve_app.store import war
from serve_app.store.cache import Cache, Stored
from serve_app.store.manifest import Manifest, check, is_folder
from serve_app.store.sources import fetch, file_path
from serve_app.types import ModelSpec, Registration

log = logging.getLogger("torchrelay.admission")

Tell = Callable[..., None]  # a stage of types.Event, and what is to be said of it

_ARCHIVES = (".mar", ".tar.gz", ".tgz", ".zip")


def _tell_nobody(stage: str, **said: object) -> None:
    pass


class Admission:
    """Every method blocks: call it from a thread. ``admit`` may run beside itself, and never beside ``tidy``."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._cache = Cache(settings.state_dir, settings.store)
        # What may be removed. At first everything: a Management that was killed did not get round to it.
        self._loose: set[str] = self._cache.digests()

    def admit(self, registration: Registration, at_startup: bool = False, tell: Tell = _tell_nobody) -> ModelSpec:
        """The spec of the version in the archive that ``registration`` names, which is in the cache from now on.

        ``tell`` hears how far it has come, from this thread. Raises ArchiveNotFound, DownloadFailed,
        InvalidArchive, ConfigurationError and BadRequest.
        """
        settings = self._settings
        stored, source = self._stored(registration, settings.model_store, tell)
        manifest = Manifest.read(stored.directory, source, settings.store.default_service_handler)
        asked = {"model_name": registration.model_name, "handler": registration.handler}
        manifest = dataclasses.replace(manifest, **{key: value for key, value in asked.items() if value})
        config = check(stored.directory, manifest, registration.task)
        if config.unserved:
            keys = ", ".join(config.unserved)
            log.warning("%s: %s in its %s: not served, and without effect", source, keys, manifest.config_file)
        spec = spec_from(
            registration,
            manifest,
            config,
            digest=stored.digest,
            archive=stored.uri,
            settings=settings,
            at_startup=at_startup,
        )
        if manifest.requirements_file is not None and not spec.requirements:
            cure = "runtime.install_py_dep_per_model, or useVenv: true in its model-config.yaml, installs it"
            log.warning("%s: its %s is not installed; %s", source, manifest.requirements_file, cure)
        if spec.device_type == "gpu" and not spec.num_gpus:
            cure = "num_gpus in the same file, or runtime.num_gpus, does"
            log.warning("%s: deviceType gpu alone claims no GPU, so its replicas see none; %s", source, cure)
        return spec

    def admit_workflow(
        self, registration: Registration
    ) -> tuple[ModelSpec, list[Registration], tuple[war.Member, ...]]:
        """The spec of the workflow in a .war, and what to register its models with, beside what it says of each.

        Raises WorkflowArchiveNotFound, InvalidWorkflow and what ``admit`` raises.
        """
        url = registration.url
        try:
            stored, source = self._stored(registration, self._settings.workflow_store, _tell_nobody)
        except ArchiveNotFound as error:
            where = "at" if "://" in url or url.startswith("/") else "in workflow store"
            unknown = str(error).startswith("Model not found at: ")
            raise WorkflowArchiveNotFound(f"Workflow not found {where}: {url}" if unknown else str(error)) from None
        found = war.read(stored.directory, source, registration.model_name)
        spec = workflow_spec(
            registration, found.graph, self._settings, digest=stored.digest, archive=stored.uri, file=found.file
        )
        asked = [
            dataclasses.replace(
                registration,
                url=member.url,
                model_name=member.name,
                batch_size=member.batch_size,
                max_batch_delay=member.max_batch_delay,
                initial_workers=member.max_workers,
                id=None,
            )
            for member in found.members
        ]
        return spec, asked, found.members

    def _stored(self, registration: Registration, store: Path, tell: Tell) -> tuple[Stored, str]:
        """What ``registration`` names, in the cache from now on, and the archive's file name."""
        with tempfile.TemporaryDirectory(prefix="torchrelay-") as into:
            source = fetch(
                registration.url,
                self._settings.store,
                store,
                Path(into),
                lambda done, total: tell("downloading", bytes=done, total=total),
                registration.s3_sse_kms,
            )
            stored = self._cache.store(
                source, source.name, lambda done, total: tell("unpacking", bytes=done, total=total)
            )
        tell("checking")
        self._loose.add(stored.digest)
        return stored, source.name

    def directory(self, spec: ModelSpec) -> Path:
        """Where an admitted version's archive is unpacked on this node."""
        return self._cache.open(spec.archive, spec.digest)

    def at_startup(self) -> list[Registration]:
        """What ``control.load_models`` asks for: everything in the model store, nothing, or a list."""
        wanted = self._settings.control.load_models.strip()
        if wanted in ("", "none"):
            return []
        if wanted == "all":
            store = self._settings.model_store
            found = sorted(store.iterdir()) if store.is_dir() else []
            return [Registration(path.name) for path in found if _is_archive(path)]
        return [_registration(item.strip()) for item in wanted.split(",") if item.strip()]

    def discard(self, digest: str) -> None:
        """A version that used this archive is gone."""
        self._loose.add(digest)

    def tidy(self, used: frozenset[str]) -> None:
        """Remove the archives that were refused, or whose versions are gone: all but those in ``used``."""
        while self._loose:
            digest = self._loose.pop()
            if digest not in used:
                self._cache.remove(digest)

    def read(self, spec: ModelSpec, offset: int, length: int) -> bytes:
        """A piece of a stored archive; empty at its end."""
        path = file_path(spec.archive)
        assert path is not None, "the cache stores archives in files"
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(length)


def _registration(item: str) -> Registration:
    """``a.mar`` or ``name=a.mar``; an address may have its own equals signs."""
    name, equals, url = item.partition("=")
    named = equals and not {"/", ":"} & set(name)
    return Registration(url, model_name=name) if named else Registration(item)


def _is_archive(path: Path) -> bool:
    if path.name.startswith("."):
        return False
    if path.is_dir():
        return (path / "MAR-INF").is_dir() or is_folder(path)
    return path.name.lower().endswith(_ARCHIVES)
