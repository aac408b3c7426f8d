"""Imports of an archive's packages that have the name of one of this project's packages.

An archive may contain a package ``handlers`` or ``serve_app``, and the replica's process has imported its
own. The archive's modules are imported under another name, ``archive_handlers``. An ``import`` in one of the
archive's files returns the archive's module, or ours where the archive has none. An ``import`` in any other
file, this project's own among them, is not affected.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

ROOTS = ("handlers", "serve_app")
_import = builtins.__import__
_installed: ArchivePackages | None = None


def install(directory: Path) -> None:
    """Resolve the names of ``ROOTS`` for the archive in ``directory``, and for no earlier archive."""
    global _installed
    if _installed is not None:
        _installed.uninstall()
        _installed = None
    roots = [root for root in ROOTS if PathFinder.find_spec(root, [str(directory)]) is not None]
    if roots:
        _installed = ArchivePackages(directory, roots)


def import_module(name: str) -> ModuleType:
    """Import the archive's module ``name``, or the process's own where the archive has none."""
    if _installed is not None and _installed.has_root(name):
        return _installed.import_module(name)
    return importlib.import_module(name)


class ArchivePackages(MetaPathFinder, Loader):
    """The packages of one archive among ``ROOTS``, and the two hooks that resolve their names.

    ``builtins.__import__`` identifies the importing file; only the archive's own files see its packages. The
    finder serves what has no importing file, such as the classes of a pickle: it returns the archive's
    module for a name that our package lacks.
    """

    def __init__(self, directory: Path, roots: Sequence[str]) -> None:
        self._directory = str(directory)
        self._prefixes = tuple({f"{path}/" for path in (directory, directory.resolve())})
        self._roots = frozenset(roots)
        builtins.__import__ = self._import_for_caller
        sys.meta_path.insert(0, self)

    def uninstall(self) -> None:
        """Remove both hooks and the archive's modules."""
        builtins.__import__ = _import
        sys.meta_path.remove(self)
        aliases = {_alias(root) for root in self._roots}
        for name, module in list(sys.modules.items()):
            if getattr(module, "__name__", "").partition(".")[0] in aliases:
                del sys.modules[name]

    def has_root(self, name: str) -> bool:
        return name.partition(".")[0] in self._roots

    def import_module(self, name: str) -> ModuleType:
        """Import the archive's module ``name``, or ours where the archive has none."""
        alias = _alias(name)
        try:
            return importlib.import_module(alias)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{alias}.".startswith(f"{error.name}."):
                raise  # a package that the archive's module needs
        module = importlib.import_module(name)
        parent = importlib.import_module(_alias(name.partition(".")[0]))
        path = name.split(".")
        for depth in range(2, len(path) + 1):
            if path[depth - 1] not in vars(parent):
                setattr(parent, path[depth - 1], sys.modules[".".join(path[:depth])])
            parent = getattr(parent, path[depth - 1])
        return module

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of an archive's module, by its alias or by a name that our package lacks."""
        if name in map(_alias, self._roots):
            return self._find_root(name)
        if path is None or not self.has_root(name) or PathFinder.find_spec(name, path) is not None:
            return None
        try:
            found = importlib.util.find_spec(_alias(name))
        except ModuleNotFoundError:
            return None
        return ModuleSpec(name, self) if found is not None else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(_alias(spec.name))
        spec.loader_state = module.__spec__  # the import system replaces it by the new name's
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state

    def _find_root(self, alias: str) -> ModuleSpec | None:
        spec = PathFinder.find_spec(alias.removeprefix(_alias("")), [self._directory])
        if spec is None or spec.origin is None:  # a folder without __init__.py
            namespace = ModuleSpec(alias, None, is_package=True)
            namespace.submodule_search_locations = list(spec.submodule_search_locations or ()) if spec else []
            return namespace
        return importlib.util.spec_from_file_location(
            alias, spec.origin, submodule_search_locations=spec.submodule_search_locations
        )

    def _import_for_caller(
        self,
        name: str,
        globals: Mapping[str, Any] | None = None,
        locals: Mapping[str, Any] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        if level or not self.has_root(name) or not self._is_in_archive(globals):
            return _import(name, globals, locals, fromlist or (), level)
        module = self.import_module(name)
        if not fromlist:
            return importlib.import_module(_alias(name.partition(".")[0]))
        for attribute in fromlist:
            if attribute != "*" and attribute not in vars(module):
                self._add_attribute(module, name, attribute)
        return module

    def _is_in_archive(self, globals: Mapping[str, Any] | None) -> bool:
        file = (globals or {}).get("__file__")
        return isinstance(file, str) and file.startswith(self._prefixes)

    def _add_attribute(self, module: ModuleType, name: str, attribute: str) -> None:
        """Set a submodule, or our package's ``attribute``, on the archive's ``module``."""
        if hasattr(module, "__path__"):
            try:
                self.import_module(f"{name}.{attribute}")
                return
            except ModuleNotFoundError as error:
                if error.name != f"{name}.{attribute}":
                    raise
        ours = importlib.import_module(name)  # the archive's own where we have no such module
        if ours is not module and hasattr(ours, attribute):
            setattr(module, attribute, getattr(ours, attribute))


def _alias(name: str) -> str:
    return f"archive_{name}"
