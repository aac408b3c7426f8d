"""A loader of an archive's Python files, which identifies modules by their path on disk."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType

from handlers import extras
from handlers.errors import HandlerLoadError
from handlers.loading import archive_packages, private_modules
from handlers.loading.code_reload import find_line
from handlers.torchserve_compat.names import REPLACED

_archive_directories: set[Path] = set()  # added in this process; a server adds one


def add_archive_to_path(directory: Path) -> None:
    """Put ``directory`` first on ``sys.path``, so that the archive's files can import each other.

    Modules of archives added earlier, this one included, are removed from ``sys.modules``: their names are
    free again. ``archive_packages`` resolves the names that this project has as well.
    """
    earlier = tuple(f"{path}/" for path in _archive_directories)
    for name, module in list(sys.modules.items()) if earlier else ():
        file = getattr(module, "__dict__", {}).get("__file__")
        if isinstance(file, str) and file.startswith(earlier):
            del sys.modules[name]
    _archive_directories.add(directory)
    if str(directory) in sys.path:
        sys.path.remove(str(directory))
    sys.path.insert(0, str(directory))
    importlib.invalidate_caches()
    archive_packages.install(directory)


def load_module(file: Path) -> ModuleType:
    """Return the module in ``file``, under the file's own name where no other module has it.

    By this name, spawned processes import it, and pickles of its classes can be read elsewhere. A later
    ``import`` of the file's own name returns the same module, and a file that is already imported does not
    run again. One file is one module, so every importer gets the same classes. An error that the file raises
    is chained to a HandlerLoadError. In a process of several archives the module is private.
    """
    file = file.resolve()
    try:
        modules = private_modules.current()
        return _load_module(file) if modules is None else modules.load_file(file)
    except HandlerLoadError:
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, MemoryError):
            raise
        place = find_line(error, file.parent) or file
        raise HandlerLoadError(format_import_error(place, error)) from error


def _load_module(file: Path) -> ModuleType:
    imported = sys.modules.get(file.stem)
    if imported is not None and getattr(imported, "__file__", None) == str(file):
        return imported
    name = file.stem
    if imported is not None:
        name += f"_{hashlib.sha256(str(file.parent).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise HandlerLoadError(f"{file}: this is not a Python file; a handler or model file ends in .py.")
    module = importlib.util.module_from_spec(spec)
    # It is registered before it runs: dataclasses look up their own module, and other files of the archive
    # may import it.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


def format_import_error(place: object, error: BaseException) -> str:
    """Return a message with the reason of a failed import at ``place`` and the remedy."""
    hint = "Fix the file; the traceback above this one shows where it failed."
    package = extras.find_package(error.name) if isinstance(error, ModuleNotFoundError) else None
    if package is not None:
        hint = f"Install {package} where the model runs: {extras.install_command(package)}."
    elif isinstance(error, ModuleNotFoundError) and (root := str(error.name).partition(".")[0]) in REPLACED:
        hint = REPLACED[root]
    elif isinstance(error, ModuleNotFoundError):
        hint = (
            f"Pack {error.name} into the archive (--extra-files), name its package in the archive's "
            "requirements file, or install it where the model runs."
        )
    return f"{place}: importing it failed with {type(error).__name__}: {error}. {hint}"


def list_classes_from_module(module: ModuleType, parent_class: type | None = None) -> list[type]:
    """Return the classes that ``module`` itself defines (not those it imports), in order of their names."""
    return [
        member
        for _, member in inspect.getmembers(module, inspect.isclass)
        if member.__module__ == module.__name__ and (parent_class is None or issubclass(member, parent_class))
    ]


def import_class(class_name: str, module_prefix: str | None = None) -> type:
    """Return the class named ``package.module.Class``; ``module_prefix`` goes before the module's name."""
    module_name, _, name = (class_name or "").rpartition(".")
    path = ".".join(part for part in (module_prefix, module_name) if part)
    if not name or not path:
        raise ImportError(f"{class_name!r} names no class: write it as package.module.Class.")
    member = getattr(importlib.import_module(path), name, None)
    if member is None:
        raise ImportError(f"There is no class {name} in the module {path}.")
    return member
