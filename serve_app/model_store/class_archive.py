"""Archives of model classes: the class's file, the files beside it that it imports, and its options."""

from __future__ import annotations

import ast
import contextlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from handlers.errors import HandlerLoadError
from handlers.loading.class_inspection import ClassDescription, inspect_file
from serve_app.domain import validation
from serve_app.errors import ConfigurationError
from serve_app.model_store.archive import CONFIG, convert_options, find_syntax_error, parse_options
from serve_app.model_store.archiver import ArchiveRecipe, ArchiverError

_REQUIREMENTS = "requirements.txt"
_SAMPLES = "samples"


@dataclass(frozen=True)
class ClassFile:
    """A file with a model class: ``model.py`` or ``model.py:ClassName``."""

    path: Path
    class_name: str = ""

    @classmethod
    def parse(cls, target: str) -> ClassFile:
        """Return the file and the class that ``target`` names. Raises ArchiverError."""
        name, _, class_name = target.partition(":")
        path = Path(name)
        if not path.is_file():
            raise ArchiverError(
                f"{path} does not exist; name a Python file, as model.py or model.py:ClassName"
            )
        return cls(path.resolve(), class_name)

    @property
    def handler(self) -> str:
        return f"{self.path}:{self.class_name}" if self.class_name else str(self.path)

    def inspect(self) -> ClassDescription:
        """Describe the class. Raises ArchiverError with file, line and remedy."""
        if problem := find_syntax_error(self.path):
            raise ArchiverError(f"{self.path}{problem}; correct the file")
        try:
            return inspect_file(self.path, self.class_name)
        except HandlerLoadError as error:
            raise ArchiverError(str(error)) from None


@contextlib.contextmanager
def class_recipe(
    file: ClassFile,
    recipe: ArchiveRecipe,
    description: ClassDescription,
    extra_config: Mapping[str, Any] | None = None,
    whole_folder: bool = False,
) -> Iterator[ArchiveRecipe]:
    """Yield ``recipe`` with the class as its handler, for ``archiver.make`` inside the block.

    It has the local files that the class imports, or all of its folder, and ``samples/``,
    ``requirements.txt`` and ``model-config.yaml`` beside it. The configuration has the options of the
    decorator, which the file's own keys and then ``extra_config`` replace. Raises ArchiverError.
    """
    folder = file.path.parent
    with tempfile.TemporaryDirectory(prefix="torchrelay-") as temporary:
        staging = Path(temporary) / "files"
        staging.mkdir()
        for path in [] if whole_folder else find_local_imports(file.path):
            _copy(path, staging / path.relative_to(folder))
        if not whole_folder and (folder / _SAMPLES).is_dir():
            _copy(folder / _SAMPLES, staging / _SAMPLES)
        extra = [str(folder)] if whole_folder else [str(staging)]
        source = Path(recipe.config_file) if recipe.config_file else folder / CONFIG
        config = {**_merge(source, description, recipe.config_file is not None), **(extra_config or {})}
        if config:
            (Path(temporary) / CONFIG).write_text(yaml.safe_dump(config, sort_keys=False))
        requirements = folder / _REQUIREMENTS
        yield replace(
            recipe,
            handler=file.handler,
            extra_files=",".join([*extra, *filter(None, [recipe.extra_files])]),
            config_file=str(Path(temporary) / CONFIG) if config else None,
            requirements_file=recipe.requirements_file
            or (str(requirements) if requirements.is_file() else None),
        )


def find_local_imports(file: Path) -> list[Path]:
    """Return the files and packages beside ``file`` that it imports, directly or through each other."""
    folder = file.parent
    found: dict[Path, None] = {}
    pending = [file]
    while pending:
        for name in _imported_names(pending.pop()):
            for path in (folder / f"{name}.py", folder / name):
                if path in found or path == file or not (path.is_file() or _is_package(path)):
                    continue
                found[path] = None
                pending += sorted(path.rglob("*.py")) if path.is_dir() else [path]
    return list(found)


def _imported_names(file: Path) -> set[str]:
    """Return the first parts of the names that a file imports."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return set()
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names


def _is_package(path: Path) -> bool:
    return path.is_dir() and any(path.glob("*.py"))


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    else:
        shutil.copyfile(source, target)


def _merge(source: Path, description: ClassDescription, is_named: bool) -> dict[str, Any]:
    """Return the decorator's options with the keys of the file ``source`` over them."""
    try:
        config = convert_options(description.options, description.place)
        if source.is_file():
            parse_options(own := validation.parse_yaml(source.read_bytes()), str(source))
            config |= own
        elif is_named:
            raise ArchiverError(f"--config-file {source} does not exist; correct its name")
    except ConfigurationError as error:
        raise ArchiverError(str(error)) from None
    except validation.DocumentError as error:
        raise ArchiverError(f"{source}: {error}") from None
    return config
