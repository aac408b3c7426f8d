"""Writes torchserve_names.json: TorchServe's public names with their parameters.

    python -m tests.recorders.torchserve_names SITE_PACKAGES/ts

They are read from its source, which is not run; the stored file is that of 0.12.0. A function has its
parameters, and a class its public methods with theirs, or null for an attribute. A name imported from another
module is "imported"; any other name is null.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[1] / "handlers/data"
NOT_FOR_HANDLERS = {"unit_tests", "built-in"}


def iter_statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module, and those under its conditions."""
    for node in body:
        yield node
        if isinstance(node, (ast.If, ast.Try)):
            yield from iter_statements([*node.body, *node.orelse])
        if isinstance(node, ast.Try):
            for handler in node.handlers:
                yield from iter_statements(handler.body)


def list_parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    spec = function.args
    starred = [f"*{spec.vararg.arg}"] if spec.vararg else []
    keywords = [f"**{spec.kwarg.arg}"] if spec.kwarg else []
    return [arg.arg for arg in spec.args] + starred + [arg.arg for arg in spec.kwonlyargs] + keywords


def list_assigned_names(node: ast.Assign) -> list[str]:
    return [target.id for target in node.targets if isinstance(target, ast.Name)]


def read_class(cls: ast.ClassDef) -> dict[str, Any]:
    names: dict[str, Any] = {}
    for node in cls.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            decorators = {
                getattr(decorator, "id", getattr(decorator, "attr", "")) for decorator in node.decorator_list
            }
            names[node.name] = None if decorators & {"property", "setter"} else list_parameters(node)[1:]
        elif isinstance(node, ast.Assign):
            names |= dict.fromkeys(list_assigned_names(node))
    return {name: value for name, value in names.items() if not name.startswith("_") or name == "__init__"}


def read_module(source: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    for node in iter_statements(ast.parse(source).body):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            names[node.name] = list_parameters(node)
        elif isinstance(node, ast.ClassDef):
            names[node.name] = read_class(node)
        elif isinstance(node, ast.Assign):
            names |= dict.fromkeys(list_assigned_names(node))
        elif isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").split(".")[0] == "ts"):
            for alias in node.names:
                names.setdefault(alias.asname or alias.name, "imported")
    return {name: value for name, value in names.items() if not name.startswith("_") or name == "__version__"}


if __name__ == "__main__":
    root = Path(sys.argv[1])
    modules = {}
    for file in sorted(root.rglob("*.py")):
        parts = file.relative_to(root.parent).with_suffix("").parts
        if not NOT_FOR_HANDLERS & set(parts):
            modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = read_module(
                file.read_text()
            )
    text = json.dumps(modules, indent=0, sort_keys=True)
    DATA / "torchserve_names.json".write_text(text + "\n")
