"""The bills of materials of the environment, as CI writes it, and of the image's targets."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from cluster import lock

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.nightly  # reading every package takes 30 s


@pytest.mark.parametrize("target", lock.IMAGES)
def test_the_bill_of_materials_of_a_target_names_its_packages_and_hashes(target: str, tmp_path: Path) -> None:
    env = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(
        [ROOT / ".ci/sbom", target, tmp_path],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    text = (tmp_path / f"sbom-{target}.cdx.json").read_text()
    document = json.loads(text)  # cyclonedx-py has validated it
    assert document["metadata"]["component"]["name"] == "torchrelay"
    found = {part["purl"]: part for part in document["components"]}
    locks = "".join((lock.LOCKS / f"{place}.lock").read_text() for place in lock.IMAGES[target])
    assert len(found) == len(re.findall("^[a-z].*==", locks, re.MULTILINE))
    for part in found.values():
        hashes = [entry["content"] for ref in part["externalReferences"] for entry in ref["hashes"]]
        assert hashes and all(digest in locks for digest in hashes), part["name"]


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
