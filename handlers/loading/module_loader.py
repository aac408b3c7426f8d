"""An archive's Python files as modules: loaded by their place on disk, never by a name that others share."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType

from handlers.errors import HandlerLoadError

_archives: set[Path] = set()  # opened in this process; a server opens one


def open_archive(directory: Path) -> None:
    """Let the archive's files import each other: ``directory`` goes to the front of ``sys.path``.

    The files of an archive opened before, this one too, are forgotten as modules: their names are free again.
    """
    for name, module in list(sys.modules.items()) if _archives else ():
        file = getattr(module, "__dict__", {}).get("__file__")
        if isinstance(file, str) and Path(file).parent in _archives:
            del sys.modules[name]
    _archives.add(directory)
    if str(directory) in sys.path:
        sys.path.remove(str(directory))
    sys.path.insert(0, str(directory))
    importlib.invalidate_caches()


def load_source(file: Path) -> ModuleType:
    """The module in ``file``, under a name that no other archive's module has.

    A later ``import`` of the file's own name gives this same module, and a file that is imported
    already is not run again: one file, one module, so that its classes are the same for everybody.
    What the file raises is chained to a HandlerLoadError.
    """
    file = file.resolve()
    known = sys.modules.get(file.stem)
    if known is not None and getattr(known, "__file__", None) == str(file):
        return known
    name = f"{file.stem}_{hashlib.sha256(str(file.parent).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise HandlerLoadError(f"{file}: this is not a Python file; a handler or model file ends in .py.")
    module = importlib.util.module_from_spec(spec)
    # Under both names before it runs: its dataclasses look themselves up, and its siblings may import it.
    sys.modules[name] = module
    if known is None:
        sys.modules[file.stem] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        sys.modules.pop(name, None)
        if known is None:
            sys.modules.pop(file.stem, None)
        if isinstance(error, (Exception, SystemExit)) and not isinstance(error, MemoryError):
            raise HandlerLoadError(failure(file, error)) from error
        raise
    return module


def failure(place: object, error: BaseException) -> str:
    """One sentence on why the code at ``place`` could not be imported, and what to do."""
    cure = "Mend the file; the traceback above this one shows where it failed."
    if isinstance(error, ModuleNotFoundError):
        cure = (
            f"Pack {error.name} into the archive (--extra-files), name its package in the archive's requirements file, "
            "or install it where the model runs."
        )
    return f"{place}: importing it failed with {type(error).__name__}: {error}. {cure}"


def list_classes_from_module(module: ModuleType, parent_class: type | None = None) -> list[type]:
    """The classes that ``module`` itself defines (not those it imports), in order of their names."""
    return [
        member
        for _, member in inspect.getmembers(module, inspect.isclass)
        if member.__module__ == module.__name__ and (parent_class is None or issubclass(member, parent_class))
    ]


def import_class(class_name: str, module_prefix: str | None = None) -> type:
    """The class named ``package.module.Class``; ``module_prefix`` goes before the module's name."""
    module_name, _, name = (class_name or "").rpartition(".")
    path = ".".join(part for part in (module_prefix, module_name) if part)
    if not name or not path:
        raise ImportError(f"{class_name!r} names no class: write it as package.module.Class.")
    found = getattr(importlib.import_module(path), name, None)
    if found is None:
        raise ImportError(f"There is no class {name} in the module {path}.")
    return found
