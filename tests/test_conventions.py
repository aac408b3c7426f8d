"""Conventions that no linter checks: unique class names, file lengths, module names and vocabulary."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("serve_app", "handlers")
FOLDERS = (*PACKAGES, "tests", "examples")
MAX_LINES = 450

SOURCES = sorted(
    path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py") if "_pb2" not in path.name
)
PAGES = sorted(
    page
    for page in (
        *ROOT.glob("*.md"),
        *(p for f in (*FOLDERS, "configs", "cluster") for p in (ROOT / f).rglob("*.md")),
    )
    if page.name != "CODE_OF_CONDUCT.md"
)
OF_SOURCE = pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
OF_PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))

VAGUE_MODULES = {"helper", "helpers", "utils", "util", "common", "misc", "processor"}

# Words of an earlier private vocabulary, each with a standard term in its place.
COINED = {
    "door": "protocol, route or service",
    "doors": "protocols, routes or services",
    "hop": "Unix-socket transport",
    "hops": "Unix-socket transport",
    "keeper": "control API, leader",
    "ledger": "state store",
    "vitals": "replica health",
    "patience": "timeout",
    "strata": "stratified test",
    "deferral": "async prediction",
    "deferrals": "async predictions",
    "whoever": "client, caller, user",
}
COINED_IDENTIFIERS = {*COINED, "told", "said", "asked", "heard"}
_COINED_PROSE = re.compile(
    rf"(?<![\w`./-])({'|'.join(COINED)}|(?:is|are|was|were|be|been) (?:told|said|asked|heard))(?![\w`/-])",
    re.IGNORECASE,
)
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def identifiers(tree: ast.Module) -> set[str]:
    """Return every name that the module defines or uses."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.arg | ast.keyword):
            names.add(node.arg or "")
    return names


def docstrings(tree: ast.Module) -> list[str]:
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    return [text for node in ast.walk(tree) if isinstance(node, kinds) and (text := ast.get_docstring(node))]


def test_each_class_name_is_defined_once() -> None:
    places = defaultdict(list)
    for path in SOURCES:
        if path.relative_to(ROOT).parts[0] in PACKAGES:
            for node in ast.walk(tree_of(path)):
                if isinstance(node, ast.ClassDef):
                    places[node.name].append(str(path.relative_to(ROOT)))
    assert not {name: found for name, found in places.items() if len(found) > 1}


@OF_SOURCE
def test_a_file_has_at_most_450_lines(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_LINES


@OF_SOURCE
def test_no_module_has_a_vague_name(path: Path) -> None:
    assert not VAGUE_MODULES & set(path.relative_to(ROOT).with_suffix("").parts)


@OF_SOURCE
def test_identifiers_use_standard_terms(path: Path) -> None:
    found = {
        name
        for name in identifiers(tree_of(path))
        if COINED_IDENTIFIERS & {word.lower() for word in _WORD.findall(name)}
    }
    assert not found


@OF_SOURCE
def test_docstrings_use_standard_terms(path: Path) -> None:
    assert not [match[0] for text in docstrings(tree_of(path)) for match in _COINED_PROSE.finditer(text)]


@OF_PAGE
def test_pages_use_standard_terms(page: Path) -> None:
    assert not [match[0] for match in _COINED_PROSE.finditer(_FENCE.sub("", page.read_text()))]
