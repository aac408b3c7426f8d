"""The blob store of large requests and responses: ``async_predictions.results``, through fsspec.

It is a folder of this machine or of an object store, which may be slow, down or refuse access. Calls to it
wait in threads of their own, so that nothing else waits. No bucket is created here, because a typing error
would create one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

from serve_app.errors import ConfigurationError, ResultStoreUnavailable
from serve_app.model_store import object_stores
from serve_app.model_store.atomic_dir import sync
from serve_app.settings import Settings

log = logging.getLogger(__name__)

OBJECT = re.compile(r"[0-9a-f]{32}\.(request|answer)")

_KEY = "async_predictions.results"
_IDLE_TIMEOUT = 10.0  # seconds without a byte, after which S3 counts as unreachable
_THREADS = 16
_ORPHAN_AGE = 3600.0  # seconds in which an unknown object may be one that is being stored
# Schemes that store nothing, or cannot be written.
_NEVER = {"memory": "ends with the process", "http": "cannot be written", "https": "cannot be written"}
_IN_BUCKETS = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "oci")
_CREDENTIALS = {"s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY", "gs": "GOOGLE_APPLICATION_CREDENTIALS"}

T = TypeVar("T")


class BlobLocation(NamedTuple):
    """A location of blobs; ``shown`` is the URL without a password."""

    scheme: str
    url: str
    shown: str


def parse_location(settings: Settings) -> BlobLocation:
    """Parse the location of ``async_predictions.results`` without a connection.

    Raises ConfigurationError for an unusable location.
    """
    url = settings.results_location
    scheme, separator, path = url.partition("://")
    scheme = scheme if separator else "file"
    shown = re.sub(r"(?<=://)[^/@]*@", "", url.partition("?")[0]) if separator else url
    if scheme in _NEVER:
        cure = "write a path, s3://bucket/folder or gs://bucket/folder"
        raise ConfigurationError(
            _KEY, f"{scheme}:// {_NEVER[scheme]}, and what is kept must outlive it; {cure}"
        )
    if separator and scheme == "file" and not path.startswith("/"):
        raise ConfigurationError(
            _KEY, f"{shown} names no folder; write file:///and/its/path, or the path alone"
        )
    if scheme in _IN_BUCKETS and not path.partition("/")[0]:
        raise ConfigurationError(_KEY, f"{shown} names no bucket; write {scheme}://bucket/folder")
    import fsspec  # late: few processes need it

    try:
        fsspec.get_filesystem_class(scheme)
    except ImportError as error:
        extra = object_stores.EXTRAS.get(scheme)
        cure = f"pip install torchrelay[{extra}]" if extra else str(error)
        raise ConfigurationError(
            _KEY, f"{scheme}:// needs a package that is not installed here; {cure}"
        ) from None
    except ValueError:
        cure = "write a path, s3://bucket/folder, gs://bucket/folder, or another file system of fsspec's"
        raise ConfigurationError(_KEY, f"{scheme}:// is not known; {cure}") from None
    return BlobLocation(scheme, url, shown)


class BlobStore:
    """A store of objects by name.

    Every method but ``remove`` raises ResultStoreUnavailable.
    """

    def __init__(self, settings: Settings) -> None:
        """Open no connection yet. Raises ConfigurationError."""
        self._location = parse_location(settings)
        self._options = object_stores.file_system_options(
            self._location.scheme, settings.store, _IDLE_TIMEOUT
        )
        self._opened: tuple[Any, str] | None = None
        self._unneeded: set[str] = set()
        self._threads = ThreadPoolExecutor(_THREADS, "results")

    async def write(self, name: str, *chunks: bytes) -> None:
        """Store an object durably."""
        await self._run_in_thread(self._write, name, chunks)

    async def read(self, name: str) -> bytes | None:
        """Return an object, or None where it does not exist any more."""
        return await self._run_in_thread(self._read, name)

    async def remove(self, names: Iterable[str]) -> None:
        """Remove objects; a failed removal is retried by ``remove_unneeded``."""
        self._unneeded |= set(names)
        try:
            await self.remove_unneeded()
        except ResultStoreUnavailable as error:
            log.warning("Files of ended async predictions were not removed; trying again: %s", error)

    async def remove_unneeded(self) -> None:
        """Remove the objects whose removal failed before."""
        if self._unneeded:
            await self._run_in_thread(self._remove, list(self._unneeded))

    async def remove_orphans(self, known: set[str]) -> None:
        """Check read, write and delete access, and remove unknown objects that a crash left."""
        await self._run_in_thread(self._check_access)
        self._unneeded |= await self._run_in_thread(self._find_orphans, known)
        await self.remove_unneeded()

    def close(self) -> None:
        self._threads.shutdown(wait=False)

    # In a thread

    async def _run_in_thread(self, work: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._call, work, *args)

    def _call(self, work: Callable[..., T], *args: Any) -> T:
        """Raise ResultStoreUnavailable for whatever a file system raises."""
        try:
            return work(*args)
        except Exception as error:  # each file system has an error tree of its own
            raise ResultStoreUnavailable(
                self._location.shown, _explain(self._location.scheme, error)
            ) from error

    def _write(self, name: str, chunks: tuple[bytes, ...]) -> None:
        system, root = self._open()
        is_local = self._location.scheme == "file"
        is_new = is_local and not os.path.isdir(root)
        if self._location.scheme not in _IN_BUCKETS:
            system.makedirs(root, exist_ok=True)
        system.pipe_file(f"{root}/{name}", b"".join(chunks))
        if is_local:
            sync(f"{root}/{name}")
            sync(root)
        if is_new:
            sync(os.path.dirname(root))

    def _read(self, name: str) -> bytes | None:
        system, root = self._open()
        try:
            return bytes(system.cat_file(f"{root}/{name}"))
        except FileNotFoundError:
            whole = root.partition("/")[0] if self._location.scheme in _IN_BUCKETS else root
            if not system.exists(whole):
                raise  # the bucket, or a disk that is not mounted: they may come back
            return None

    def _remove(self, names: list[str]) -> None:
        system, root = self._open()
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                system.rm_file(f"{root}/{name}")
            self._unneeded.discard(name)

    def _check_access(self) -> None:
        name = f"{secrets.token_hex(16)}.request"
        self._write(name, (b"trial",))
        self._read(name)
        self._remove([name])

    def _find_orphans(self, known: set[str]) -> set[str]:
        system, root = self._open()
        system.invalidate_cache()
        names = (
            {path.rpartition("/")[2] for path in system.ls(root, detail=False)}
            if system.exists(root)
            else set()
        )
        unknown = filter(OBJECT.fullmatch, names - known)
        return set(_older_than(system, root, unknown, time.time() - _ORPHAN_AGE))

    def _open(self) -> tuple[Any, str]:
        if self._opened is None:
            from fsspec.core import url_to_fs

            system, root = url_to_fs(self._location.url, **self._options)
            if self._location.scheme == "s3":
                system.retries = 1  # on top of botocore's: a caller gets the error soon, and retries
            self._opened = system, root.rstrip("/")
        return self._opened


def _older_than(system: Any, root: str, names: Iterable[str], limit: float) -> Iterator[str]:
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            if system.modified(f"{root}/{name}").timestamp() < limit:
                yield name


def _explain(scheme: str, error: Exception) -> str:
    message = " ".join(str(error).split())[:300]
    if isinstance(error, FileNotFoundError):
        return f"there is no such bucket or folder: {message}; make it, or name another"
    if object_stores.is_access_denied(error):
        who = _CREDENTIALS.get(scheme, "the rights of the server's user")
        return f"access was refused: {message}; check {who}, which must list, read, write and delete there"
    return f"{type(error).__name__}: {message}; see that the head node reaches it"
