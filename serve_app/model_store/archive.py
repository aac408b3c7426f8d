"""Archives, unpacked safely: ``.mar`` and ``.zip``, ``.tar.gz`` and ``.tgz``; a directory packed as a ``.mar``.

The format is read from the first bytes, never from the name. Sizes are counted while they are
written, never believed. Links are made only after every file is written, so that nothing is
ever written through one, and must end inside the model's directory.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import io
import os
import shutil
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from serve_app.errors import InvalidArchive
from serve_app.settings import MIB, StoreSettings

RATIO_FLOOR = 10 * MIB  # unpacked bytes below which no ratio makes a bomb
_HEADERS = MIB  # what a tar may say between two files; tarfile holds it in memory
_LINK = 4096  # the longest path a link may hold, in bytes
_BLOCK = 512

_BROKEN = "rebuild it with torch-model-archiver, or copy it again"
_LEAVES = "leaves the model's directory; put the file itself in"
_HOSTILE = "repack it from inside the model's directory"

# A file where another entry needs a directory, a name too long, a hard link to nothing or to a directory.
_ARCHIVES_FAULT = (errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ENOENT, errno.EPERM)


def unpack(archive: Path, into: Path, settings: StoreSettings) -> Path:
    """The model's directory: ``into``, or the one top directory that the archive holds there.

    ``into`` must not exist; it does not when this fails. Raises InvalidArchive, which names the
    archive, the entry and the cure.
    """
    with archive.open("rb") as file:
        start = file.read(4)
        if start == b"PK\x03\x04":
            read = _zip
        elif start[:2] == b"\x1f\x8b":
            read = _tar
        else:
            raise InvalidArchive(
                archive.name, "is neither a zip (.mar) nor a .tar.gz, or is empty; make one with torch-model-archiver"
            )
        file.seek(0)
        into.mkdir(parents=True)
        try:
            tree = _Tree(archive, into, settings)
            with _faults(archive.name):
                read(file, tree)
                return tree.finish()
        except BaseException:
            shutil.rmtree(into, ignore_errors=True)
            raise


def pack(directory: Path, archive: Path, settings: StoreSettings) -> None:
    """``directory`` as a stored ``.mar`` whose bytes depend on nothing but paths and contents.

    Compiled Python is left out. Links inside the directory stay links. Raises InvalidArchive
    for one that leaves it, for a device or socket, and over the store's limits.
    """
    home = directory.resolve()
    count = size = 0
    try:
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_STORED) as packed:
            for path in _walk(home, directory.name):
                count += 1
                name = path.relative_to(home).as_posix()
                mode = path.lstat().st_mode
                size += path.lstat().st_size if stat.S_ISREG(mode) else 0
                if count > settings.max_files:
                    raise InvalidArchive(directory.name, _too_many(settings))
                if size > min(settings.max_archive_bytes, settings.max_unpacked_bytes):
                    raise InvalidArchive(directory.name, "is larger than max_archive_bytes or max_unpacked_bytes")
                info = zipfile.ZipInfo(name + "/" * stat.S_ISDIR(mode))  # its date is a constant
                if stat.S_ISLNK(mode):
                    info.external_attr = (stat.S_IFLNK | 0o777) << 16
                    packed.writestr(info, _inner_link(path, home, directory.name))
                elif stat.S_ISDIR(mode):
                    info.external_attr = (stat.S_IFDIR | 0o755) << 16
                    packed.writestr(info, b"")
                elif stat.S_ISREG(mode):
                    info.external_attr = (stat.S_IFREG | (0o755 if mode & 0o111 else 0o644)) << 16
                    with path.open("rb") as source, packed.open(info, "w", force_zip64=True) as target:
                        shutil.copyfileobj(source, target, MIB)
                else:
                    raise InvalidArchive(directory.name, f"{name!r} is neither a file nor a directory; take it out")
    except BaseException:
        archive.unlink(missing_ok=True)
        raise


class _Tree:
    """One archive's entries on their way into a directory, counted as they are written."""

    def __init__(self, archive: Path, root: Path, settings: StoreSettings) -> None:
        self.name = archive.name
        self._root = root
        self._settings = settings
        self._packed = archive.stat().st_size
        self._written = 0
        self._made: set[PurePosixPath] = set()
        self._count = 0
        self._links: list[tuple[PurePosixPath, str, bool]] = []

    def refuse(self, what: str) -> InvalidArchive:
        return InvalidArchive(self.name, what)

    def directory(self, name: str) -> None:
        self._make(self._path(name))

    def file(self, name: str, source: BinaryIO, mode: int) -> int:
        """Write one file; returns its size in bytes."""
        path = self._place(name)
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
        """Note a link, to be made when all files are there; its parents are made now, so none of them is a link."""
        self._links.append((self._place(name), str(self._path(target)) if hard else target, hard))

    def count(self, size: int) -> None:
        """Take note of ``size`` more unpacked bytes."""
        self._written += size
        limits = self._settings
        if self._written > limits.max_unpacked_bytes:
            limit = limits.max_unpacked_bytes
            raise self.refuse(f"unpacks to more than max_unpacked_bytes ({limit}); raise it if you trust the archive")
        if self._written > RATIO_FLOOR and self._written > limits.max_ratio * self._packed:
            raise self.refuse(
                f"unpacks to more than {limits.max_ratio:g} times its size (max_ratio): a zip bomb; "
                "store what compresses so well uncompressed (--archive-format zip-store)"
            )

    def finish(self) -> Path:
        """Make the links, and return the model's directory."""
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
            raise self.refuse("is empty; make it with torch-model-archiver")
        if len(top) == 1 and top[0].is_dir() and not top[0].is_symlink() and top[0].name != "MAR-INF":
            home = self._root / top[0].name
        # Only now does every link lead where it will lead.
        for link in links:
            if not _resolved(link, self.name).is_relative_to(home.resolve()):
                raise self.refuse(f"the link {link.name!r} {_LEAVES}")
        return home

    def _place(self, name: str) -> PurePosixPath:
        path = self._path(name)
        if not path.parts:
            raise self.refuse(f"an entry is named {name!r}; {_HOSTILE}")
        self._make(path.parent)
        self._one_more()
        return path

    def _make(self, directory: PurePosixPath) -> None:
        for path in (*reversed(directory.parents), directory):
            if path.parts and path not in self._made:
                self._one_more()  # deep paths cost directories, so they count
                (self._root / path).mkdir(exist_ok=True)
                self._made.add(path)

    def _one_more(self) -> None:
        self._count += 1
        if self._count > self._settings.max_files:
            raise self.refuse(_too_many(self._settings))

    def _path(self, name: str) -> PurePosixPath:
        path = PurePosixPath(name)
        if "\0" in name or "\\" in name or path.is_absolute() or ".." in path.parts:
            raise self.refuse(f"the path {name!r} leads, or may lead, out of the model's directory; {_HOSTILE}")
        return path


def _zip(file: BinaryIO, tree: _Tree) -> None:
    with zipfile.ZipFile(file) as archive:
        for info in archive.infolist():
            name = info.orig_filename  # filename is cut at a NUL
            mode = info.external_attr >> 16
            kind = stat.S_IFMT(mode)
            if info.flag_bits & 0x1:
                raise tree.refuse(f"{name!r} is encrypted; archive it without a password")
            if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise tree.refuse(f"{name!r} is neither stored nor deflated; {_BROKEN}")
            if kind not in (0, stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK):
                raise tree.refuse(f"{name!r} is neither a file nor a directory; take it out")
            if kind == stat.S_IFLNK:
                with archive.open(info) as entry:
                    tree.link(name, os.fsdecode(entry.read(_LINK)))
            elif name.endswith("/"):
                tree.directory(name)
            else:
                with archive.open(info) as entry:
                    if tree.file(name, entry, mode) != info.file_size:
                        raise tree.refuse(f"{name!r} is not as long as it says; {_BROKEN}")


def _tar(file: BinaryIO, tree: _Tree) -> None:
    with gzip.GzipFile(fileobj=file) as plain:
        meter = _Meter(plain, tree)
        with tarfile.open(fileobj=meter, mode="r:", encoding="utf-8", errors="surrogateescape") as archive:
            while entry := archive.next():
                if entry.isreg():
                    meter.left = entry.size + _HEADERS
                    with archive.extractfile(entry) as source:
                        if tree.file(entry.name, source, entry.mode) != entry.size:
                            raise tree.refuse(f"{entry.name!r} is cut short; {_BROKEN}")
                elif entry.isdir():
                    tree.directory(entry.name)
                elif entry.issym() or entry.islnk():
                    tree.link(entry.name, entry.linkname, hard=entry.islnk())
                else:
                    raise tree.refuse(f"{entry.name!r} is neither a file nor a directory; take it out")
                meter.left = _HEADERS
        # tarfile stops without a word at a header that it cannot read; a whole tar ends with a block of zeros.
        if meter.last != bytes(_BLOCK):
            raise tree.refuse(f"is cut short or damaged; {_BROKEN}")
        while padding := plain.read(MIB):  # to the end, where gzip compares its checksum
            tree.count(len(padding))


class _Meter(io.RawIOBase):
    """A tar's bytes for tarfile, which believes every length: no more at once than one file's, and its headers'."""

    def __init__(self, plain: gzip.GzipFile, tree: _Tree) -> None:
        self._plain = plain
        self._tree = tree
        self.left = _HEADERS
        self.last = b""

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= self.left:
            raise self._tree.refuse(f"has a header of more than {_HEADERS} bytes; {_BROKEN}")
        self.left -= size
        self.last = self._plain.read(size)
        return self.last

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self._plain.seek(offset, whence)

    def tell(self) -> int:
        return self._plain.tell()


@contextlib.contextmanager
def _faults(name: str) -> Iterator[None]:
    """What a damaged or hostile archive makes the libraries raise, as InvalidArchive."""
    try:
        yield
    except (zipfile.BadZipFile, tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise InvalidArchive(name, f"is damaged ({error}); {_BROKEN}") from None
    except (RuntimeError, NotImplementedError, ValueError, OverflowError) as error:
        raise InvalidArchive(name, f"cannot be read ({error}); {_BROKEN}") from None
    except OSError as error:
        if error.errno not in _ARCHIVES_FAULT:
            raise
        what = f"has an entry that cannot be made ({error.strerror}: {error.filename})"
        raise InvalidArchive(name, f"{what}; {_BROKEN}") from None


def _walk(directory: Path, name: str) -> Iterator[Path]:
    """Everything below ``directory``, each directory before its contents, in the order of the names."""
    for path in sorted(directory.iterdir()):
        if "\\" in path.name or not path.name.isprintable():
            raise InvalidArchive(name, f"{path.name!r} has a backslash or an unprintable letter in its name; rename it")
        if path.name == "__pycache__":
            continue
        yield path
        if path.is_dir() and not path.is_symlink():
            yield from _walk(path, name)


def _inner_link(path: Path, home: Path, name: str) -> bytes:
    target = _resolved(path, name)
    if not target.is_relative_to(home):
        raise InvalidArchive(name, f"the link {path.name!r} {_LEAVES}")
    return os.fsencode(os.path.relpath(target, path.parent))


def _resolved(path: Path, name: str) -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError):  # which of them depends on Python's version
        raise InvalidArchive(name, f"the link {path.name!r} leads in a circle; take it out") from None


def _too_many(settings: StoreSettings) -> str:
    return f"holds more than max_files ({settings.max_files}) files and directories; raise it if you trust the archive"
