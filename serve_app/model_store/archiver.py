"""Creation of archives with the layout and the manifest of torch-model-archiver 0.12."""

from __future__ import annotations

import contextlib
import errno
import glob
import io
import json
import os
import re
import shutil
import tarfile
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from handlers import FOLDER_HANDLERS, HANDLERS
from handlers.loading.pickle_scan import find_rejection_reason
from serve_app.domain.validation import did_you_mean
from serve_app.errors import ConfigurationError
from serve_app.model_store.archive import MANIFEST, ModelConfig, find_syntax_error
from serve_app.model_store.atomic_dir import sync

Format = Literal["default", "zip-store", "tgz", "no-archive"]
Runtime = Literal["python", "python3", "LSP"]
ARCHIVER = "0.12.0"  # the version in the manifests

_SUFFIX: dict[Format, str] = {"default": ".mar", "zip-store": ".mar", "tgz": ".tar.gz", "no-archive": ""}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_\-.]*")
_EXCLUDED = {"__MACOSX", "__pycache__"}


class ArchiverError(Exception):
    """An archive that cannot be created; the message has the cause and the remedy."""


@dataclass(frozen=True)
class ArchiveRecipe:
    """The contents of an archive: torch-model-archiver's options by name."""

    model_name: str
    version: str
    handler: str  # a built-in one's name, or a file, with or without .py and :function
    serialized_file: str | None = None
    model_file: str | None = None
    extra_files: str | None = None  # files, folders and patterns with commas between them
    runtime: Runtime = "python"
    export_path: str = "."
    archive_format: Format = "default"
    force: bool = False
    requirements_file: str | None = None
    config_file: str | None = None


@dataclass(frozen=True)
class WrittenArchive:
    """An archive that was written: its path, the names of its files without the manifest, and warnings."""

    path: Path
    files: tuple[str, ...]
    warnings: tuple[str, ...]


def make(recipe: ArchiveRecipe) -> WrittenArchive:
    """Write the archive of a recipe. Raises ArchiverError, and leaves no partial archive."""
    suffix = _SUFFIX[recipe.archive_format]
    path, warnings = output_path("model", recipe.model_name, suffix, recipe.export_path, recipe.force)
    files: dict[str, Path] = {}
    for name, source in _files(recipe, warnings):
        if name in files and files[name].resolve() != source.resolve():
            warnings.append(f"Two files are named {name}: {source} replaces {files[name]}")
        files[name] = source
    _write(path, recipe, files)
    return WrittenArchive(path, tuple(files), tuple(warnings))


def manifest(recipe: ArchiveRecipe) -> str:
    """Return the text of MAR-INF/MANIFEST.json."""
    model = {
        "modelName": recipe.model_name,
        "serializedFile": recipe.serialized_file,
        "handler": recipe.handler,
        "modelFile": recipe.model_file,
        "modelVersion": recipe.version,
        "requirementsFile": recipe.requirements_file,
        "configFile": recipe.config_file,
    }
    paths = ("serializedFile", "handler", "modelFile", "requirementsFile", "configFile")
    present = {
        key: os.path.basename(value) if key in paths else value for key, value in model.items() if value
    }
    return manifest_text(ARCHIVER, runtime=recipe.runtime, model=present)


# Input files


def _files(recipe: ArchiveRecipe, warnings: list[str]) -> Iterator[tuple[str, Path]]:
    """Yield each file's name in the archive and its path, after checking it."""
    if model_file := _existing_file(recipe.model_file, "--model-file"):
        _check_compiles(model_file, "--model-file")
        yield model_file.name, model_file
    if weights := _existing_file(recipe.serialized_file, "--serialized-file"):
        is_read_by_us = recipe.handler.partition(":")[0] in HANDLERS.keys() - FOLDER_HANDLERS
        if is_read_by_us and (reason := find_rejection_reason(weights, model_file is not None, trusted=True)):
            warnings.append(f"--serialized-file {weights} will be refused: {reason}")
        yield weights.name, weights
    if handler := _handler(recipe, warnings):
        yield handler.name, handler
    yield from _extra(recipe.extra_files or "", warnings)
    if requirements := _existing_file(recipe.requirements_file, "--requirements-file"):
        yield requirements.name, requirements
    if config := _existing_file(recipe.config_file, "--config-file"):
        try:
            ModelConfig.parse(config.read_bytes(), str(config))
        except ConfigurationError as error:
            raise ArchiverError(str(error)) from None
        yield config.name, config


def _existing_file(name: str | None, option: str) -> Path | None:
    if not name:
        return None
    path = Path(name)
    if path.is_file():
        return path
    if path.is_dir():
        raise ArchiverError(f"{option} {name} is a directory; name a file")
    raise ArchiverError(f"{option} {name} does not exist{_nearest(path)}")


def _handler(recipe: ArchiveRecipe, warnings: list[str]) -> Path | None:
    """Return the handler's file; None for a built-in one."""
    name = recipe.handler
    if recipe.runtime == "LSP":
        warnings.append("Models of the runtime LSP are not served by Torchrelay: there is no C++ backend")
        return (
            None
            if name in ("BaseHandler", "TorchScriptHandler")
            else _existing_file(name.partition(":")[0] + ".so", "--handler")
        )
    module = name.partition(":")[0]
    if module in HANDLERS:
        return None
    path = Path(module if module.endswith(".py") else module + ".py")
    if not path.is_file():
        near = did_you_mean(module, sorted(HANDLERS))
        hint = f"; did you mean the built-in {near}?" if near else _nearest(path)
        raise ArchiverError(f"--handler {name} is neither built in nor an existing file{hint}")
    _check_compiles(path, "--handler")
    return path


def _extra(option: str, warnings: list[str]) -> Iterator[tuple[str, Path]]:
    """Yield files by their names; of folders the contents, without the folder's own name."""
    for pattern in filter(None, (part.strip() for part in option.split(","))):
        names = sorted(glob.glob(pattern)) if glob.has_magic(pattern) else [pattern]
        if not names:
            warnings.append(f"Given wildcard pattern did not match any file: {pattern}")
        for path in map(Path, names):
            if path.is_dir():
                yield from _tree(path, path)
            elif path.is_file():
                yield path.name, path
            else:
                raise ArchiverError(f"--extra-files {path} does not exist{_nearest(path)}")


def _tree(folder: Path, top: Path) -> Iterator[tuple[str, Path]]:
    for path in sorted(folder.iterdir()):
        if path.is_file():
            yield path.relative_to(top).as_posix(), path
        elif path.is_dir() and path.name not in _EXCLUDED and not path.name.startswith("."):
            yield from _tree(path, top)


def _check_compiles(path: Path, option: str) -> None:
    if problem := find_syntax_error(path):
        raise ArchiverError(f"{option} {path}{problem}; correct the file")


def _nearest(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f": there is no folder {folder}"
    near = did_you_mean(path.name, [other.name for other in folder.glob(f"*{path.suffix}")])
    return f"; did you mean {folder / near}?" if near else f" in {folder.resolve()}"


# Output


def output_path(kind: str, name: str, suffix: str, export_path: str, force: bool) -> tuple[Path, list[str]]:
    """Return the path of a new archive, and warnings; ``kind`` is "model" or "workflow".

    Raises ArchiverError where the name or the folder cannot be used, or the archive exists without ``force``.
    """
    if not _NAME.fullmatch(name):
        raise ArchiverError(
            f"{kind.capitalize()} name contains special characters.\n"
            f"The allowed regular expression filter for {kind} name is: ^{_NAME.pattern}$"
        )
    export = Path(export_path)
    if not export.is_dir():
        raise ArchiverError(
            f"Given export-path {export_path} is not a directory. Point to a valid export-path directory."
        )
    path = export.resolve() / (name + suffix)
    if not path.exists():
        return path, []
    if not force:
        raise ArchiverError(
            f"{path} already exists.\nPlease specify --force/-f option to overwrite the {kind} archive "
            "output file.\nSee -h/--help for more details."
        )
    return path, [f"Overwriting {path} ..."]


def manifest_text(version: str, **content: Any) -> str:
    """Return the text of a manifest with ``content``, and with the date and the archiver's ``version``."""
    created = datetime.now().strftime("%d/%m/%Y %H:%M:%S")
    return json.dumps({"createdOn": created, **content, "archiverVersion": version}, indent=2)


@contextlib.contextmanager
def partial_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path whose file replaces ``path`` at the end. Raises ArchiverError for an OSError."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield partial
        sync(partial)
        partial.replace(path)
    except OSError as error:
        remedy = "name another folder with --export-path"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            remedy = f"free space there, or {remedy}"
        raise ArchiverError(f"{path} cannot be written: {error.strerror}; {remedy}") from None
    finally:
        partial.unlink(missing_ok=True)


def write_zip(
    path: Path, files: Mapping[str, Path], texts: Mapping[str, str], packing: int = zipfile.ZIP_DEFLATED
) -> None:
    """Write a zip of ``files`` and ``texts`` by their names in it. Raises ArchiverError."""
    with (
        partial_file(path) as partial,
        zipfile.ZipFile(partial, "w", packing, strict_timestamps=False) as archive,
    ):
        for name, source in files.items():
            archive.write(source, name)
        for name, text in texts.items():
            archive.writestr(name, text)


def _write(path: Path, recipe: ArchiveRecipe, files: dict[str, Path]) -> None:
    text = manifest(recipe)
    if recipe.archive_format == "no-archive":
        for name, source in files.items():
            target = path / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if not (target.exists() and target.samefile(source)):
                shutil.copy(source, target)
        (path / MANIFEST).parent.mkdir(parents=True, exist_ok=True)
        (path / MANIFEST).write_text(text)
    elif recipe.archive_format == "tgz":
        with partial_file(path) as partial, tarfile.open(partial, "w:gz") as tar:
            for name, source in files.items():
                tar.add(source.resolve(), arcname=f"{recipe.model_name}/{name}")
            entry = tarfile.TarInfo(f"{recipe.model_name}/{MANIFEST}")
            entry.size = len(text.encode())
            tar.addfile(entry, io.BytesIO(text.encode()))
    else:
        packing = zipfile.ZIP_STORED if recipe.archive_format == "zip-store" else zipfile.ZIP_DEFLATED
        write_zip(path, files, {MANIFEST: text}, packing)
