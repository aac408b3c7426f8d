"""A version's archive on the node of this process: its files, its packages, and a runner of its handler."""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ray

from handlers.metrics import MetricCache
from serve_app.domain.adapter import AdapterSpec
from serve_app.domain.model import ModelSpec
from serve_app.domain.urls import redact_url
from serve_app.errors import ArchiveNotFound, RelayError
from serve_app.model_store import object_stores
from serve_app.model_store.archive import Archive, find_adapter_folder
from serve_app.model_store.atomic_dir import temporary_dir
from serve_app.model_store.cache import ArchiveCache, pack
from serve_app.model_store.signatures import SignatureVerifier, signature_names
from serve_app.model_store.sources import fetch, split_digest
from serve_app.runtime.package_envs import PackageEnvs
from serve_app.runtime.runner import Runner
from serve_app.runtime.secret_env import hide_secrets
from serve_app.settings import Settings

log = logging.getLogger(__name__)

_CHUNK_BYTES = 4 << 20  # bytes of one chunk of an archive from Management


class NodeArchive:
    """An archive; ``management`` is Management's handle, which has the archive where this node reaches
    neither its source nor a disk with it.
    """

    def __init__(self, spec: ModelSpec, settings: Settings, management: Any) -> None:
        self._spec = spec
        self._settings = settings
        self._management = management

    async def open(self) -> Path:
        """Return the model's directory on this node. Raises RelayError.

        The digest of the bytes is verified, and that a trusted key signed it where that is required.
        """
        await asyncio.to_thread(self._check_signature, self._spec.signed_by)
        return await self._open(self._spec.archive, self._spec.url, self._spec.digest)

    async def open_adapter(self, adapter: AdapterSpec) -> Path:
        """Return the folder with an adapter's files on this node. Raises RelayError as ``open`` does."""
        await asyncio.to_thread(self._check_signature, adapter.signed_by, adapter.name, adapter.url)
        directory = await self._open(adapter.archive, adapter.url, adapter.digest, adapter.name)
        return await asyncio.to_thread(find_adapter_folder, directory, redact_url(adapter.url))

    async def _open(self, uri: str, url: str, digest: str, *adapter: str) -> Path:
        """Return an unpacked archive on this node: from a disk here, else from its source, else from
        Management.
        """
        cache = await asyncio.to_thread(ArchiveCache, self._settings.state_dir, self._settings.store)
        try:
            return await asyncio.to_thread(cache.open, uri, digest)
        except ArchiveNotFound:
            pass
        address = split_digest(url)[0]
        with temporary_dir(Path(tempfile.gettempdir())) as folder:
            if _reachable_by_nodes(address):
                try:
                    return await asyncio.to_thread(self._open_source, cache, address, digest, folder)
                except (RelayError, OSError) as error:
                    cause = getattr(error, "detail", "") or error
                    log.info("%s is not available to this node: %s", redact_url(address), cause)
            log.info("%s is not on this node; requesting it from Management", uri)
            copy = folder / Path(uri).name
            read = partial(self._management.archive.remote, self._spec.ref)
            with copy.open("wb") as file:
                while chunk := await read(file.tell(), _CHUNK_BYTES, *adapter):
                    await asyncio.to_thread(file.write, chunk)
            return await asyncio.to_thread(cache.open, copy.as_uri(), digest)

    def _open_source(self, cache: ArchiveCache, address: str, digest: str, folder: Path) -> Path:
        """Return the unpacked archive of an address; its digest must be the registered one."""
        into = folder / "source"
        into.mkdir()
        source = fetch(address, self._settings.store, self._settings.model_store, into)
        if source.is_dir():
            source, directory = folder / f"{source.name}.mar", source
            pack(directory, source, self._settings.store)
        return cache.open(source.absolute().as_uri(), digest)

    def _check_signature(self, signed_by: str, *names: str) -> None:
        """Refuse what was registered before ``store.require_signature``, or by a key that was removed."""
        settings = self._settings
        if settings.store.require_signature:
            verifier = SignatureVerifier(settings.store, settings.root)
            urls = [split_digest(name)[0] for name in names]
            verifier.check(signed_by, *urls, *signature_names(self._spec))

    def install(self, directory: Path) -> None:
        """Make this process import the archive's requirements, which are installed first where this node
        lacks them.
        """
        spec, settings = self._spec, self._settings
        environments = PackageEnvs(settings.state_dir / "environments", settings.runtime)
        environments.activate(spec.name, directory, spec.requirements, spec.digest)

    def create_runner(
        self, directory: Path, metrics: MetricCache, create: Callable[..., Runner] = Runner
    ) -> Runner:
        """Return a runner of the archive's handler on the GPU of this process; it is not loaded yet.

        From here on the server's secrets are not in the environment of this process.
        """
        spec, settings = self._spec, self._settings
        hide_secrets(settings)
        archive = Archive.read(directory, Path(spec.archive).name, settings.store.default_service_handler)
        manifest, profiles = dict(archive.manifest.raw), settings.log_dir / "profiles"
        gpu = 0 if ray.get_gpu_ids() else None
        return create(spec, directory, manifest, settings.runtime, gpu, metrics, profiles)


def _reachable_by_nodes(address: str) -> bool:
    """Return whether a node may fetch an address: an object, or a name in a model store, if shared.

    Web servers are left to Management, so that one registration is one download of them.
    """
    scheme, separator, _ = address.partition("://")
    return scheme in object_stores.SCHEMES if separator else bool(address) and not address.startswith("/")
