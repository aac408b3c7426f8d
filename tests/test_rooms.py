"""The architecture as a table, held against every import in the tree."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# A room may import itself and what its line names, and nothing else of ours.
BELOW: dict[str, set[str]] = {
    "handlers": set(),
    "serve_app": set(),  # the package itself: its version
    "serve_app.errors": set(),
    "serve_app.ports": set(),
    "serve_app.documents": set(),
    "serve_app.json_path": set(),
    "serve_app.sequence": set(),
    "serve_app.deferral": set(),
    "serve_app.proto": set(),  # what goes over gRPC, for those who answer and for those who ask
}
# What operators ask of traffic: frozen words, read from JSON.
BELOW["serve_app.policy"] = {"serve_app.errors", "serve_app.documents", "serve_app.json_path"}
BELOW["serve_app.experiment"] = BELOW["serve_app.rollout"] = {*BELOW["serve_app.policy"], "serve_app.policy"}
BELOW["serve_app.graph"] = {"serve_app.errors", "serve_app.documents"}
BELOW["serve_app.autoscaling"] = {"serve_app.errors", "serve_app.documents"}
# What tensors are, and which of them a model takes.
BELOW["serve_app.signature"] = {"serve_app.errors", "serve_app.documents"}
BELOW["serve_app.tensors"] = {"serve_app.errors", "serve_app.signature"}
_WORDS = {*BELOW["serve_app.experiment"], "serve_app.experiment", "serve_app.rollout", "serve_app.autoscaling"}
_WORDS |= {"serve_app.graph", "serve_app.signature", "serve_app.tensors"}
_WORDS |= {"serve_app.sequence", "serve_app.deferral"}
BELOW |= {
    "serve_app.types": _WORDS - {"serve_app.tensors"},
    "serve_app.settings": {*_WORDS, "serve_app.types"},
    "serve_app.traffic": {*_WORDS, "serve_app.types"},
    "serve_app.tls": {"serve_app.errors", "serve_app.settings"},
}
BELOW["serve_app.telemetry"] = set(BELOW)
BELOW["serve_app.store"] = set(BELOW)
BELOW["serve_app.runtime"] = set(BELOW)
# Beside the data plane, on its floor; control stores its figures.
BELOW["serve_app.shadow"] = {*_WORDS, "serve_app.types", "serve_app.traffic", "serve_app.telemetry"}
BELOW["serve_app.control"] = set(BELOW) - {"serve_app.runtime"}
# Beside the data plane too: what it asks for a workflow. The form of lists and functions is the authors' side's.
BELOW["serve_app.handover"] = {*_WORDS, "handlers", "serve_app.types"}
BELOW["serve_app.ends"] = {"serve_app.graph", "serve_app.signature", "serve_app.tensors"}
BELOW["serve_app.workflow"] = {*BELOW["serve_app.handover"], "serve_app.handover", "serve_app.telemetry"}
BELOW["serve_app.dataplane"] = BELOW["serve_app.controlplane"] = {
    *_WORDS,
    "serve_app.types",
    "serve_app.settings",
    "serve_app.traffic",
    "serve_app.telemetry",
    "serve_app.shadow",
    "serve_app.ends",
    "serve_app.workflow",
}
BELOW["serve_app.doors"] = {
    "serve_app",
    *_WORDS,
    "serve_app.proto",
    "serve_app.types",
    "serve_app.settings",
    "serve_app.telemetry",
    "serve_app.dataplane",
    "serve_app.controlplane",
}
BELOW["serve_app.deployments"] = set(BELOW)
BELOW["serve_app.main"] = set(BELOW)
# A tower of its own: what stands outside the server and speaks to it.
BELOW["serve_app.properties"] = {*_WORDS, "serve_app.types", "serve_app.settings"}
BELOW["serve_app.client"] = {"serve_app.tensors", "serve_app.proto"}
BELOW["serve_app.bench"] = {"serve_app", "serve_app.client", "handlers"}
BELOW["serve_app.bench.assignment"] = {*_WORDS, "serve_app.types", "serve_app.traffic"}  # it measures them alone
BELOW["serve_app.cli"] = {
    "serve_app",
    "serve_app.client",
    "serve_app.bench",
    *_WORDS,
    "serve_app.settings",
    "serve_app.ports",
    "serve_app.tls",
    "serve_app.properties",
    "serve_app.store",  # `torchrelay archive` makes what the store reads
}

# Who may import what of others.
WALLS = {
    "ray": {"serve_app.deployments", "serve_app.control.reconciler", "serve_app.main"},
    "starlette": {"serve_app.doors", "serve_app.deployments"},
    "fastapi": {"serve_app.doors", "serve_app.deployments", "serve_app.bench.bare"},
    "grpc": {
        "serve_app.proto",
        "serve_app.doors",
        "serve_app.deployments",
        "serve_app.client.grpc",  # who speaks HTTP alone does not load it
        "serve_app.bench.streaming",
    },
    "torch": {"handlers", "serve_app.runtime", "serve_app.bench"},
    "sqlalchemy": {"serve_app.control"},
}
SEALED = {"manager", "helper", "helpers", "utils", "common", "service", "processor"}

FILES = sorted(p for top in ("serve_app", "handlers") for p in (ROOT / top).rglob("*.py"))


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str:
    """The longest entry of the table that ``module`` is, or is in."""
    parts = module.split(".")
    for end in range(len(parts), 0, -1):
        if (name := ".".join(parts[:end])) in BELOW and (name != "serve_app" or end == len(parts)):
            return name
    raise AssertionError(f"{module} stands in no room of the table")


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import hides where it goes"
            assert node.module
            for alias in node.names:
                inner = ROOT / Path(*node.module.split("."), alias.name)
                is_module = inner.is_dir() or inner.with_suffix(".py").is_file()
                found.add(f"{node.module}.{alias.name}" if is_module else node.module)
    return found


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_a_room_imports_only_what_is_below_it(path: Path) -> None:
    module = module_of(path)
    room = room_of(module)
    for name in imports(path):
        top = name.split(".")[0]
        if top in ("serve_app", "handlers"):
            other = room_of(name)
            assert other == room or other in BELOW[room], f"{module} ({room}) imports {name} ({other})"


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_walls(path: Path) -> None:
    module = module_of(path)
    for name in imports(path):
        allowed = WALLS.get(name.split(".")[0])
        if allowed is not None:
            assert any(module == a or module.startswith(a + ".") for a in allowed), f"{module} imports {name}"


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_no_name_that_hides_the_noun(path: Path) -> None:
    assert not SEALED & set(path.with_suffix("").relative_to(ROOT).parts)


def test_handlers_know_no_server() -> None:
    """An author's package installs and imports without Ray."""
    for path in FILES:
        if module_of(path).startswith("handlers"):
            assert not any(name.split(".")[0] in ("ray", "serve_app") for name in imports(path))
