"""The steps from an archive's URL to a spec: an archive is fetched, stored and checked before any change."""

from __future__ import annotations

import dataclasses
import errno
import logging
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

from serve_app.control.capture_check import check_capture
from serve_app.control.spec_builder import build_spec, build_workflow_spec
from serve_app.domain import limits
from serve_app.domain.access import matches
from serve_app.domain.adapter import AdapterRequest, AdapterSpec
from serve_app.domain.model import ModelSpec, Registration
from serve_app.domain.urls import redact_url
from serve_app.errors import ArchiveNotFound, BadRequest, Unavailable, WorkflowArchiveNotFound
from serve_app.model_store import workflow_archive
from serve_app.model_store.adapter_folder import find_adapter_folder
from serve_app.model_store.atomic_dir import temporary_dir
from serve_app.model_store.cache import ArchiveCache, CachedArchive
from serve_app.model_store.manifest import Manifest, archive_stem, is_model_folder
from serve_app.model_store.model_check import check_model
from serve_app.model_store.signatures import (
    MAX_BYTES,
    SignatureCheck,
    SignatureVerifier,
    signature_names,
    signature_url,
)
from serve_app.model_store.sources import fetch, file_path, split_digest
from serve_app.settings import ModelStoreSettings, Settings

log = logging.getLogger(__name__)

OnBytes = Callable[[int, "int | None"], None]
OnProgress = Callable[..., None]  # is called with a stage of domain.model.Stage and its details

_SUFFIXES = (".mar", ".tar.gz", ".tgz", ".zip")


def _ignore_progress(stage: str, **details: object) -> None:
    pass


class ArchiveIngestor:
    """The fetching, checking and caching of archives. Every method blocks: call it from a thread.

    Calls of ``ingest`` may overlap each other, and never a call of ``remove_unused``.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._cache = ArchiveCache(settings.state_dir, settings.store)
        self._signatures = SignatureVerifier(settings.store, settings.root)
        # Digests that may be removed. At first all of them: a Management that was killed removed nothing.
        self._removable: set[str] = self._cache.digests()

    def ingest(
        self,
        registration: Registration,
        at_startup: bool = False,
        on_progress: OnProgress = _ignore_progress,
    ) -> ModelSpec:
        """Store the archive that ``registration`` names in the cache and return the spec of its version.

        ``on_progress`` is called from this thread. Raises ArchiveNotFound, DownloadFailed, InvalidArchive,
        SignatureRejected, ConfigurationError, BadRequest, and Unavailable on a full disk.
        """
        settings = self._settings
        stored, source, signature = self._store(registration, settings.model_store, on_progress, at_startup)
        manifest = Manifest.read(stored.directory, source, settings.store.default_service_handler)
        manifest = dataclasses.replace(
            manifest,
            model_name=registration.model_name or manifest.model_name,
            handler=registration.handler or manifest.handler,
        )
        signature.check_names(manifest.model_name)
        patterns = settings.store.trusted
        trusted = registration.trusted or any(
            matches(name, patterns) for name in (manifest.model_name, registration.url)
        )
        config = check_model(stored.directory, manifest, registration.task, trusted)
        if config.capture is not None:
            check_capture(config.capture, stored.directory, manifest, settings)
        if config.unserved:
            keys = ", ".join(config.unserved)
            log.warning(
                "%s: %s in its %s: not served, and without effect", source, keys, manifest.config_file
            )
        spec = build_spec(
            registration,
            manifest,
            config,
            digest=stored.digest,
            archive=stored.uri,
            settings=settings,
            at_startup=at_startup,
        ).with_(signed_by=signature.signed_by, archive_bytes=stored.size)
        if manifest.requirements_file is not None and not spec.requirements:
            cure = "runtime.install_py_dep_per_model, or useVenv: true in its model-config.yaml, installs it"
            log.warning("%s: its %s is not installed; %s", source, manifest.requirements_file, cure)
        if spec.device_type == "gpu" and not spec.num_gpus:
            cure = "num_gpus in the same file, or runtime.num_gpus, does"
            log.warning("%s: deviceType gpu alone claims no GPU, so its replicas see none; %s", source, cure)
        return spec

    def ingest_adapter(self, request: AdapterRequest, base: ModelSpec) -> AdapterSpec:
        """Store a LoRA adapter in the cache, as an archive is. Raises as ``ingest`` does.

        It needs a signature where the version ``base``, whose outputs it changes, needs one.
        """
        registration = Registration(request.url, sha256=request.sha256)
        stored, source, signature = self._store(
            registration, self._settings.model_store, _ignore_progress, False
        )
        signature.check_names(*signature_names(base))
        find_adapter_folder(stored.directory, source)
        return AdapterSpec(request.name, request.url, stored.digest, stored.uri, signature.signed_by)

    def ingest_workflow(
        self, registration: Registration
    ) -> tuple[ModelSpec, list[Registration], tuple[workflow_archive.WorkflowModel, ...]]:
        """Return the spec of the workflow in a .war, its models, and a registration for each of them.

        Raises WorkflowArchiveNotFound, InvalidWorkflow, LimitExceeded and whatever ``ingest`` raises.
        """
        url = registration.url
        try:
            stored, source, signature = self._store(
                registration, self._settings.workflow_store, _ignore_progress, False
            )
        except ArchiveNotFound as error:
            where = "at" if "://" in url or url.startswith("/") else "in workflow store"
            is_missing = str(error).startswith("Model not found at: ")
            raise WorkflowArchiveNotFound(
                f"Workflow not found {where}: {redact_url(url)}" if is_missing else str(error)
            ) from None
        archive = workflow_archive.read(stored.directory, source, registration.model_name)
        for member in archive.members:  # before any of their archives is fetched
            limits.check(member, self._settings.limits, f"{source}: model {member.name}")
        signature.check_names(archive.graph.name)
        spec = build_workflow_spec(
            registration,
            archive.graph,
            self._settings,
            digest=stored.digest,
            archive=stored.uri,
            file=archive.file,
        ).with_(signed_by=signature.signed_by)
        registrations = [
            dataclasses.replace(
                registration,
                url=member.url,
                sha256=None,
                model_name=member.name,
                batch_size=member.batch_size,
                max_batch_delay=member.max_batch_delay,
                initial_workers=member.max_workers,
                id=None,
            )
            for member in archive.members
        ]
        return spec, registrations, archive.members

    def _store(
        self, registration: Registration, store: Path, on_progress: OnProgress, by_operator: bool
    ) -> tuple[CachedArchive, str, SignatureCheck]:
        """Store an archive in the cache; return it, its file name, and the check of its signature.

        Raises Unavailable on a full disk.
        """
        try:
            return self._fetch_and_store(registration, store, on_progress, by_operator)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            folders = f"{self._settings.state_dir} and {tempfile.gettempdir()}"
            raise Unavailable(
                f"{redact_url(registration.url)} cannot be stored: {error.strerror}. "
                f"Free space in {folders}, and register it again."
            ) from None

    def _fetch_and_store(
        self, registration: Registration, store: Path, on_progress: OnProgress, by_operator: bool
    ) -> tuple[CachedArchive, str, SignatureCheck]:
        url, sha256 = _parse_digest(registration)
        with temporary_dir(Path(tempfile.gettempdir())) as folder:

            def fetch_file(
                address: str, name: str, progress: OnBytes, store_settings: ModelStoreSettings
            ) -> Path:
                into = folder / name
                into.mkdir()
                return fetch(
                    address, store_settings, store, into, progress, registration.s3_sse_kms, by_operator
                )

            settings = self._settings.store
            source = fetch_file(
                url,
                "archive",
                lambda done, total: on_progress("downloading", bytes=done, total=total),
                settings,
            )
            small = dataclasses.replace(settings, max_archive_bytes=MAX_BYTES)
            names = [source.name, url, *filter(None, [registration.model_name]), archive_stem(source.name)]
            check = SignatureCheck(
                self._signatures,
                names,
                lambda: fetch_file(signature_url(url), "signature", lambda done, total: None, small),
            )
            stored = self._cache.store(
                source,
                source.name,
                lambda done, total: on_progress("unpacking", bytes=done, total=total),
                sha256=sha256,
                verify=check.verify,
            )
        on_progress("checking")
        self._removable.add(stored.digest)
        return stored, source.name, check

    def directory(self, spec: ModelSpec) -> Path:
        """Return the directory with a version's unpacked archive on this node."""
        return self._cache.open(spec.archive, spec.digest)

    def startup_registrations(self) -> list[Registration]:
        """Return the registrations of ``control.load_models``: all of the model store, none, or a list."""
        names = self._settings.control.load_models.strip()
        if names in ("", "none"):
            return []
        if names == "all":
            store = self._settings.model_store
            paths = sorted(store.iterdir()) if store.is_dir() else []
            return [Registration(path.name) for path in paths if _is_archive(path)]
        return [_parse_registration(item.strip()) for item in names.split(",") if item.strip()]

    def mark_unused(self, digest: str) -> None:
        """Mark the archive of a removed version for removal."""
        self._removable.add(digest)

    def remove_unused(self, used: frozenset[str]) -> None:
        """Remove the archives of refused and removed versions: all marked ones but those in ``used``."""
        while self._removable:
            digest = self._removable.pop()
            if digest not in used:
                try:
                    self._cache.remove(digest)
                except OSError as error:  # of a disk: the next start removes it
                    log.warning("the archive %s was not removed: %s", digest, error)

    def read_chunk(self, stored: ModelSpec | AdapterSpec, offset: int, length: int) -> bytes:
        """Read a chunk of a stored archive; it is empty at the end of the file."""
        path = file_path(stored.archive)
        assert path is not None, "the cache stores archives in files"
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(length)


def _parse_digest(registration: Registration) -> tuple[str, str | None]:
    """Return the URL of a registration, and the digest that it or its URL has. Raises BadRequest."""
    url, in_url = split_digest(registration.url)
    given = {digest.lower() for digest in (registration.sha256, in_url) if digest is not None}
    for digest in given:
        if not re.fullmatch("[0-9a-f]{64}", digest):
            raise BadRequest(f"sha256 is {digest[:80]!r}; it is 64 hex digits, as sha256sum prints them.")
    if len(given) > 1:
        raise BadRequest("sha256 differs between the parameter and the URL; leave one of them out.")
    return url, next(iter(given), None)


def _parse_registration(item: str) -> Registration:
    """Parse ``a.mar`` or ``name=a.mar``; a URL may contain equals signs of its own."""
    name, equals, url = item.partition("=")
    is_named = equals and not {"/", ":"} & set(name)
    return Registration(url, model_name=name) if is_named else Registration(item)


def _is_archive(path: Path) -> bool:
    if path.name.startswith("."):
        return False
    try:
        if path.is_dir():
            return (path / "MAR-INF").is_dir() or is_model_folder(path)
    except OSError as error:  # a folder without permission must not keep the others from loading
        log.error("%s was not loaded: %s", path, error)
        return False
    return path.name.lower().endswith(_SUFFIXES)
