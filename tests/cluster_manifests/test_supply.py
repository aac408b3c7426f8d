"""The bill of materials of the environment, as CI writes it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

pytest.importorskip("cyclonedx_py")

from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow  # reading every package takes 30 s


def test_the_bill_of_materials_names_every_package_and_a_broken_audit_fails_nothing(tmp_path: Path) -> None:
    broken = tmp_path / "pip_audit"  # in place of the package, which asks a service on the network
    broken.mkdir()
    (broken / "__init__.py").touch()
    (broken / "__main__.py").write_text("raise SystemExit('no network')")
    env = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [ROOT / ".ci/supply", tmp_path / "out"],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "could not ask for vulnerabilities: no network" in done.stdout
    text = (tmp_path / "out/sbom.cdx.json").read_text()
    document = json.loads(text)
    assert (document["bomFormat"], document["specVersion"]) == ("CycloneDX", "1.6")
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    found = {(part["name"].lower(), part.get("version")) for part in document["components"]}
    for name in ("ray", "starlette", "orjson"):
        assert (name, metadata.version(name)) in found
