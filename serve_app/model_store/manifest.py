"""The manifest of an archive, ``MAR-INF/MANIFEST.json``."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from serve_app.errors import InvalidArchive

MAX_DOCUMENT_BYTES = 1 << 20  # of a manifest, a configuration or a specification
MANIFEST = "MAR-INF/MANIFEST.json"
CONFIG = "model-config.yaml"
HUGGING_FACE = "huggingface"  # the handler of a model folder


@dataclass(frozen=True)
class Manifest:
    """An archive's manifest; None where it names no such file."""

    archive: str  # the archive's file name, for messages
    model_name: str
    version: str = "1.0"
    handler: str = ""  # a built-in name, or file[.py][:function]
    runtime: str = "python"
    serialized_file: str | None = None
    model_file: str | None = None
    requirements_file: str | None = None
    config_file: str | None = None
    extensions: tuple[str, ...] = ()
    raw: Mapping[str, Any] = field(default_factory=dict)  # the whole document; empty where there is no file

    @property
    def is_code(self) -> bool:
        """Return whether the model is an archive, which is code, and not files without a manifest."""
        return bool(self.raw)

    @classmethod
    def read(cls, directory: Path, archive: str, default_handler: str = "") -> Manifest:
        """Return the manifest of an unpacked model, with TorchServe's defaults for older or missing ones.

        A Hugging Face model folder needs none: its handler is ``huggingface``. ``archive`` is the archive's
        file name, whose stem is the default name of the model.
        """
        name = archive_stem(archive)
        try:
            text = read_document(directory / MANIFEST, archive, MANIFEST)
        except FileNotFoundError:
            config = CONFIG if (directory / CONFIG).is_file() else None
            if is_model_folder(directory) or (not default_handler and (directory / "config.json").is_file()):
                default_handler = HUGGING_FACE  # its check reports missing files
            return cls(archive, name, handler=default_handler, config_file=config)
        try:
            raw = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InvalidArchive(archive, f"{MANIFEST} is not JSON ({error}); {_REBUILD}") from None
        model = raw.get("model") if isinstance(raw, dict) else None
        if not isinstance(model, dict):
            raise InvalidArchive(archive, f'{MANIFEST} has no object "model"; {_REBUILD}')

        def text_of(key: str, where: Mapping[str, Any] = model) -> str | None:
            value = where.get(key)
            if isinstance(value, (str, int, float)) and not isinstance(value, bool):
                return str(value) or None
            if value is None:
                return None
            raise InvalidArchive(archive, f'{MANIFEST}: "{key}" is {value!r} and must be text; {_REBUILD}')

        extensions = model.get("extensions") or ()
        return cls(
            archive=archive,
            model_name=text_of("modelName") or name,
            version=text_of("modelVersion") or "1.0",
            handler=text_of("handler") or default_handler,
            runtime=text_of("runtime", raw) or "python",
            serialized_file=text_of("serializedFile"),
            model_file=text_of("modelFile"),
            requirements_file=text_of("requirementsFile"),
            config_file=text_of("configFile"),
            extensions=tuple(extensions.split(",") if isinstance(extensions, str) else map(str, extensions)),
            raw=raw,
        )


_REBUILD = "rebuild the archive with torch-model-archiver"


def read_document(path: Path, archive: str, name: str) -> bytes:
    """Return the contents of an archive's file ``name`` that is to be parsed.

    Raises FileNotFoundError, and InvalidArchive where it is larger than 1 MiB or cannot be read.
    """
    try:
        with path.open("rb") as file:
            text = file.read(MAX_DOCUMENT_BYTES + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise InvalidArchive(archive, f"{name} cannot be read ({error.strerror}); {_REBUILD}") from None
    if len(text) > MAX_DOCUMENT_BYTES:
        raise InvalidArchive(
            archive, f"{name} is larger than {MAX_DOCUMENT_BYTES} bytes; keep data in files of their own"
        )
    return text


def is_model_folder(directory: Path) -> bool:
    """Return whether this directory is a Hugging Face model: config.json and weights."""
    from handlers import tasks  # late: reading a manifest needs no handler

    return directory.is_dir() and tasks.is_model_folder(path.name for path in directory.iterdir())


def handler_file(directory: Path, handler: str) -> Path | None:
    """Return the model's file for ``handler`` (``name`` or ``name.py``, each with ``:function``), or None.

    As in TorchServe, a file of the model takes precedence over a built-in handler of the same name, and the
    last part of a path is enough, because archivers flatten folders.
    """
    path = PurePosixPath(handler_module(handler))
    inside = path.parts and not path.is_absolute() and ".." not in path.parts
    for candidate in (path, path.name) if inside else (path.name,):
        file = directory / f"{candidate}.py"
        if path.name and file.is_file():
            return file
    return None


def find_syntax_error(file: Path, hint: str = "") -> str:
    """Return why ``file`` is not Python, as the text after its name; empty where it compiles.

    ``hint`` is added to a syntax error.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about the author's code are not reported
            compile(file.read_bytes(), file.name, "exec", dont_inherit=True)
    except SyntaxError as error:
        return f", line {error.lineno}: {error.msg}{hint}"
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        return f" is not Python ({error})"
    return ""


def archive_stem(archive: str) -> str:
    """Return a model's name from its archive's: ``digits`` from ``digits.mar`` or ``digits.tar.gz``."""
    return re.sub(r"\.(mar|zip|tar\.gz|tgz)$", "", archive, flags=re.IGNORECASE)


def handler_module(handler: str) -> str:
    return handler.partition(":")[0].removesuffix(".py")


def resolve_file(directory: Path, manifest: Manifest, name: str) -> Path:
    """Return the file ``name`` of the model. Raises InvalidArchive where it is missing or outside."""
    path = find_inside(directory, name)
    if path is None:
        problem = f"{name!r} is named but not in the archive; add it, or correct its name"
        raise InvalidArchive(manifest.archive, problem)
    return path


def find_inside(directory: Path, name: str) -> Path | None:
    """Return the existing path ``name`` below ``directory``; None where it is missing or outside."""
    home = directory.resolve()
    try:
        path = (home / name).resolve()
        return path if home in path.parents and path.exists() else None
    except (OSError, RuntimeError, ValueError):  # a loop of links, a NUL, a name too long
        return None
