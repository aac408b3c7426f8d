"""Environments: wheels made in the test, installed by the real pip without a network, used by real
processes.
"""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import numpy
import pytest

from serve_app.errors import InstallFailed
from serve_app.runtime import package_envs
from serve_app.runtime.package_envs import MAX_UNUSED_S, PackageEnvs
from serve_app.settings import RuntimeSettings

pytestmark = pytest.mark.slow


DIGEST = "a" * 64


def wheel(folder: Path, name: str, version: str, requires: str = "") -> None:
    """Write a wheel of one module that contains its version."""
    folder.mkdir(parents=True, exist_ok=True)
    facts = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as packed:
        packed.writestr(f"{name}.py", f"VERSION = {version!r}\n")
        packed.writestr(f"{facts}/METADATA", metadata + (f"Requires-Dist: {requires}\n" if requires else ""))
        packed.writestr(f"{facts}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        packed.writestr(
            f"{facts}/RECORD", f"{name}.py,,\n{facts}/METADATA,,\n{facts}/WHEEL,,\n{facts}/RECORD,,\n"
        )


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    folder = tmp_path / "wheels"
    for version in ("1.0", "2.0"):
        wheel(folder, "tinypkg", version)
    return folder


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    model.mkdir()
    return model


@pytest.fixture
def kept(tmp_path: Path) -> PackageEnvs:
    return PackageEnvs(tmp_path / "environments", RuntimeSettings(install_timeout=300))


def write(directory: Path, wheels: Path, *lines: str) -> None:
    (directory / "requirements.txt").write_text(
        "\n".join(["--no-index", f"--find-links {wheels}", *lines]) + "\n"
    )


def build(kept: PackageEnvs, directory: Path, digest: str = DIGEST, **more) -> Path:
    return kept.build("m", directory, "requirements.txt", digest, **more)


def test_what_an_archive_asks_for_is_installed_once(kept, directory, wheels, tmp_path):
    write(directory, wheels, "tinypkg==1.0")
    lines: list[str] = []
    packages = build(kept, directory, on_line=lines.append)
    assert (packages / "tinypkg.py").read_text() == "VERSION = '1.0'\n"
    assert any("Successfully installed" in line for line in lines)
    assert [p.name for p in packages.iterdir() if p.suffix == ".pth"] == []
    lines.clear()
    again = PackageEnvs(tmp_path / "environments", RuntimeSettings())
    assert build(again, directory, on_line=lines.append) == packages
    assert lines == []
    assert list((tmp_path / "environments/.partial").iterdir()) == []


def test_what_the_server_has_is_not_installed_again(kept, directory, wheels):
    wheel(wheels, "needs_numpy", "1.0", requires="numpy")
    write(directory, wheels, "needs_numpy", "pyyaml")
    packages = build(kept, directory)
    assert (packages / "needs_numpy.py").is_file()
    assert not (packages / "numpy").exists()
    assert not (packages / "yaml").exists()


def test_another_version_of_a_loaded_package_is_refused_with_a_message(kept, directory, wheels, tmp_path):
    wheel(wheels, "numpy", "1.0")
    write(directory, wheels, "numpy==1.0")
    with pytest.raises(InstallFailed) as error:
        build(kept, directory)
    assert str(error.value) == "Custom pip package installation failed for model m"
    assert f"Every replica has numpy=={numpy.__version__} loaded" in error.value.detail
    assert [p.name for p in (tmp_path / "environments").iterdir() if p.name[0] != "."] == []


def test_what_cannot_be_installed_leaves_nothing_behind(kept, directory, wheels, tmp_path):
    write(directory, wheels, "tinypkg==9.9")
    with pytest.raises(InstallFailed) as error:
        build(kept, directory)
    assert "tinypkg==9.9" in error.value.detail
    assert [p.name for p in (tmp_path / "environments").iterdir() if p.name[0] != "."] == []
    assert list((tmp_path / "environments/.partial").iterdir()) == []
    write(directory, wheels, "tinypkg==2.0")
    assert (build(kept, directory) / "tinypkg.py").is_file()


def test_requirements_that_are_no_file(kept, directory):
    (directory / "requirements.txt").mkdir()
    with pytest.raises(InstallFailed) as error:
        build(kept, directory)
    assert error.value.detail == "requirements.txt cannot be read: Is a directory"


def test_an_installation_that_takes_too_long_is_ended(directory, tmp_path):
    kept = PackageEnvs(tmp_path / "environments", RuntimeSettings(install_timeout=1.5))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        index = f"http://127.0.0.1:{silent.getsockname()[1]}/simple"
        (directory / "requirements.txt").write_text(f"--index-url {index}\ntinypkg\n")
        started = time.monotonic()
        with pytest.raises(InstallFailed) as error:
            build(kept, directory)
    assert "runtime.install_timeout (1.5 s)" in error.value.detail
    assert time.monotonic() - started < 30


def test_a_line_that_names_a_file_makes_the_environment_that_archives_own(kept, directory, wheels):
    (directory / "requirements.txt").write_text("tinypkg==1.0\n# from there\n")
    plain = [
        package_envs._environment_key((directory / "requirements.txt").read_text(), digest)
        for digest in ("a", "b")
    ]
    assert plain[0] == plain[1]
    write(directory, wheels, "tinypkg==1.0")
    own = [
        package_envs._environment_key((directory / "requirements.txt").read_text(), digest)
        for digest in ("a", "b")
    ]
    assert own[0] != own[1]


ENTER = """
import subprocess, sys
from pathlib import Path
from serve_app.runtime.package_envs import PackageEnvs
from serve_app.settings import RuntimeSettings
root, model = Path(sys.argv[1]), Path(sys.argv[2])
PackageEnvs(root, RuntimeSettings()).activate("m", model, "requirements.txt", sys.argv[3])
import tinypkg
child = subprocess.check_output([sys.executable, "-c", "import tinypkg; print(tinypkg.VERSION)"], text=True)
print(tinypkg.VERSION, child.strip(), flush=True)
sys.stdin.read()
"""


def process(tmp_path: Path, model: Path, digest: str) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", ENTER, str(tmp_path / "environments"), str(model), digest]
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_processes_see_their_own_version_and_share_what_they_can(tmp_path, wheels):
    running = []
    for number, version in enumerate(("1.0", "2.0", "2.0")):
        model = tmp_path / f"model{number}"
        model.mkdir()
        write(model, wheels, f"tinypkg=={version}")
        running.append(process(tmp_path, model, version))
    try:
        assert [p.stdout.readline().strip() for p in running] == ["1.0 1.0", "2.0 2.0", "2.0 2.0"]
        assert len([p for p in (tmp_path / "environments").iterdir() if p.name[0] != "."]) == 2
        assert "tinypkg" not in sys.modules
    finally:
        for p in running:
            p.communicate("")


def test_an_environment_that_nobody_uses_is_removed_after_a_week(kept, directory, wheels, tmp_path):
    write(directory, wheels, "tinypkg==1.0")
    packages = build(kept, directory)
    lock = tmp_path / "environments/.locks" / packages.name
    PackageEnvs(tmp_path / "environments", RuntimeSettings())
    assert packages.is_dir()
    then = time.time() - MAX_UNUSED_S - 60
    os.utime(lock, (then, then))
    with lock.open("rb") as user:
        fcntl.flock(user, fcntl.LOCK_SH)
        PackageEnvs(tmp_path / "environments", RuntimeSettings())
        assert packages.is_dir()
    PackageEnvs(tmp_path / "environments", RuntimeSettings())
    assert not packages.exists()
    assert not lock.exists()


def test_loaded_packages_are_reported(tmp_path, wheels):
    packages = tmp_path / "packages"
    facts = packages / "numpy-1.0.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 1.0\n")
    held = package_envs.loaded_distributions()
    assert package_envs.shadowed_distributions(packages, held) == [("numpy", "1.0", numpy.__version__)]
    assert package_envs.shadowed_distributions(packages, {}) == []
    assert "torch-model-archiver" not in held  # installed, and nobody's import
