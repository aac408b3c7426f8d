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
from tests.support.container_images import read_stages, read_target
from tests.support.package_index import run_uv

Release = Callable[..., subprocess.CompletedProcess[str]]

ROOT = Path(__file__).parents[2]
RELEASE = ROOT / ".ci/release"
IMAGE_PYTHON = {"python_version": "3.11", "python_full_version": "3.11.0", "sys_platform": "linux"}


def entries(name: str) -> dict[str, str]:
    text = (lock.LOCKS / f"{name}.lock").read_text()
    found = re.split(r"\n(?=\S)", text.removeprefix(lock.HEADER).strip())
    return {canonicalize_name(entry.partition("==")[0]): entry for entry in found}


LOCKS = {
    name: entries(name)
    for name in ("build", *dict.fromkeys(n for image in lock.IMAGES.values() for n in image))
}
TARGETS = pytest.mark.parametrize("target", lock.IMAGES)


def locked(target: str) -> dict[str, str]:
    """Return the version of each package of a target."""
    parts = [LOCKS[place] for place in lock.IMAGES[target]]
    return {name: entry.split()[0].partition("==")[2] for part in parts for name, entry in part.items()}


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
            r"[\w.\[\]-]+==[\w.+]+( ; [^\n]+)?( \\\n    --hash=sha256:[0-9a-f]{64})+", entry
        ), entry


@TARGETS
def test_no_package_is_in_two_locks_of_one_image(target: str) -> None:
    names = [name for place in lock.IMAGES[target] for name in LOCKS[place]]
    assert len(names) == len(set(names))


@TARGETS
def test_versions_are_those_of_the_constraints(target: str) -> None:
    """The requirements of vLLM come first in its target; without another reason no version differs.

    Only the extra mlflow, which no target has, requires an older cachetools.
    """
    pins = constraints()
    differing = {
        name for name, version in locked(target).items() if pins.get(name, version) != public(version)
    }
    others = {"cachetools", "certifi", "fastapi", "lark", "llguidance", "numpy", "torch", "transformers"}
    allowed = others if target == "llm" else set()
    assert differing <= allowed, "run python cluster/lock.py"


def public(version: str) -> str:
    """Return a version without the name of its build."""
    return version.partition("+")[0]


@TARGETS
def test_every_dependency_of_the_image_is_locked(target: str) -> None:
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    versions = locked(target)
    for part in (project["dependencies"], *(extras[extra] for extra in lock.TARGETS[target])):
        for required in map(Requirement, part):
            if required.name == project["name"]:
                continue  # its own extras
            version = versions[canonicalize_name(required.name)]
            assert required.specifier.contains(version, prereleases=True), required


def test_the_targets_have_what_they_promise() -> None:
    families = {
        "cpu": {"torch", "captum", "transformers", "onnxruntime", "llguidance"},
        "gpu": {"torch", "captum", "transformers", "onnxruntime-gpu", "accelerate", "deepspeed", "triton"},
        "llm": {"torch", "captum", "transformers", "vllm", "triton"},
    }
    for target, names in families.items():
        assert names <= locked(target).keys(), target
    for name, version in read_llm().items():
        assert locked("llm")[name] == version


def read_llm() -> dict[str, str]:
    lines = [line for line in lock.LLM.read_text().splitlines() if not line.startswith("#")]
    return dict(line.split("==") for line in lines)


def test_only_the_target_cpu_has_torch_s_cpu_build() -> None:
    """PyPI has the CUDA builds, PyTorch's index the CPU builds."""
    version = locked("cpu")["torch"]
    assert version == f"{locked('gpu')['torch']}+cpu"
    [digest] = re.findall(r"sha256:([0-9a-f]{64})", LOCKS["cpu"]["torch"])
    for folder in map(Path, os.environ.get("PIP_FIND_LINKS", "").split()):
        for wheel in folder.glob(f"torch-{version}-cp311-*x86_64.whl"):
            assert lock.find_cpu_hash(public(version), wheel) == digest


def test_only_the_cuda_build_needs_the_cuda_libraries() -> None:
    assert not any(lock._CUDA.match(name) for name in locked("cpu"))
    for target in ("gpu", "llm"):
        assert any(name.startswith("nvidia-cudnn") for name in locked(target))


@pytest.mark.integration
@TARGETS
def test_the_resolver_installs_exactly_the_locks(target: str, tmp_path: Path) -> None:
    """The resolver reads the metadata of the locked files; a dependency that no lock has is an error."""
    command = ["install", "--dry-run", "--require-hashes", *lock.PLATFORM]
    for place in lock.IMAGES[target]:
        command += ["--requirement", str(lock.LOCKS / f"{place}.lock")]
    folders = os.environ.get("PIP_FIND_LINKS", "").split() if target == "cpu" else []
    command += [option for folder in folders for option in ("--find-links", folder)]
    if target == "cpu" and not any(Path(folder).glob("torch-*+cpu-*") for folder in folders):
        command += ["--extra-index-url", lock.TORCH_INDEX.removesuffix("torch/")]
    command += ["--target", str(tmp_path / "empty")]
    done = run_uv(*command)
    planned = dict(re.findall(r"^ \+ ([\w.-]+)==(\S+)$", done.stderr, re.MULTILINE))
    assert planned == locked(target)


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
    done = release("torchrelay:1", "--pull", BASE_IMAGE=base)
    assert done.returncode == 0, done.stderr
    words = done.stdout.splitlines()
    builds = [words[i : i + 11] for i, word in enumerate(words) if word == "docker"]
    targets = [target for image in lock.IMAGES for target in (image, f"sagemaker-{image}")]
    assert [(build[5], build[9]) for build in builds] == [(t, f"torchrelay:1-{t}") for t in targets]
    assert all(f"BASE_IMAGE={base}" in build and "--pull" in build for build in builds)


def test_a_release_needs_a_tag(release: Release) -> None:
    done = release("torchrelay", BASE_IMAGE=f"python@sha256:{'a' * 64}")
    assert done.returncode == 1 and "'torchrelay' has no tag" in done.stderr and not done.stdout


@TARGETS
def test_the_image_installs_by_hashes_and_then_without_dependencies(target: str) -> None:
    assert read_stages()["base"][0] == ("FROM", "${BASE_IMAGE} AS base")
    packages, server = [step for word, step in read_target(target) if word == "RUN" and "pip" in step]
    assert "--require-hashes" in packages and "--no-deps --no-index" in server
    installed = re.findall(r"requirements/(\w+)\.lock", packages)
    wheels = ["source"] if "deepspeed" in server else []
    assert (*installed, *wheels) == lock.IMAGES[target]


@pytest.mark.parametrize("stage", ["builder", "source", "server"])
def test_wheels_are_built_by_the_locked_backends(stage: str) -> None:
    for step in (step for word, step in read_stages()[stage] if word == "RUN"):
        assert "--require-hashes" in step or "--no-deps --no-build-isolation" in step
        assert "pip install" in step or "--no-build-isolation" in step
    assert {"hatchling", "setuptools", "wheel"} <= LOCKS["build"].keys()
