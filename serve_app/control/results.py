"""Where large requests and answers of asynchronous predictions lie: ``asynchronous.results``, through fsspec.

A folder of this machine, or of an object store, which may be slow, down or closed: whatever waits for it waits in
threads of its own, so that nothing else does. No bucket is ever made here: a slip of the pen would get one.
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

from serve_app.errors import ConfigurationError, ResultsUnreachable
from serve_app.settings import Settings
from serve_app.store import object_stores

log = logging.getLogger("torchrelay.management")

OBJECT = re.compile(r"[0-9a-f]{32}\.(request|answer)")

_KEY = "asynchronous.results"
_QUIET = 10.0  # seconds without a byte, after which S3 counts as gone
_THREADS = 16
_YOUNG = 3600.0  # seconds in which an object that nobody knows may be one that is just being stored
# What keeps nothing, or cannot be written.
_NEVER = {"memory": "ends with the process", "http": "cannot be written", "https": "cannot be written"}
_IN_BUCKETS = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "oci")
_CREDENTIALS = {"s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY", "gs": "GOOGLE_APPLICATION_CREDENTIALS"}

T = TypeVar("T")


class Place(NamedTuple):
    """``shown`` is the URL without what may be a password."""

    scheme: str
    url: str
    shown: str


def place_of(settings: Settings) -> Place:
    """Where ``asynchronous.results`` is, without asking there. Raises ConfigurationError where that can be nowhere."""
    url = settings.results
    scheme, separator, path = url.partition("://")
    scheme = scheme if separator else "file"
    shown = re.sub(r"(?<=://)[^/@]*@", "", url.partition("?")[0]) if separator else url
    if scheme in _NEVER:
        cure = "write a path, s3://bucket/folder or gs://bucket/folder"
        raise ConfigurationError(_KEY, f"{scheme}:// {_NEVER[scheme]}, and what is kept must outlive it; {cure}")
    if separator and scheme == "file" and not path.startswith("/"):
        raise ConfigurationError(_KEY, f"{shown} names no folder; write file:///and/its/path, or the path alone")
    if scheme in _IN_BUCKETS and not path.partition("/")[0]:
        raise ConfigurationError(_KEY, f"{shown} names no bucket; write {scheme}://bucket/folder")
    import fsspec  # late: few processes need it

    try:
        fsspec.get_filesystem_class(scheme)
    except ImportError as error:
        extra = object_stores.EXTRAS.get(scheme)
        cure = f"pip install torchrelay[{extra}]" if extra else str(error)
        raise ConfigurationError(_KEY, f"{scheme}:// needs a package that is not installed here; {cure}") from None
    except ValueError:
        cure = "write a path, s3://bucket/folder, gs://bucket/folder, or another file system of fsspec's"
        raise ConfigurationError(_KEY, f"{scheme}:// is not known; {cure}") from None
    return Place(scheme, url, shown)


class Results:
    """Objects by name. Every method raises ResultsUnreachable, but ``remove``, whose work is done when it can be."""

    def __init__(self, settings: Settings) -> None:
        """Raises ConfigurationError."""
        self._place = place_of(settings)
        self._options = object_stores.options_of(self._place.scheme, settings.store, _QUIET)
        self._opened: tuple[Any, str] | None = None
        self._unwanted: set[str] = set()
        self._threads = ThreadPoolExecutor(_THREADS, "results")

    async def write(self, name: str, *pieces: bytes) -> None:
        """When this returns, it outlives the machine's power."""
        await self._apart(self._write, name, pieces)

    async def read(self, name: str) -> bytes | None:
        """None where there is none any more."""
        return await self._apart(self._read, name)

    async def remove(self, names: Iterable[str]) -> None:
        """What is not there is removed already. What cannot be removed now waits for ``tidy``."""
        self._unwanted |= set(names)
        try:
            await self.tidy()
        except ResultsUnreachable as error:
            log.warning("what is not needed there any more was not removed, and will be: %s", error)

    async def tidy(self) -> None:
        """Remove what could not be removed before."""
        if self._unwanted:
            await self._apart(self._remove, list(self._unwanted))

    async def sweep(self, known: set[str]) -> None:
        """See whether everything that is needed can be done there, and remove what nobody knows and a crash left."""
        await self._apart(self._try)
        self._unwanted |= await self._apart(self._left, known)
        await self.tidy()

    def close(self) -> None:
        self._threads.shutdown(wait=False)

    # In a thread

    async def _apart(self, work: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._explained, work, *args)

    def _explained(self, work: Callable[..., T], *args: Any) -> T:
        """Whatever a file system raises, in our words."""
        try:
            return work(*args)
        except Exception as error:  # each of them has a tree of its own
            raise ResultsUnreachable(self._place.shown, _explain(self._place.scheme, error)) from error

    def _write(self, name: str, pieces: tuple[bytes, ...]) -> None:
        system, home = self._system()
        if self._place.scheme not in _IN_BUCKETS:
            system.makedirs(home, exist_ok=True)
        system.pipe_file(f"{home}/{name}", b"".join(pieces))
        if self._place.scheme == "file":
            _to_disk(f"{home}/{name}")
            _to_disk(home)

    def _read(self, name: str) -> bytes | None:
        system, home = self._system()
        try:
            return system.cat_file(f"{home}/{name}")
        except FileNotFoundError:
            whole = home.partition("/")[0] if self._place.scheme in _IN_BUCKETS else home
            if not system.exists(whole):
                raise  # the bucket, or a disk that is not mounted: they may come back
            return None

    def _remove(self, names: list[str]) -> None:
        system, home = self._system()
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                system.rm_file(f"{home}/{name}")
            self._unwanted.discard(name)

    def _try(self) -> None:
        name = f"{secrets.token_hex(16)}.request"
        self._write(name, (b"trial",))
        self._read(name)
        self._remove([name])

    def _left(self, known: set[str]) -> set[str]:
        system, home = self._system()
        system.invalidate_cache()
        names = {path.rpartition("/")[2] for path in system.ls(home, detail=False)} if system.exists(home) else set()
        unknown = filter(OBJECT.fullmatch, names - known)
        return set(_older(system, home, unknown, time.time() - _YOUNG))

    def _system(self) -> tuple[Any, str]:
        if self._opened is None:
            from fsspec.core import url_to_fs

            system, home = url_to_fs(self._place.url, **self._options)
            if self._place.scheme == "s3":
                system.retries = 1  # on top of botocore's: who waits is told soon, and comes again
            self._opened = system, home.rstrip("/")
        return self._opened


def _older(system: Any, home: str, names: Iterable[str], than: float) -> Iterator[str]:
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            if system.modified(f"{home}/{name}").timestamp() < than:
                yield name


def _to_disk(path: str) -> None:
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _explain(scheme: str, error: Exception) -> str:
    said = " ".join(str(error).split())[:300]
    if isinstance(error, FileNotFoundError):
        return f"there is no such bucket or folder: {said}; make it, or name another"
    if object_stores.was_refused(error):
        who = _CREDENTIALS.get(scheme, "the rights of the server's user")
        return f"access was refused: {said}; check {who}, which must list, read, write and delete there"
    return f"{type(error).__name__}: {said}; see that the head node reaches it"
