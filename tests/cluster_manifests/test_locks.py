"""The locks of the image belong to pyproject.toml and constraints.txt; every package has a hash."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from cluster import lock

Release = Callable[..., subprocess.CompletedProcess[str]]

ROOT = Path(__file__).parents[2]
RELEASE = ROOT / ".ci/release"
IMAGE_PYTHON = {"python_version": "3.11", "python_full_version": "3.11.0", "sys_platform": "linux"}


def entries(name: str) -> dict[str, str]:
    text = (lock.LOCKS / f"{name}.lock").read_text()
    found = re.split(r"\n(?=\S)", text.removeprefix(lock.HEADER).strip())
    return {canonicalize_name(entry.partition("==")[0]): entry for entry in found}


LOCKS = {name: entries(name) for name in ("common", "cuda", *lock.RUNTIMES)}


def constraints() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    wanted = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {
        canonicalize_name(r.name): str(r.specifier).removeprefix("==")
        for r in wanted
        if r.marker is None or r.marker.evaluate(IMAGE_PYTHON)
    }


@pytest.mark.parametrize("name", LOCKS)
def test_every_package_has_one_version_and_hashes(name: str) -> None:
    for entry in LOCKS[name].values():
        assert re.fullmatch(
            r"[\w.\[\]-]+==[\w.]+( ; [^\n]+)?( \\\n    --hash=sha256:[0-9a-f]{64})+", entry
        ), entry


def test_no_package_is_in_two_locks_of_one_image() -> None:
    for runtime in lock.RUNTIMES:
        names = [name for place in ("common", "cuda", runtime) for name in LOCKS[place]]
        assert len(names) == len(set(names))


def test_versions_are_those_of_the_constraints() -> None:
    pins = constraints()
    for places in LOCKS.values():
        for name, entry in places.items():
            version = entry.split()[0].partition("==")[2]
            assert pins.get(name, version) == version, f"{name}: run python cluster/lock.py"


def test_every_dependency_of_the_image_is_locked() -> None:
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    common = {*LOCKS["common"], *LOCKS["cuda"]}
    for runtime in lock.RUNTIMES:
        for line in (
            line
            for part in (project["dependencies"], *(extras[extra] for extra in (*lock.EXTRAS, runtime)))
            for line in part
        ):
            assert canonicalize_name(Requirement(line).name) in common | set(LOCKS[runtime]), line
    assert "hatchling" in common, "the build backend"


def test_torch_has_the_hashes_of_both_builds() -> None:
    """PyPI has its CUDA builds, PyTorch's index the CPU builds."""
    hashes = re.findall(r"sha256:([0-9a-f]{64})", LOCKS["common"]["torch"])
    assert len(hashes) == len(set(hashes)) > 1
    wheels = [Path(folder) for folder in os.environ.get("PIP_FIND_LINKS", "").split()]
    for wheel in (file for folder in wheels for file in folder.glob("torch-*+cpu-cp311-*x86_64.whl")):
        version = LOCKS["common"]["torch"].split()[0].partition("==")[2]
        if wheel.name.startswith(f"torch-{version}+"):
            assert lock.find_cpu_hash(version, wheel) in hashes


def test_only_the_cuda_build_needs_the_cuda_libraries() -> None:
    assert LOCKS["cuda"] and all(lock._CUDA.match(entry) for entry in LOCKS["cuda"].values())
    assert not any(lock._CUDA.match(entry) for entry in LOCKS["common"].values())


@pytest.fixture
def release(tmp_path: Path) -> Release:
    """Run the release script with a docker and a Python that print their arguments."""
    for name in ("docker", "python"):
        command = tmp_path / name
        command.write_text(f'#!/bin/sh\nprintf "%s\\n" {name} "$@"\n')
        command.chmod(0o755)

    def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        path = f"{tmp_path}:{os.environ['PATH']}"
        env = {"PATH": path, "PYTHON": str(tmp_path / "python"), **env}
        return subprocess.run(
            [RELEASE, *arguments], env=env, capture_output=True, text=True, timeout=60, check=False
        )

    return run


@pytest.mark.parametrize("base", ["", "python:3.11", "python@sha256:12", f"@sha256:{'a' * 64}"])
def test_a_release_needs_a_base_image_with_a_digest(release: Release, base: str) -> None:
    done = release("torchrelay:1", BASE_IMAGE=base)
    assert done.returncode == 1 and "pin it by its digest" in done.stderr and not done.stdout


def test_a_release_builds_on_that_image(release: Release) -> None:
    base = f"python:3.11-slim-bookworm@sha256:{'a' * 64}"
    done = release("torchrelay:1", "--build-arg", "TORCH=cpu", BASE_IMAGE=base)
    assert done.returncode == 0, done.stderr
    words = done.stdout.splitlines()
    assert f"BASE_IMAGE={base}" in words and "torchrelay:1" in words and "TORCH=cpu" in words


def test_the_image_installs_by_hashes_and_then_without_dependencies() -> None:
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "cluster/Dockerfile").read_text(), flags=re.MULTILINE)
    installs = re.findall(r"pip install (.+)", text.replace("\\\n", " "))
    assert ["--require-hashes" in line for line in installs] == [True, False]
    assert "--no-deps" in installs[1] and "--no-build-isolation" in installs[1]
    assert text.startswith("ARG BASE_IMAGE=") and "FROM ${BASE_IMAGE}\n" in text
