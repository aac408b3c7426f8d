"""Conventions that no linter checks: names of classes and modules, references, vocabulary, folders."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("serve_app", "handlers")
FOLDERS = (*PACKAGES, "tests", "examples")

SOURCES = sorted(
    path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py") if "_pb2" not in path.name
)
PAGES = sorted(
    (
        *ROOT.glob("*.md"),
        *(p for f in (*FOLDERS, "configs", "cluster", "docs") for p in (ROOT / f).rglob("*.md")),
    )
)
# Folders in tests/ of helpers and programs.
NO_TESTS = {
    "benchmarks",
    "chaos",
    "fuzz",
    "gpu",
    "hosts",
    "recorders",
    "security",
    "support",
    "torchserve_cases",
}
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
_ANY_COINED = re.compile("|".join(COINED_IDENTIFIERS), re.IGNORECASE)
_PYTHON_FILE = re.compile(r"(?<![\w./:-])(?:[\w-]+/)*[\w-]+\.py\b")
# Files of Ray and of SageMaker, and placeholders.
_OTHER_FILES = {
    "serve_dashboard_panels.py",
    "serve_deployment_dashboard_panels.py",
    "setup_worker.py",
    "code/inference.py",
    "score.py",
    "file.py",
    "name.py",
    "migrations/versions/000N_name.py",
}
_CLASS = re.compile(r"^ *class (\w+)", re.MULTILINE)
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


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


def comments(text: str) -> Iterator[str]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def assert_none(problems: list[str]) -> None:
    assert not problems, "\n".join(problems)


def test_each_class_name_is_defined_once() -> None:
    places = defaultdict(list)
    for path in SOURCES:
        if path.relative_to(ROOT).parts[0] in PACKAGES:
            for name in _CLASS.findall(path.read_text()):
                places[name].append(str(path.relative_to(ROOT)))
    assert not {name: found for name, found in places.items() if len(found) > 1}


def test_modules_have_telling_names() -> None:
    problems = []
    for path in SOURCES:
        if vague := VAGUE_MODULES & set(path.relative_to(ROOT).with_suffix("").parts):
            problems.append(f"{path.relative_to(ROOT)}: {sorted(vague)} does not state the content")
    assert_none(problems)


def test_each_package_has_a_docstring() -> None:
    packages = [path for folder in PACKAGES for path in (ROOT / folder).rglob("__init__.py")]
    undocumented = [path for path in packages if not ast.get_docstring(ast.parse(path.read_text()))]
    assert_none([str(path.relative_to(ROOT)) for path in undocumented])


def test_references_to_python_files_are_valid() -> None:
    """Check comments and docstrings, and in pages what has a folder: other names are files of readers."""
    folders = (*FOLDERS, "configs", "cluster", "docs")
    paths = [path.relative_to(ROOT) for folder in folders for path in (ROOT / folder).rglob("*.py")]
    known = _OTHER_FILES | {"/".join(p.parts[i:]) for p in paths for i in range(len(p.parts))}

    def missing(text: str) -> set[str]:
        return set(_PYTHON_FILE.findall(text)) - known

    problems = []
    for path in SOURCES:
        text = path.read_text()
        if missing(text):  # in strings, too: parsing all files takes long
            prose = "\n".join((*comments(text), *docstrings(ast.parse(text))))
            problems += [f"{path.relative_to(ROOT)}: {file}" for file in missing(prose)]
    pages = (*PAGES, ROOT / "Makefile", *(p for f in folders for p in (ROOT / f).rglob("*.y*ml")))
    for page in pages:
        problems += [f"{page.relative_to(ROOT)}: {file}" for file in missing(page.read_text()) if "/" in file]
    assert_none(problems)


def test_source_and_pages_use_standard_terms() -> None:
    problems = []
    for path in SOURCES:
        text, file = path.read_text(), path.relative_to(ROOT)
        if not _ANY_COINED.search(text):
            continue  # parsing all files takes 10 s
        tree = ast.parse(text)
        for name in identifiers(tree):
            if COINED_IDENTIFIERS & {word.lower() for word in _WORD.findall(name)}:
                problems.append(f"{file}: identifier {name}")
        found = [match[0] for text in docstrings(tree) for match in _COINED_PROSE.finditer(text)]
        problems += [f"{file}: docstring with {words!r}" for words in found]
    for page in (*PAGES, ROOT / "serve_app/protocols/torchserve/openapi.json"):
        found = [match[0] for match in _COINED_PROSE.finditer(_FENCE.sub("", page.read_text()))]
        problems += [f"{page.relative_to(ROOT)}: {words!r}" for words in found]
    assert_none(problems)


def test_tests_helpers_and_programs_have_folders_of_their_own() -> None:
    """Check the arrangement that tests/README.md describes."""
    problems = []
    for path in (ROOT / "tests").rglob("*.py"):
        file = path.relative_to(ROOT / "tests")
        is_test = re.fullmatch(r"test_\w+\.py|conftest\.py", file.name)
        if file.parts[0] in NO_TESTS and is_test:
            problems.append(f"{file}: a test; move it to the folder of its package, or to programs/")
        if file.parts[0] not in NO_TESTS and not is_test:
            problems.append(f"{file}: no test; move it to support/, recorders/ or to the folder of a program")
    assert_none(problems)
