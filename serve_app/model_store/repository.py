"""A repository of models: what is in a folder or bucket, by model and version, and how each changes.

``digits/2.0/`` is version 2.0 of digits: a model's directory, or a folder with one archive. The manifest
of an archive, or of a model's directory, at the top names model and version. That of ``digits/any.mar`` names
the version. Names that begin with a period are left out.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

from handlers import tasks
from serve_app.errors import DownloadFailed
from serve_app.model_store import object_stores
from serve_app.settings import ModelStoreSettings, RepositorySettings

_SIGNATURE = ".sig"
_CONTENT_KEYS = ("ETag", "etag", "md5Hash", "blob_id", "LastModified", "mtime", "updated")

Files = dict[str, str]  # path below a folder -> a text that changes with the file's content


@dataclass(frozen=True)
class RepositoryVersion:
    """A version in the repository, with its files below the folder ``base`` of the repository.

    ``model`` and ``version`` replace the names of its manifest. It is complete where it has its marker.
    """

    url: str
    base: str
    files: Files
    model: str | None = None
    version: str | None = None
    is_complete: bool = True

    @cached_property
    def fingerprint(self) -> str:
        """A digest that changes with any of its files."""
        text = "\n".join(f"{name}\0{content}" for name, content in sorted(self.files.items()))
        return blake2b(text.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()


@dataclass(frozen=True)
class RepositoryListing:
    """The entries of a repository by URL, and the errors of parts that could not be read, by URL."""

    entries: Mapping[str, RepositoryVersion]
    problems: Mapping[str, str] = field(default_factory=dict)


class Repository:
    """A folder or a bucket with models. Its methods block."""

    def __init__(self, settings: RepositorySettings, store: ModelStoreSettings, root: Path) -> None:
        is_local = "://" not in settings.url or settings.url.startswith("file://")
        path = settings.url.removeprefix("file://")
        self.url = str((root / path).absolute()) if is_local else settings.url.rstrip("/")
        self._folder = Path(self.url) if is_local else None
        self._marker = settings.marker
        self._store = store

    def contains(self, url: str) -> bool:
        return url.startswith(f"{self.url}/")

    def list(self) -> RepositoryListing:
        """Return what the repository has now. Raises DownloadFailed where it cannot be read."""
        if self._folder is None:
            files = object_stores.list_files(self.url, self._store, _describe_object)
            problems: dict[str, str] = {}
        else:
            files, problems = _list_folder(self._folder)
        for path in [path for path in files if not path.isprintable()]:  # no document could have its name
            del files[path]
            problems[path.partition("/")[0]] = f"{path!r} has unprintable characters in its name; rename it"
        return RepositoryListing(
            {
                entry.url: entry
                for entry in sorted(self._group(files), key=lambda entry: version_order(entry.url))
            },
            {f"{self.url}/{name}": message for name, message in problems.items()},
        )

    def is_unchanged(self, entry: RepositoryVersion) -> bool:
        """Return whether the files of an entry are as they were listed. Raises DownloadFailed."""
        if self._folder is not None:
            base = self._folder / entry.base
            return all(_describe_file(base / name) == content for name, content in entry.files.items())
        if entry.url != f"{self.url}/{entry.base}":  # an archive, which is one object
            return True
        return object_stores.list_files(entry.url, self._store, _describe_object) == entry.files

    def _group(self, files: Files) -> Iterable[RepositoryVersion]:
        """Yield the entry of each model's directory and each archive among the files."""
        folders, top = _split(files)
        yield from self._archives("", top, None)
        for name, inner in folders.items():
            if _is_model(inner):
                yield self._entry(name, name, inner)
                continue
            versions, archives = _split(inner)
            yield from self._archives(name, archives, name)
            for version, contents in versions.items():
                base = place = f"{name}/{version}"
                packed = [file for file in contents if _is_archive(file)]
                if len(packed) == 1 and not _is_model(contents):
                    place = f"{base}/{packed[0]}"
                yield self._entry(place, base, contents, name, version)

    def _archives(self, base: str, files: Files, model: str | None) -> Iterable[RepositoryVersion]:
        """Yield the archives among the files of a folder."""
        for name in filter(_is_archive, files):
            marker = f"{name}.{self._marker}"
            related = {n: files[n] for n in (name, f"{name}{_SIGNATURE}", marker) if n in files}
            entry = self._entry(f"{base}/{name}".lstrip("/"), base, related, model)
            yield replace(entry, is_complete=not self._marker or marker in files)

    def _entry(
        self, place: str, base: str, files: Files, model: str | None = None, version: str | None = None
    ) -> RepositoryVersion:
        is_complete = not self._marker or self._marker in files
        return RepositoryVersion(f"{self.url}/{place}", base, files, model, version, is_complete)


def _split(files: Files) -> tuple[dict[str, Files], Files]:
    """Return the files of each folder at the top, and the files there."""
    folders: dict[str, Files] = {}
    top: Files = {}
    for path, content in files.items():
        first, slash, rest = path.partition("/")
        if first.startswith("."):
            continue
        if slash:
            folders.setdefault(first, {})[rest] = content
        else:
            top[first] = content
    return folders, top


def _is_archive(name: str) -> bool:
    return "/" not in name and name.lower().endswith(object_stores.ARCHIVES)


def _is_model(files: Files) -> bool:
    """Return whether a folder with these files is a model's directory."""
    has_script = any(file.startswith("code/") and file.endswith(".py") for file in files)
    has_manifest = any(file.startswith("MAR-INF/") for file in files)
    return has_manifest or has_script or "MLmodel" in files or tasks.is_model_folder(files)


def _describe_object(details: Mapping[str, Any]) -> str:
    content = next((str(details[key]) for key in _CONTENT_KEYS if details.get(key)), "")
    return f"{details.get('size')} {content}"


def _describe_file(path: str | Path) -> str:
    """Return a text that changes with a file; empty where there is none, or a link to nothing."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return ""
    return f"{status.st_size} {status.st_mtime_ns}"


def _list_folder(root: Path) -> tuple[Files, dict[str, str]]:
    """Return a folder's files, and the errors of its sub-folders by the name of the topmost one.

    Links to folders are followed, except to one above. Raises DownloadFailed. A topmost sub-folder with which
    there are more than ``MAX_LISTED`` files and folders is left out: links between folders multiply them.
    """
    files: Files = {}
    problems: dict[str, str] = {}
    above: dict[str, frozenset[tuple[int, int]]] = {}  # the folders on the way to each folder
    refused: set[str] = set()  # of the topmost folders
    count = 0

    def record(error: OSError) -> None:
        name = os.path.relpath(error.filename or root, root).partition(os.sep)[0]
        if name == ".":
            raise DownloadFailed(str(root), str(error.strerror))
        problems[name] = f"{error.filename!r} cannot be read: {error.strerror}"

    for folder, names, file_names in os.walk(root, onerror=record, followlinks=True):
        try:
            status = os.stat(folder)
        except OSError as error:
            record(error)
            names.clear()
            continue
        identity = status.st_dev, status.st_ino
        path = above.pop(folder, frozenset())
        is_top = Path(folder) == root or Path(folder).parent == root
        names[:] = [] if identity in path else [n for n in names if not (is_top and n.startswith("."))]
        top = os.path.relpath(folder, root).partition(os.sep)[0]
        count += len(names) + len(file_names)
        if top in refused or count > object_stores.MAX_LISTED:
            limit = f"{object_stores.MAX_LISTED:,} files and folders"
            problem = f"the repository has more than {limit} with it; are there links between its folders?"
            if top == ".":
                raise DownloadFailed(str(root), problem)
            refused.add(top)
            problems[top] = f"{os.path.join(root, top)!r} is left out: {problem}"
            files = {path: text for path, text in files.items() if not path.startswith(f"{top}{os.sep}")}
            count = len(files)
            names.clear()
            continue
        for name in names:
            above[os.path.join(folder, name)] = path | {identity}
        for name in file_names:
            file = os.path.join(folder, name)
            try:
                content = _describe_file(file)
            except OSError as error:
                record(error)
                continue
            if content:
                files[os.path.relpath(file, root)] = content
    return files, problems


def version_order(version: str) -> list[tuple[int, int, str]]:
    """Return a key that sorts versions by their numbers: 9 before 10."""
    parts = re.findall(r"\d+|[^\d._+-]+", version)
    numbers = [(1, int(part), "") if part.isdecimal() else (0, 0, part) for part in parts]
    return [*numbers, (0, 1, "")]  # 1.0 after 1.0-rc1, and before 1.0.1
