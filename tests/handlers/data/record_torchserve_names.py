"""Writes torchserve_names.json: every public name of TorchServe's Python package, with its parameters.

    python tests/handlers/data/record_torchserve_names.py SITE_PACKAGES/ts

Read from its source, which is not run (that of 0.12.0 wrote the file that is here). A function has its parameters; a
class its public methods and theirs, null for an attribute; what a module has of another is "imported", the rest null.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NOT_FOR_HANDLERS = {"unit_tests", "built-in"}


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Those of a module, and those under its conditions."""
    for node in body:
        yield node
        if isinstance(node, (ast.If, ast.Try)):
            yield from statements([*node.body, *node.orelse])
        if isinstance(node, ast.Try):
            for handler in node.handlers:
                yield from statements(handler.body)


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    spec = function.args
    starred = [f"*{spec.vararg.arg}"] if spec.vararg else []
    keywords = [f"**{spec.kwarg.arg}"] if spec.kwarg else []
    return [arg.arg for arg in spec.args] + starred + [arg.arg for arg in spec.kwonlyargs] + keywords


def assigned(node: ast.Assign) -> list[str]:
    return [target.id for target in node.targets if isinstance(target, ast.Name)]


def members(cls: ast.ClassDef) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for node in cls.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            decorators = {getattr(one, "id", getattr(one, "attr", "")) for one in node.decorator_list}
            found[node.name] = None if decorators & {"property", "setter"} else parameters(node)[1:]
        elif isinstance(node, ast.Assign):
            found |= dict.fromkeys(assigned(node))
    return {name: value for name, value in found.items() if not name.startswith("_") or name == "__init__"}


def names(source: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for node in statements(ast.parse(source).body):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found[node.name] = parameters(node)
        elif isinstance(node, ast.ClassDef):
            found[node.name] = members(node)
        elif isinstance(node, ast.Assign):
            found |= dict.fromkeys(assigned(node))
        elif isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").split(".")[0] == "ts"):
            for alias in node.names:
                found.setdefault(alias.asname or alias.name, "imported")
    return {name: value for name, value in found.items() if not name.startswith("_") or name == "__version__"}


if __name__ == "__main__":
    root = Path(sys.argv[1])
    modules = {}
    for file in sorted(root.rglob("*.py")):
        parts = file.relative_to(root.parent).with_suffix("").parts
        if not NOT_FOR_HANDLERS & set(parts):
            modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = names(file.read_text())
    text = json.dumps(modules, indent=0, sort_keys=True)
    Path(__file__).with_name("torchserve_names.json").write_text(text + "\n")
