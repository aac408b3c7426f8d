"""Attributes of a handler that TorchServe does not know: ``prepare_row``, ``signature``, ``check_health``, ….

An author of TorchServe may use these names for something else. They count where a class of this package
defines them, and in a file that imports ``torchrelay`` or ``handlers``.
"""

from __future__ import annotations

import ast
import inspect
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

_OWN_PACKAGES = ("handlers", "serve_app", "torchrelay")


def get_extension(handler: Any, name: str) -> Any:
    """Return a handler's attribute of this name; None where it has none, or it is the author's own."""
    value = getattr(handler, name, None)
    return value if value is not None and _counts(handler, name) else None


def _counts(handler: Any, name: str) -> bool:
    if isinstance(handler, ModuleType):
        return _imports_torchrelay(getattr(handler, "__file__", None) or "")
    cls = type(handler)
    owner = next((base for base in cls.__mro__ if name in vars(base)), cls)
    if name in getattr(handler, "__dict__", {}):
        owner = cls
    return _is_own(owner.__module__) or _imports_torchrelay(_find_file(owner))


def _is_own(module: str) -> bool:
    """Return whether a module is one of this package; an archive may have a module ``handlers``, too."""
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    root = Path(__file__).parents[2]
    return module.partition(".")[0] in _OWN_PACKAGES and root in Path(file).parents


def _find_file(cls: type) -> str:
    for member in vars(cls).values():
        if (code := getattr(member, "__code__", None)) is not None:
            return str(code.co_filename)
    try:
        return inspect.getfile(cls)
    except (OSError, TypeError):  # a class that was made at run time
        return ""


@cache
def _imports_torchrelay(file: str) -> bool:
    try:
        tree = ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return False
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        else:
            continue
        if any(name.partition(".")[0] in _OWN_PACKAGES for name in names):
            return True
    return False
