"""The cache: every archive kept once under its digest, and unpacked once on each node.

::

    root/archives/<digest>/<name>   the archive
    root/models/<digest>/           the model's directory
    root/partial/<host>-<pid>-*/    work in progress; what a dead process left is swept
    root/locks/<digest>             held while a node unpacks that digest

Whole things appear under ``archives`` and ``models`` by one rename, and leave by one, so nobody
ever sees a half. Who loses a race uses what the winner put there.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from serve_app.errors import ArchiveNotFound, InvalidArchive
from serve_app.settings import MIB, StoreSettings
from serve_app.store.archive import pack, unpack
from serve_app.store.sources import file_path
from serve_app.store.transfer import OnProgress
from serve_app.store.web import download
from serve_app.store.workplace import locked, settle, sweep, workplace


@dataclass(frozen=True)
class Stored:
    """One archive in the cache."""

    digest: str  # sha256 of the archive's bytes, in hex
    uri: str  # where other nodes find it
    directory: Path  # where it is unpacked here


class Cache:
    """Archives by digest below ``root``. Every method blocks; any number of processes may share a root."""

    def __init__(self, root: Path, settings: StoreSettings) -> None:
        self._settings = settings
        root = root.absolute()
        self._archives, self._models, self._partial, self._locks = (
            root / name for name in ("archives", "models", "partial", "locks")
        )
        for directory in (self._archives, self._models, self._partial, self._locks):
            directory.mkdir(parents=True, exist_ok=True)
        sweep(self._partial)

    def store(self, source: Path, name: str, progress: OnProgress | None = None) -> Stored:
        """Keep and unpack an archive, or a model's directory as it is now; on disk when this returns.

        ``name`` is the archive's file name; the first one given for a digest is kept.
        Raises InvalidArchive, and then keeps nothing.
        """
        with workplace(self._partial) as place:
            kept = place / "archive"
            kept.mkdir()
            archive = kept / _file_name(name)
            if source.is_dir():
                archive = archive.with_name(archive.name.removesuffix(".mar") + ".mar")
                pack(source, archive, self._settings)
                digest = self._copy(archive, None, name, progress)
            else:
                digest = self._copy(source, archive, name, progress)
            directory = self._models / digest
            if not directory.is_dir():
                settle(unpack(archive, place / "model", self._settings), directory)
            _to_disk(archive)
            settle(kept, self._archives / digest)
            _to_disk(self._archives)
        (archive,) = (self._archives / digest).iterdir()
        return Stored(digest, archive.as_uri(), directory)

    def open(self, uri: str, digest: str, progress: OnProgress | None = None) -> Path:
        """The unpacked directory of a digest on this node: at once where it is here, else brought from ``uri``.

        Raises ArchiveNotFound and DownloadFailed where ``uri`` has nothing to give, and
        InvalidArchive where it gives something else.
        """
        if not re.fullmatch("[0-9a-f]{64}", digest):
            raise InvalidArchive(uri, f"{digest!r} is no sha256; register the archive again")
        directory = self._models / digest
        if directory.is_dir():
            return directory
        with locked(self._locks / digest), workplace(self._partial) as place:
            if directory.is_dir():  # another process of this node did it meanwhile
                return directory
            (place / "archive").mkdir()
            archive = place / "archive" / _file_name(unquote(uri))
            found = self._bring(uri, archive, progress)
            if found != digest:
                raise InvalidArchive(uri, f"its sha256 is {found} and should be {digest}; register the archive again")
            settle(unpack(archive, place / "model", self._settings), directory)
        return directory

    def remove(self, digest: str) -> None:
        """Forget a digest that no version uses any more; nothing happens where it is not here."""
        with workplace(self._partial) as place:
            for kept in (self._models / digest, self._archives / digest):
                with contextlib.suppress(FileNotFoundError):
                    kept.rename(place / kept.parent.name)

    def digests(self) -> set[str]:
        """The digests of every archive and model that is here."""
        return {path.name for kept in (self._archives, self._models) for path in kept.iterdir()}

    def _bring(self, uri: str, archive: Path, progress: OnProgress | None) -> str:
        if not uri.startswith("file://"):
            download(uri, archive, self._settings, progress)
            return self._copy(archive, None, archive.name)
        source = file_path(uri)
        try:
            return self._copy(source or Path(), archive, archive.name, progress)
        except (FileNotFoundError, IsADirectoryError):
            raise ArchiveNotFound(f"Model not found at: {uri}") from None

    def _copy(self, source: Path, target: Path | None, name: str, progress: OnProgress | None = None) -> str:
        """Copy a file (to nowhere with None) and return the digest of what was read."""
        digest = hashlib.sha256()
        limit = self._settings.max_archive_bytes
        done = 0
        with source.open("rb") as reading, (target or Path(os.devnull)).open("wb") as writing:
            total = os.fstat(reading.fileno()).st_size or None
            while chunk := reading.read(MIB):
                done += len(chunk)
                if done > limit:
                    raise InvalidArchive(name, f"is larger than max_archive_bytes ({limit}); raise it to allow this")
                digest.update(chunk)
                writing.write(chunk)
                if progress:
                    progress(done, total)
        return digest.hexdigest()


def _file_name(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2].lstrip(".") or "archive"


def _to_disk(path: Path) -> None:
    """What was written to a file or directory outlives a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
