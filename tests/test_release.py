"""A release is built, its checksums are right, and pip installs it from a package index."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from serve_app import __version__
from tests.support.clean_environments import CleanEnvironment
from tests.support.http_server import serving_folder

ROOT = Path(__file__).parent.parent


def package(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(ROOT / ".ci/package"), str(folder)],
        env={**os.environ, "PYTHON": sys.executable, **variables},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("release") / "dist"
    done = package(folder, ALLOW_CHANGES="1")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def index(release: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve the release as a package index (PEP 503), and yield its URL."""
    root = tmp_path_factory.mktemp("index")
    project = root / "simple/torchrelay"
    project.mkdir(parents=True)
    files = [path for path in release.iterdir() if path.suffix in (".whl", ".gz")]
    for path in files:
        (project / path.name).symlink_to(path)
    links = "".join(f'<a href="{path.name}">{path.name}</a>' for path in files)
    (project / "index.html").write_text(f"<!DOCTYPE html><html><body>{links}</body></html>")
    with serving_folder(root) as address:
        yield f"{address}/simple/"


@pytest.mark.slow
def test_it_has_the_files_with_their_checksums(release: Path) -> None:
    names = {path.name for path in release.iterdir()}
    assert names == {
        f"torchrelay-{__version__}-py3-none-any.whl",
        f"torchrelay-{__version__}.tar.gz",
        f"torchrelay-{__version__}.cdx.json",
        f"CHANGELOG-{__version__}.md",
        "SHA256SUMS",
    }
    for line in (release / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split()
        assert hashlib.sha256((release / name).read_bytes()).hexdigest() == digest
    bill = json.loads((release / f"torchrelay-{__version__}.cdx.json").read_text())
    assert {"torch", "ray"} <= {component["name"] for component in bill["components"]}
    section = (release / f"CHANGELOG-{__version__}.md").read_text()
    assert section.startswith(f"## [{__version__}]") and section.count("\n## ") == 0


@pytest.mark.nightly
def test_pip_installs_it_from_an_index(index: str, tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--isolated", "--disable-pip-version-check"]
    download = [*pip, "download", "--quiet", "--no-deps", "--index-url", index, "--dest", str(tmp_path)]
    subprocess.run([*download, f"torchrelay=={__version__}"], check=True, timeout=120)
    [wheel] = tmp_path.glob("*.whl")
    environment = CleanEnvironment(tmp_path / "env", wheel)
    done = environment.run("torchrelay", "version", cwd=tmp_path)
    assert done.returncode == 0 and __version__ in done.stdout, done.stdout + done.stderr


@pytest.mark.nightly
def test_the_source_distribution_builds_the_same_wheel(release: Path, tmp_path: Path) -> None:
    [source], [wheel] = release.glob("*.tar.gz"), release.glob("*.whl")
    command = [sys.executable, "-m", "pip", "--isolated", "wheel", "--quiet", "--no-deps", "--no-index"]
    command += ["--no-build-isolation", "--wheel-dir", str(tmp_path), str(source)]
    subprocess.run(command, check=True, timeout=180)
    [built] = tmp_path.glob("*.whl")
    contents = [
        {each.filename: each.CRC for each in zipfile.ZipFile(path).infolist()} for path in (wheel, built)
    ]
    for files in contents:
        files.pop(f"torchrelay-{__version__}.dist-info/RECORD")
    assert contents[0] == contents[1]


@pytest.mark.nightly
def test_an_undated_section_is_refused(tmp_path: Path) -> None:
    done = package(tmp_path / "dist")
    assert done.returncode == 1
    assert "not committed" in done.stderr or "has no date" in done.stderr
    assert not (tmp_path / "dist").exists()


@pytest.mark.slow
def test_a_tag_of_another_version_is_refused(tmp_path: Path) -> None:
    done = package(tmp_path / "dist", ALLOW_CHANGES="1", TAG="v9.9.9")
    assert done.returncode == 1
    assert f"The tag v9.9.9 is not v{__version__}" in done.stderr
    assert not (tmp_path / "dist").exists()
