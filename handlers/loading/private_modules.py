"""Private modules: each archive of a process has its own, so hundreds may contain an ``h.py`` with globals.

An archive's modules have names with a prefix of their own in ``sys.modules``. Their ``import`` statements
look into the archive first, because each module has builtins with an ``__import__`` of its archive. What
resolves names by other means (``importlib.import_module``, the classes of a pickle) finds the archive's
modules by their plain names in the threads of the archive, while it loads.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib
import importlib.util
import itertools
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

_numbers = itertools.count(1)
_archives: dict[str, PrivateModules] = {}  # by prefix
_current = threading.local()
_OURS = ("handlers", "serve_app")  # an archive's module of that name may import ours, too


def current() -> PrivateModules | None:
    """Return the modules of the archive whose code this thread runs; None in a process of one archive."""
    modules: PrivateModules | None = getattr(_current, "modules", None)
    return modules


class PrivateModules:
    """The modules of the archive in ``directory``.

    A name of the standard library is never the archive's. Extension modules cannot be private: importing one
    raises ImportError.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory.resolve()
        self._prefix = f"archive{next(_numbers)}_"
        self._builtins = {**vars(builtins), "__import__": self._import}
        self._roots: dict[str, bool] = {}
        _archives[self._prefix] = self
        _install_finder()

    def enter(self) -> None:
        """Let the calling thread run this archive's code from now on."""
        _current.modules = self

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Let plain names of the archive's modules be found in ``sys.modules`` in the block.

        Only one archive of a process may be in such a block.
        """
        _finder.loading = self
        try:
            yield
        finally:
            _finder.loading = None
            for name in self._names():
                plain = name.removeprefix(self._prefix)
                if sys.modules.get(plain) is sys.modules[name]:
                    del sys.modules[plain]

    def load_file(self, file: Path) -> ModuleType:
        """Return the module of a file of the archive; it runs once."""
        relative = file.resolve().relative_to(self._directory).with_suffix("")
        name = ".".join(relative.parts)
        if all("." not in part for part in relative.parts):
            return self.import_module(name)
        alias = self._prefix + name.replace(".", "_")
        if alias in sys.modules:
            return sys.modules[alias]
        spec = self._private(alias, str(file), None)
        module = sys.modules[alias] = importlib.util.module_from_spec(spec)
        assert spec.loader is not None
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[alias]
            raise
        return module

    def import_module(self, name: str) -> ModuleType:
        """Import the archive's module ``name``, or the process's own where the archive has none."""
        self._import(name, fromlist=("__name__",) if "." in name else ())
        return sys.modules.get(self._prefix + name) or sys.modules[name]

    def resolves(self, name: str) -> bool:
        """Return whether a name without an importing file is the archive's; ours are this project's."""
        return name.partition(".")[0] not in _OURS and self.has(name)

    def has(self, name: str) -> bool:
        """Return whether the first part of a module's name is the archive's."""
        root = name.partition(".")[0]
        known = self._roots.get(root)
        if known is None:
            known = self._roots[root] = (
                root not in sys.stdlib_module_names
                and PathFinder.find_spec(root, [str(self._directory)]) is not None
            )
        return known

    def close(self) -> None:
        """Remove the modules, and what they refer to, from the process."""
        del _archives[self._prefix]
        for name in self._names():
            # A module and its functions refer to each other, and collections are rare.
            vars(sys.modules.pop(name)).clear()

    def _names(self) -> list[str]:
        """Return the private names of the modules; a process has thousands of others."""
        prefix = self._prefix
        return [name for name in list(sys.modules) if name.startswith(prefix)]

    def find_spec(self, alias: str, path: Sequence[str] | None) -> ModuleSpec | None:
        """Return the spec of a module by its private name."""
        if path is None:
            found = PathFinder.find_spec(alias.removeprefix(self._prefix), [str(self._directory)])
        else:
            found = PathFinder.find_spec(alias, path)
        if found is None:
            return None
        if found.origin is None:  # a folder without __init__.py
            namespace = ModuleSpec(alias, None, is_package=True)
            namespace.submodule_search_locations = list(found.submodule_search_locations or ())
            return namespace
        return self._private(alias, found.origin, found.submodule_search_locations)

    def _private(self, alias: str, file: str, locations: list[str] | None) -> ModuleSpec:
        if file.endswith(tuple(EXTENSION_SUFFIXES)):
            raise ImportError(
                f"{file} is an extension module, and models of a pool cannot have their own; "
                "take pool out of model-config.yaml.",
                name=alias.removeprefix(self._prefix),
            )
        loader = _PrivateLoader(alias, file, self._builtins)
        spec = importlib.util.spec_from_file_location(
            alias, file, loader=loader, submodule_search_locations=locations
        )
        assert spec is not None
        return spec

    def _owns(self, name: str) -> bool:
        return name.startswith(self._prefix)

    def _import(
        self,
        name: str,
        globals: Mapping[str, Any] | None = None,
        locals: Mapping[str, Any] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        """Import for a statement in one of the archive's modules."""
        if level or not self.has(name):
            return builtins.__import__(name, globals, locals, fromlist or (), level)
        with self._plain_names(name):
            try:
                return builtins.__import__(self._prefix + name, globals, locals, fromlist or (), 0)
            except ModuleNotFoundError as error:
                if name.partition(".")[0] not in _OURS or not self._owns(str(error.name)):
                    raise
        return builtins.__import__(name, globals, locals, fromlist or (), 0)

    @contextlib.contextmanager
    def _plain_names(self, name: str) -> Iterator[None]:
        """Name modules as the archive does: in errors, and in ``sys.modules`` while it loads."""
        try:
            yield
        except ModuleNotFoundError as error:
            if error.name is None or not self._owns(error.name):
                raise
            plain = error.name.removeprefix(self._prefix)
            raise ModuleNotFoundError(f"No module named {plain!r}", name=plain) from None
        parts = name.split(".")
        if _finder.loading is self and parts[0] not in _OURS:
            for plain in (".".join(parts[:depth]) for depth in range(1, len(parts) + 1)):
                sys.modules.setdefault(plain, sys.modules[self._prefix + plain])


class _PrivateLoader(SourceFileLoader):
    """A loader of a source file whose module gets the builtins of its archive."""

    def __init__(self, name: str, path: str, names: dict[str, Any]) -> None:
        super().__init__(name, path)
        self._builtins = names

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__builtins__"] = self._builtins
        super().exec_module(module)


class _Finder(MetaPathFinder, Loader):
    """The finder of private names, and of an archive's plain names while it loads."""

    loading: PrivateModules | None = None

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        prefix, separator, _ = name.partition("_")
        if (owner := _archives.get(prefix + separator)) is not None:
            return owner.find_spec(name, path)
        modules = self.loading
        if modules is None or modules is not current() or not modules.resolves(name):
            return None
        return ModuleSpec(name, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        assert self.loading is not None
        module = self.loading.import_module(spec.name)
        spec.loader_state = module.__spec__  # the import system replaces it by the plain name's
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


_finder = _Finder()
_import_module = importlib.import_module


def _install_finder() -> None:
    if _finder in sys.meta_path:
        return
    sys.meta_path.insert(0, _finder)

    def import_module(name: str, package: str | None = None) -> ModuleType:
        modules = current()
        if modules is not None and not name.startswith(".") and modules.resolves(name):
            return modules.import_module(name)
        return _import_module(name, package)

    importlib.import_module = import_module
