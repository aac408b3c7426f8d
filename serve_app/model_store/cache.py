"""The cache of archives: every one is stored once under its digest, and unpacked once on each node.

::

    root/archives/<digest>/<name>   the archive
    root/models/<digest>/           the model's directory
    root/partial/<host>-<pid>-*/    work in progress; that of dead processes is removed
    root/locks/<digest>             held while a node unpacks that digest

Complete archives and models appear and disappear by one rename, so no process sees a partial one. A process
that loses a race uses the result of the winner.

An archive is a ``.mar``, ``.zip``, ``.tar.gz`` or ``.tgz``; its format is detected from the first bytes, not
from the name. Sizes are counted while files are written; declared sizes are not trusted. Links are created
after every file, so that nothing is written through one, and must end inside the model's directory.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import hashlib
import io
import os
import re
import shutil
import stat
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, BinaryIO
from urllib.parse import unquote

from handlers.untrusted_files import TooManyEntries, open_zip
from serve_app.errors import ArchiveNotFound, InvalidArchive
from serve_app.model_store.archive import SCRIPTS, has_scripts
from serve_app.model_store.atomic_dir import (
    file_lock,
    move_into_place,
    remove_stale,
    remove_tree,
    sync,
    temporary_dir,
)
from serve_app.model_store.download import OnProgress, download, too_deep
from serve_app.model_store.sources import file_path
from serve_app.settings import MIB, ModelStoreSettings

RATIO_FLOOR = 10 * MIB  # unpacked bytes up to which the ratio is not checked
_MAX_HEADERS = MIB  # bytes of headers between two files of a tar; tarfile keeps them in memory
_MAX_LINK = 4096  # bytes of a link's target
_BLOCK = 512
_IMAGE_FOLDER = "models"  # of an image with a model, as KServe has it
_WHITEOUT = ".wh."
_PERMISSIONS = {stat.S_IFLNK: 0o777, stat.S_IFDIR: 0o755}  # in a packed archive; of files: see pack

_BROKEN = "rebuild it with torchrelay archive, or copy it again"
_LEAVES = "leaves the model's directory; put the file itself in"
_SPECIAL = "{!r} is neither a file nor a directory; remove it"
_HOSTILE = "repack it from inside the model's directory"

# A file where another entry needs a directory, a name too long, a hard link to nothing or to a directory.
_ARCHIVE_ERRORS = (errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ENOENT, errno.EPERM)


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
                digest = self._copy(source, archive, name, progress, checked=True)
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

    def _copy(
        self,
        source: Path,
        target: Path | None,
        name: str,
        progress: OnProgress | None = None,
        checked: bool = False,
    ) -> str:
        """Copy a file (with None only read it) and return its digest.

        With ``checked``, InvalidArchive is raised before gigabytes of what is no archive are copied.
        """
        digest = hashlib.sha256()
        limit = self._settings.max_archive_bytes
        done = 0
        with source.open("rb") as reading, (target or Path(os.devnull)).open("wb") as writing:
            total = os.fstat(reading.fileno()).st_size or None
            while chunk := reading.read(MIB):
                done += len(chunk)
                if max(done, total or 0) > limit:
                    raise InvalidArchive(
                        name, f"is larger than max_archive_bytes ({limit}); raise it to allow this"
                    )
                if checked and done == len(chunk):
                    _select_format(chunk[:4], name)
                digest.update(chunk)
                writing.write(chunk)
                if progress:
                    progress(done, total)
        return digest.hexdigest()


def _belongs_in_model(folder: Path) -> bool:
    """Return whether a folder is one of a model's, and not the model itself."""
    return folder.name == "MAR-INF" or (folder.name == SCRIPTS and has_scripts(folder))


def _file_name(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2].lstrip(".") or "archive"


def compute_digest(source: Path, settings: ModelStoreSettings) -> str:
    """Return the digest under which ``store`` keeps an archive, or a model's directory.

    Raises InvalidArchive as ``pack`` does, and OSError.
    """
    if source.is_dir():
        with tempfile.TemporaryDirectory() as temporary:
            packed = Path(temporary, "packed.mar")
            pack(source, packed, settings)
            return compute_digest(packed, settings)
    digest = hashlib.sha256()
    with source.open("rb") as reading:
        while chunk := reading.read(MIB):
            digest.update(chunk)
    return digest.hexdigest()


# Unpacking and packing


def unpack(archive: Path, into: Path, settings: ModelStoreSettings) -> Path:
    """Unpack an archive; return the model's directory: ``into``, or the archive's single top directory.

    ``into`` must not exist; it is removed on failure. Raises InvalidArchive with the archive, the entry and
    the remedy.
    """
    with archive.open("rb") as file:
        extract = _select_format(file.read(4), archive.name)
        file.seek(0)
        into.mkdir(parents=True)
        try:
            tree = _ExtractedTree(archive.name, archive.stat().st_size, into, settings)
            with _archive_errors(archive.name):
                extract(file, tree)
                return tree.finish()
        except BaseException:
            remove_tree(into)
            raise


def _select_format(start: bytes, name: str) -> Callable[[BinaryIO, _ExtractedTree], None]:
    """Return the extraction of an archive by its first bytes. Raises InvalidArchive."""
    if start == b"PK\x03\x04":
        return _extract_zip
    if start[:2] == b"\x1f\x8b":
        return _extract_tar
    raise InvalidArchive(
        name, "is neither a zip (.mar) nor a .tar.gz, or is empty; make one with torchrelay archive"
    )


def unpack_image(layers: Sequence[Path], name: str, into: Path, settings: ModelStoreSettings) -> Path:
    """Unpack the files below ``models/`` of an image's layers, the lowest first.

    Return the model's directory. ``into`` must not exist; it is removed on failure. Raises InvalidArchive, as
    ``unpack`` does.
    """
    into.mkdir(parents=True)
    tree = _ImageTree(name, sum(layer.stat().st_size for layer in layers), into, settings)
    try:
        with _archive_errors(name):
            for layer in layers:
                with layer.open("rb") as file:
                    _extract_tar(file, tree)
            if not any(into.iterdir()):
                raise tree.refuse(f"has no files below /{_IMAGE_FOLDER}; copy the model there")
            return tree.finish()
    except BaseException:
        remove_tree(into)
        raise


def pack(directory: Path, archive: Path, settings: ModelStoreSettings) -> None:
    """Pack ``directory`` as a stored ``.mar`` whose bytes depend only on paths and contents.

    Compiled Python is left out. Links inside the directory stay links. Raises InvalidArchive for a link that
    leaves it, for a device or socket, and beyond the store's limits.
    """
    home = directory.resolve()
    count = size = 0
    try:
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_STORED) as packed:
            for path in _walk(home, directory.name, settings):
                count += 1
                name = path.relative_to(home).as_posix()
                mode = path.lstat().st_mode
                kind = stat.S_IFMT(mode)
                size += path.lstat().st_size if kind == stat.S_IFREG else 0
                if count > settings.max_files:
                    raise InvalidArchive(directory.name, _too_many(settings))
                if size > min(settings.max_archive_bytes, settings.max_unpacked_bytes):
                    raise InvalidArchive(
                        directory.name, "is larger than max_archive_bytes or max_unpacked_bytes"
                    )
                if kind not in (stat.S_IFLNK, stat.S_IFDIR, stat.S_IFREG):
                    raise InvalidArchive(directory.name, _SPECIAL.format(name))
                info = zipfile.ZipInfo(f"{name}/" if kind == stat.S_IFDIR else name)  # its date is a constant
                info.external_attr = (kind | _PERMISSIONS.get(kind, 0o755 if mode & 0o111 else 0o644)) << 16
                if kind == stat.S_IFREG:
                    with path.open("rb") as source, packed.open(info, "w", force_zip64=True) as target:
                        shutil.copyfileobj(source, target, MIB)
                else:
                    link = _link_target(path, home, directory.name) if kind == stat.S_IFLNK else b""
                    packed.writestr(info, link)
    except BaseException:
        archive.unlink(missing_ok=True)
        raise


class _ExtractedTree:
    """The extraction of an archive into a directory, with limits on sizes and entries."""

    def __init__(self, name: str, packed: int, root: Path, settings: ModelStoreSettings) -> None:
        self.name = name
        self._root = root
        self._settings = settings
        self._packed = packed  # bytes of the archive
        self._written = 0
        self._created: set[PurePosixPath] = set()
        self._count = 0
        self._links: list[tuple[PurePosixPath, str, bool]] = []

    def refuse(self, what: str) -> InvalidArchive:
        return InvalidArchive(self.name, what)

    def open_zip(self, file: BinaryIO) -> zipfile.ZipFile:
        """Open a zip whose directory has at most ``max_files`` entries."""
        try:
            return open_zip(file, self._settings.max_files)
        except TooManyEntries:
            raise self.refuse(_too_many(self._settings)) from None

    def includes(self, name: str) -> bool:
        """Return whether an entry of a tar is extracted."""
        return True

    def directory(self, name: str) -> None:
        self._create_directory(self._path(name, is_directory=True))

    def file(self, name: str, source: IO[bytes], mode: int) -> int:
        """Write a file; return its size in bytes."""
        path = self._new_path(name)
        size = 0
        with (self._root / path).open("wb") as target:
            while chunk := source.read(MIB):
                size += len(chunk)
                self.count(len(chunk))
                target.write(chunk)
            if mode & 0o111:
                os.fchmod(target.fileno(), 0o755)
        return size

    def link(self, name: str, target: str, hard: bool = False) -> None:
        """Record a link, created after all files; its parents are created now, so none of them is a link."""
        self._links.append((self._new_path(name), str(self._path(target)) if hard else target, hard))

    def count(self, size: int) -> None:
        """Count ``size`` more unpacked bytes."""
        self._written += size
        limits = self._settings
        if self._written > limits.max_unpacked_bytes:
            limit = limits.max_unpacked_bytes
            raise self.refuse(
                f"unpacks to more than max_unpacked_bytes ({limit}); raise it if you trust the archive"
            )
        if self._written > RATIO_FLOOR and self._written > limits.max_ratio * self._packed:
            raise self.refuse(
                f"unpacks to more than {limits.max_ratio:g} times its size (max_ratio): a zip bomb; "
                "store what compresses so well uncompressed (--archive-format zip-store)"
            )

    def finish(self) -> Path:
        """Create the links, and return the model's directory."""
        root = self._root.resolve()
        links = []
        for path, target, hard in self._links:
            link = root / path
            if hard and (root / target).resolve() != root / target:
                raise self.refuse(f"{str(path)!r} is a hard link to a link; {_HOSTILE}")
            os.link(root / target, link) if hard else os.symlink(target, link)
            links.append(link)
        home = self._root
        top = list(root.iterdir())
        if not top:
            raise self.refuse("is empty; make it with torchrelay archive")
        if len(top) == 1 and top[0].is_dir() and not top[0].is_symlink() and not _belongs_in_model(top[0]):
            home = self._root / top[0].name
        # All links exist now, so their targets are final.
        for link in links:
            if not _resolve(link, self.name).is_relative_to(home.resolve()):
                raise self.refuse(f"the link {link.name!r} {_LEAVES}")
            try:
                link.stat()  # a target whose name is too long fails here, and not at each later use
            except (FileNotFoundError, NotADirectoryError):  # a link may dangle
                pass
            except OSError as error:
                if error.errno != errno.ELOOP:
                    raise
                raise _link_loop(link, self.name) from None
        return home

    def _new_path(self, name: str) -> PurePosixPath:
        path = self._path(name)
        if not path.parts:
            raise self.refuse(f"an entry is named {name!r}; {_HOSTILE}")
        self._create_directory(path.parent)
        self._count_entry()
        return path

    def _create_directory(self, directory: PurePosixPath) -> None:
        for path in (*reversed(directory.parents), directory):
            if path.parts and path not in self._created:
                self._count_entry()  # directories of deep paths count too
                (self._root / path).mkdir(exist_ok=True)
                self._created.add(path)

    def _count_entry(self) -> None:
        self._count += 1
        if self._count > self._settings.max_files:
            raise self.refuse(_too_many(self._settings))

    def _path(self, name: str, is_directory: bool = False) -> PurePosixPath:
        path = PurePosixPath(name)
        if "\0" in name or "\\" in name or path.is_absolute() or ".." in path.parts:
            raise self.refuse(f"the path {name!r} leaves, or may leave, the model's directory; {_HOSTILE}")
        depth = len(path.parts) - (not is_directory)  # the last part of a file's path is no directory
        if depth > self._settings.max_depth:
            raise self.refuse(too_deep(self._settings))
        return path


class _ImageTree(_ExtractedTree):
    """The extraction of an image's layers, one after the other, of which the files below ``models/`` count.

    A file ``.wh.NAME`` of a layer hides ``NAME`` of those below it, and ``.wh..wh..opq`` all of its folder.
    """

    def includes(self, name: str) -> bool:
        parts = PurePosixPath(name).parts
        if parts in ((f"{_WHITEOUT}{_IMAGE_FOLDER}",), (f"{_WHITEOUT}{_WHITEOUT}.opq",)):
            self._count_entry()
            self._hide(PurePosixPath())
        if parts[:1] != (_IMAGE_FOLDER,):
            return False
        if not parts[-1].startswith(_WHITEOUT):
            return True
        hidden = self._path(name)
        shown = hidden.name.removeprefix(_WHITEOUT)
        if shown in ("", ".", ".."):
            raise self.refuse(f"the path {name!r} leaves the model's directory; {_HOSTILE}")
        is_opaque = shown == f"{_WHITEOUT}.opq"
        self._count_entry()  # it searches all folders so far
        self._hide(hidden.parent if is_opaque else hidden.with_name(shown))
        return False

    def _hide(self, path: PurePosixPath) -> None:
        target = self._root / path
        if not path.parts or target.is_dir():
            remove_tree(target)
            self._root.mkdir(exist_ok=True)
        else:
            target.unlink(missing_ok=True)
        self._created = {folder for folder in self._created if not folder.is_relative_to(path)}
        self._links = [link for link in self._links if not link[0].is_relative_to(path)]

    def _path(self, name: str, is_directory: bool = False) -> PurePosixPath:
        return PurePosixPath(*super()._path(name, is_directory).parts[1:])


def _extract_zip(file: BinaryIO, tree: _ExtractedTree) -> None:
    with tree.open_zip(file) as archive:
        for info in archive.infolist():
            name = info.orig_filename  # filename is cut at a NUL
            mode = info.external_attr >> 16
            kind = stat.S_IFMT(mode)
            if info.flag_bits & 0x1:
                raise tree.refuse(f"{name!r} is encrypted; archive it without a password")
            if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise tree.refuse(f"{name!r} is neither stored nor deflated; {_BROKEN}")
            if kind not in (0, stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK):
                raise tree.refuse(_SPECIAL.format(name))
            if kind == stat.S_IFLNK:
                with archive.open(info) as entry:
                    tree.link(name, os.fsdecode(entry.read(_MAX_LINK)))
            elif name.endswith("/"):
                tree.directory(name)
            else:
                with archive.open(info) as entry:
                    if tree.file(name, entry, mode) != info.file_size:
                        raise tree.refuse(f"{name!r} has another size than declared; {_BROKEN}")


def _extract_tar(file: BinaryIO, tree: _ExtractedTree) -> None:
    is_packed = file.read(2) == b"\x1f\x8b"
    file.seek(0)
    with gzip.GzipFile(fileobj=file) if is_packed else contextlib.nullcontext(file) as plain:
        reader = _LimitedReader(plain, tree)
        with tarfile.open(fileobj=reader, mode="r:", encoding="utf-8", errors="surrogateescape") as archive:
            while entry := archive.next():
                # tarfile keeps every entry, and a header packs to few bytes.
                archive.members.clear()  # type: ignore[attr-defined]
                if entry.size < 0:
                    raise tree.refuse(f"{entry.name!r} has a negative size; {_BROKEN}")
                if not tree.includes(entry.name):
                    tree.count(_BLOCK + entry.size)
                    reader.remaining = entry.size + _MAX_HEADERS
                    continue
                if entry.isreg():
                    reader.remaining = entry.size + _MAX_HEADERS
                    source = archive.extractfile(entry)
                    assert source is not None  # of a regular file
                    with source:
                        if tree.file(entry.name, source, entry.mode) != entry.size:
                            raise tree.refuse(f"{entry.name!r} is cut short; {_BROKEN}")
                elif entry.isdir():
                    tree.directory(entry.name)
                elif entry.issym() or entry.islnk():
                    tree.link(entry.name, entry.linkname, hard=entry.islnk())
                else:
                    raise tree.refuse(_SPECIAL.format(entry.name))
                reader.remaining = _MAX_HEADERS
        # tarfile stops silently at a header that it cannot read; a complete tar ends with a block of zeros.
        if reader.last != bytes(_BLOCK):
            raise tree.refuse(f"is cut short or damaged; {_BROKEN}")
        while padding := plain.read(MIB):  # read to the end, where gzip verifies its checksum
            tree.count(len(padding))


class _LimitedReader(io.RawIOBase):
    """A reader that limits tarfile, which trusts every length, to one file with its headers at a time."""

    def __init__(self, plain: Any, tree: _ExtractedTree) -> None:
        self._plain = plain
        self._tree = tree
        self.remaining = _MAX_HEADERS
        self.last = b""

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= self.remaining:
            raise self._tree.refuse(f"has a header of more than {_MAX_HEADERS} bytes; {_BROKEN}")
        self.remaining -= size
        self.last = self._plain.read(size)
        return self.last

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self._plain.seek(offset, whence)

    def tell(self) -> int:
        return self._plain.tell()


@contextlib.contextmanager
def _archive_errors(name: str) -> Iterator[None]:
    """Convert the errors of damaged or hostile archives to InvalidArchive."""
    try:
        yield
    except (zipfile.BadZipFile, tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise InvalidArchive(name, f"is damaged ({error}); {_BROKEN}") from None
    except (RuntimeError, NotImplementedError, ValueError, OverflowError) as error:
        raise InvalidArchive(name, f"cannot be read ({error}); {_BROKEN}") from None
    except OSError as error:
        if error.errno == errno.EINVAL and error.filename is None:  # zipfile seeks to a negative position
            raise InvalidArchive(name, f"is damaged (an entry lies outside the file); {_BROKEN}") from None
        if error.errno not in _ARCHIVE_ERRORS:
            raise
        what = f"has an entry that cannot be created ({error.strerror}: {error.filename})"
        raise InvalidArchive(name, f"{what}; {_BROKEN}") from None


def _walk(directory: Path, name: str, settings: ModelStoreSettings, depth: int = 0) -> Iterator[Path]:
    """Yield everything below ``directory``, each directory before its contents, sorted by name."""
    if depth > settings.max_depth:
        raise InvalidArchive(name, too_deep(settings))
    for path in sorted(directory.iterdir()):
        if "\\" in path.name or not path.name.isprintable():
            raise InvalidArchive(
                name, f"{path.name!r} has a backslash or an unprintable character in its name; rename it"
            )
        if path.name == "__pycache__":
            continue
        yield path
        if path.is_dir() and not path.is_symlink():
            yield from _walk(path, name, settings, depth + 1)


def _link_target(path: Path, home: Path, name: str) -> bytes:
    target = _resolve(path, name)
    if not target.is_relative_to(home):
        raise InvalidArchive(name, f"the link {path.name!r} {_LEAVES}")
    return os.fsencode(os.path.relpath(target, path.parent))


def _resolve(path: Path, name: str) -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError):  # which of them, and whether any, depends on Python's version
        raise _link_loop(path, name) from None


def _link_loop(link: Path, archive: str) -> InvalidArchive:
    return InvalidArchive(archive, f"the link {link.name!r} is part of a loop; remove it")


def _too_many(settings: ModelStoreSettings) -> str:
    return (
        f"holds more than max_files ({settings.max_files}) files and directories; "
        "raise it if you trust the archive"
    )
