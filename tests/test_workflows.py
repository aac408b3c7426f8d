"""The workflows of CI: they call make's targets, with few rights, and publish a tag only."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / ".github/workflows"
WORKFLOWS = {path.stem: yaml.safe_load(path.read_text()) for path in sorted(FOLDER.glob("*.yml"))}
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
STEPS = [
    (name, job, step)
    for name, workflow in WORKFLOWS.items()
    for job in workflow["jobs"].values()
    for step in job["steps"]
]


def test_steps_call_make_targets_that_exist() -> None:
    commands = [(name, step["run"], job) for name, job, step in STEPS if "run" in step]
    called = set()
    for name, command, job in commands:
        program, target, *variables = (
            command.replace("${{ matrix.", "${{matrix.").replace(" }}", "}}").split()
        )
        assert program == "make", f"{name}: {command}"
        assert all(re.fullmatch(r"[A-Z]+=\S+", variable) for variable in variables), f"{name}: {command}"
        key = re.fullmatch(r"\$\{\{matrix\.(\w+)\}\}", target)
        called |= set(job["strategy"]["matrix"][key[1]]) if key else {target}
    assert called <= TARGETS
    assert called >= {"lint", "test", "test-fast", "test-slow", "test-nightly", "coverage", "docs", "release"}


def test_jobs_have_limits_and_the_rights_that_they_need() -> None:
    for name, workflow in WORKFLOWS.items():
        assert workflow["permissions"] == {"contents": "read"}, name
        for job in workflow["jobs"].values():
            assert job["timeout-minutes"] <= 180, name
    writing = {
        (name, job)
        for name, workflow in WORKFLOWS.items()
        for job, fields in workflow["jobs"].items()
        if "write" in fields.get("permissions", {}).values()
    }
    assert writing == {("docs", "publish"), ("release", "build"), ("release", "publish")}


@pytest.mark.parametrize(
    ("name", "condition"),
    [("release", "github.ref_type == 'tag'"), ("docs", "github.ref == 'refs/heads/main'")],
)
def test_only_a_tag_or_main_is_published(name: str, condition: str) -> None:
    publish: dict[str, Any] = WORKFLOWS[name]["jobs"]["publish"]
    assert publish["if"].startswith(condition)
    assert publish["needs"] == "build"
    assert "environment" in publish


def test_every_supported_python_runs_the_fast_tests() -> None:
    classifiers = (ROOT / "pyproject.toml").read_text()
    supported = re.findall(r"Programming Language :: Python :: (3\.\d+)", classifiers)
    assert WORKFLOWS["ci"]["jobs"]["fast"]["strategy"]["matrix"]["python"] == supported


def test_owners_and_hooks_name_files_that_exist() -> None:
    for line in (ROOT / ".github/CODEOWNERS").read_text().splitlines():
        if line and not line.startswith(("#", "*")):
            assert (ROOT / line.split()[0].strip("/")).exists(), line
    for line in (ROOT / ".pre-commit-config.yaml").read_text().splitlines():
        target = re.search(r"entry: make (\S+)", line)
        assert not target or target[1] in TARGETS, line
