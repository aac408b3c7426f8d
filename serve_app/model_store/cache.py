"""The cache: every archive stored once under its digest, and unpacked once on each node.

::

    root/archives/<digest>/<name>   the archive
    root/models/<digest>/           the model's directory
    root/partial/<host>-<pid>-*/    work in progress; that of dead processes is removed
    root/locks/<digest>             held while a node unpacks that digest

Complete archives and models appear and disappear by one rename, so no process sees a partial one. A process
that loses a race uses the result of the winner.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from serve_app.errors import ArchiveNotFound, InvalidArchive
from serve_app.model_store.archive import pack, unpack
from serve_app.model_store.atomic_dir import file_lock, move_into_place, remove_stale, sync, temporary_dir
from serve_app.model_store.download_progress import OnProgress
from serve_app.model_store.http_source import download
from serve_app.model_store.sources import file_path
from serve_app.settings import MIB, ModelStoreSettings


@dataclass(frozen=True)
class CachedArchive:
    """An archive in the cache."""

    digest: str  # sha256 of the archive's bytes, in hex
    uri: str  # where other nodes download it
    directory: Path  # where it is unpacked on this node
    size: int  # bytes of the archive


class ArchiveCache:
    """The archives below ``root`` by digest; methods block, and any number of processes may share a root."""

    def __init__(self, root: Path, settings: ModelStoreSettings) -> None:
        self._settings = settings
        root = root.absolute()
        self._archives, self._models, self._partial, self._locks = (
            root / name for name in ("archives", "models", "partial", "locks")
        )
        directories = (self._archives, self._models, self._partial, self._locks)
        if not all(directory.is_dir() for directory in directories):
            for directory in directories:
                directory.mkdir(parents=True, exist_ok=True)
            sync(root)
        remove_stale(self._partial)

    def store(
        self,
        source: Path,
        name: str,
        progress: OnProgress | None = None,
        *,
        sha256: str | None = None,
        verify: Callable[[Path], None] | None = None,
    ) -> CachedArchive:
        """Store and unpack an archive, or a model's directory; both are synced to disk on return.

        ``name`` is the archive's file name; the first one of a digest is kept. ``sha256`` is the expected
        digest, of a directory that of its packed form. ``verify`` is called with the stored copy before it
        is unpacked, or with the copy of a directory, and raises to refuse it. Raises InvalidArchive, and then
        stores nothing.
        """
        with temporary_dir(self._partial) as temporary:
            stored = temporary / "archive"
            stored.mkdir()
            archive = stored / _file_name(name)
            if source.is_dir():
                archive = archive.with_name(archive.name.removesuffix(".mar") + ".mar")
                pack(source, archive, self._settings)
                digest = self._copy(archive, None, name, progress)
            else:
                digest = self._copy(source, archive, name, progress)
            if sha256 is not None and digest != sha256:
                raise InvalidArchive(
                    name, f"its sha256 is {digest} and should be {sha256}; the archive is another one"
                )
            if verify is not None and not source.is_dir():
                verify(archive)
            directory = self._models / digest
            if verify is not None and source.is_dir():
                verify(unpack(archive, temporary / "verified", self._settings))
            if not directory.is_dir():
                move_into_place(unpack(archive, temporary / "model", self._settings), directory)
            sync(self._models)  # another process may have moved it there just now
            move_into_place(stored, self._archives / digest)
        (archive,) = (self._archives / digest).iterdir()
        return CachedArchive(digest, archive.as_uri(), directory, archive.stat().st_size)

    def open(self, uri: str, digest: str, progress: OnProgress | None = None) -> Path:
        """Return the unpacked directory of a digest on this node, downloaded from ``uri`` if necessary.

        Raises ArchiveNotFound and DownloadFailed where ``uri`` is not available, and InvalidArchive where its
        digest differs.
        """
        if not re.fullmatch("[0-9a-f]{64}", digest):
            raise InvalidArchive(uri, f"{digest!r} is not a sha256; register the archive again")
        directory = self._models / digest
        if directory.is_dir():
            return directory
        with file_lock(self._locks / digest), temporary_dir(self._partial) as temporary:
            if directory.is_dir():  # another process of this node has unpacked it meanwhile
                return directory
            (temporary / "archive").mkdir()
            archive = temporary / "archive" / _file_name(unquote(uri))
            actual_digest = self._download(uri, archive, progress)
            if actual_digest != digest:
                raise InvalidArchive(
                    uri, f"its sha256 is {actual_digest} and should be {digest}; register the archive again"
                )
            move_into_place(unpack(archive, temporary / "model", self._settings), directory)
        return directory

    def remove(self, digest: str) -> None:
        """Remove a digest that no version uses any more, if it is in the cache."""
        with temporary_dir(self._partial) as temporary:
            for stored in (self._models / digest, self._archives / digest):
                with contextlib.suppress(FileNotFoundError):
                    stored.rename(temporary / stored.parent.name)

    def digests(self) -> set[str]:
        """Return the digests of all archives and models in the cache."""
        return {path.name for stored in (self._archives, self._models) for path in stored.iterdir()}

    def _download(self, uri: str, archive: Path, progress: OnProgress | None) -> str:
        if not uri.startswith("file://"):
            download(uri, archive, self._settings, progress)
            return self._copy(archive, None, archive.name)
        source = file_path(uri)
        try:
            return self._copy(source or Path(), archive, archive.name, progress)
        except (FileNotFoundError, IsADirectoryError):
            raise ArchiveNotFound(f"Model not found at: {uri}") from None

    def _copy(self, source: Path, target: Path | None, name: str, progress: OnProgress | None = None) -> str:
        """Copy a file (with None only read it) and return its digest."""
        digest = hashlib.sha256()
        limit = self._settings.max_archive_bytes
        done = 0
        with source.open("rb") as reading, (target or Path(os.devnull)).open("wb") as writing:
            total = os.fstat(reading.fileno()).st_size or None
            while chunk := reading.read(MIB):
                done += len(chunk)
                if done > limit:
                    raise InvalidArchive(
                        name, f"is larger than max_archive_bytes ({limit}); raise it to allow this"
                    )
                digest.update(chunk)
                writing.write(chunk)
                if progress:
                    progress(done, total)
        return digest.hexdigest()


def _file_name(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2].lstrip(".") or "archive"
