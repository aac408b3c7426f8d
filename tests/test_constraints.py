"""constraints.txt has one version of every package, for each Python that is supported."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.package_index import run_uv

ROOT = Path(__file__).parent.parent
PYTHONS = pytest.mark.parametrize("python", ["3.10", "3.11", "3.12", "3.13"])
# torch pins its CUDA libraries; the GPU build of ONNX Runtime is an alternative of the pinned one.
UNPINNED = re.compile(r"(nvidia|cuda)-|(onnxruntime-gpu|pip|triton)$")


def read_pins(python: str) -> list[tuple[str, str]]:
    """Return the names and versions that hold on a release of Python."""
    environment = {
        "python_version": python,
        "python_full_version": f"{python}.9",
        "platform_system": "Linux",
        "platform_machine": "x86_64",
    }
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return [
        (canonicalize_name(pin.name), str(pin.specifier).removeprefix("=="))
        for pin in pins
        if pin.marker is None or pin.marker.evaluate(environment)
    ]


@PYTHONS
def test_no_package_has_two_versions(python: str) -> None:
    names = [name for name, _ in read_pins(python)]
    assert sorted(names) == sorted(set(names))


@pytest.mark.integration
@PYTHONS
def test_every_package_of_every_extra_is_pinned_and_can_be_installed(python: str, tmp_path: Path) -> None:
    resolved = tmp_path / "resolved.txt"
    run_uv(
        *("compile", "--quiet", "--no-header", "--no-annotate", "--all-extras"),
        *("--python-version", f"{python}.9", "--python-platform", "x86_64-manylinux_2_28"),
        *("--constraint", "constraints.txt", "--output-file", str(resolved), "pyproject.toml"),
        cwd=ROOT,
    )
    pins = dict(read_pins(python))
    installed = (line.partition(" ")[0].partition("==") for line in resolved.read_text().splitlines())
    versions = {re.sub(r"\[.*", "", name): version for name, _, version in installed}
    assert {n: v for n, v in versions.items() if pins.get(n) != v and not UNPINNED.match(n)} == {}
