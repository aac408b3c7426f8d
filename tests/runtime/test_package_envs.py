"""Environments: wheels made in the test, installed by the real pip without a network, used by real
processes.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import os
import socket
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path
from typing import Any

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


def offline(wheels: Path, **settings: Any) -> RuntimeSettings:
    """Return settings with the test's wheels alone."""
    return RuntimeSettings(pip_index_url="none", pip_find_links=(str(wheels),), **settings)


@pytest.fixture
def kept(tmp_path: Path, wheels: Path) -> PackageEnvs:
    return PackageEnvs(tmp_path / "environments", offline(wheels, install_timeout=300))


def write(directory: Path, *lines: str) -> None:
    (directory / "requirements.txt").write_text("\n".join(lines) + "\n")


def build(kept: PackageEnvs, directory: Path, digest: str = DIGEST, **more) -> Path:
    return kept.build("m", directory, "requirements.txt", digest, **more)


def test_what_an_archive_asks_for_is_installed_once(kept, directory, wheels, tmp_path):
    write(directory, "tinypkg==1.0")
    lines: list[str] = []
    packages = build(kept, directory, on_line=lines.append)
    assert (packages / "tinypkg.py").read_text() == "VERSION = '1.0'\n"
    assert any("Successfully installed" in line for line in lines)
    assert [p.name for p in packages.iterdir() if p.suffix == ".pth"] == []
    lines.clear()
    again = PackageEnvs(tmp_path / "environments", offline(wheels))
    assert build(again, directory, on_line=lines.append) == packages
    assert lines == []
    assert list((tmp_path / "environments/.partial").iterdir()) == []


def test_what_the_server_has_is_not_installed_again(kept, directory, wheels):
    wheel(wheels, "needs_numpy", "1.0", requires="numpy")
    write(directory, "needs_numpy", "pyyaml")
    packages = build(kept, directory)
    assert (packages / "needs_numpy.py").is_file()
    assert not (packages / "numpy").exists()
    assert not (packages / "yaml").exists()


def test_another_version_of_a_loaded_package_is_refused_with_a_message(kept, directory, wheels, tmp_path):
    wheel(wheels, "numpy", "1.0")
    write(directory, "numpy==1.0")
    with pytest.raises(InstallFailed) as error:
        build(kept, directory)
    assert str(error.value) == "Custom pip package installation failed for model m"
    assert f"Every replica has numpy=={numpy.__version__} loaded" in error.value.detail
    assert [p.name for p in (tmp_path / "environments").iterdir() if p.name[0] != "."] == []


def test_what_cannot_be_installed_leaves_nothing_behind(kept, directory, wheels, tmp_path):
    write(directory, "tinypkg==9.9")
    with pytest.raises(InstallFailed) as error:
        build(kept, directory)
    assert "tinypkg==9.9" in error.value.detail
    assert [p.name for p in (tmp_path / "environments").iterdir() if p.name[0] != "."] == []
    assert list((tmp_path / "environments/.partial").iterdir()) == []
    write(directory, "tinypkg==2.0")
    assert (build(kept, directory) / "tinypkg.py").is_file()


def test_requirements_that_are_no_file(kept, directory):
    (directory / "requirements.txt").mkdir()
    with pytest.raises(InstallFailed) as error:
        build(kept, directory)
    assert error.value.detail == "requirements.txt cannot be read: Is a directory"


def test_an_installation_that_takes_too_long_is_ended(directory, tmp_path):
    (directory / "requirements.txt").write_text("tinypkg\n")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        index = f"http://127.0.0.1:{silent.getsockname()[1]}/simple"
        settings = RuntimeSettings(install_timeout=1.5, pip_index_url=index)
        kept = PackageEnvs(tmp_path / "environments", settings)
        started = time.monotonic()
        with pytest.raises(InstallFailed) as error:
            build(kept, directory)
    assert "runtime.install_timeout (1.5 s)" in error.value.detail
    assert time.monotonic() - started < 30


def sdist(folder: Path, mark: Path) -> None:
    """Write a source distribution whose build writes ``mark``."""
    folder.mkdir(parents=True, exist_ok=True)
    setup = f"open({str(mark)!r}, 'w').close()\nimport setuptools; setuptools.setup(name='evil', version='1')"
    with tarfile.open(folder / "evil-1.tar.gz", "w:gz") as packed:
        for name, text in (
            ("setup.py", setup),
            ("PKG-INFO", "Metadata-Version: 2.1\nName: evil\nVersion: 1\n"),
        ):
            entry = tarfile.TarInfo(f"evil-1/{name}")
            entry.size = len(text)
            packed.addfile(entry, io.BytesIO(text.encode()))


def test_a_source_distribution_is_not_built(kept, directory, wheels, tmp_path):
    sdist(wheels, tmp_path / "built")
    write(directory, "evil")
    with pytest.raises(InstallFailed) as error:
        build(kept, directory)
    assert "No matching distribution found for evil" in error.value.detail
    assert not (tmp_path / "built").exists()


def test_nothing_of_the_archive_or_the_environment_reaches_pip(
    kept, directory, tmp_path, monkeypatch, wheels
):
    """Modules and configuration of the archive, and the server's PIP_ and PYTHON variables, are not read."""
    mark = tmp_path / "mark"
    code = f"open({str(mark)!r}, 'w').close()\nraise SystemExit(9)"
    for name in ("pip/__init__.py", "pip/__main__.py", "sitecustomize.py", "usercustomize.py", "json.py"):
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(code)
    for name in ("pip.conf", "setup.cfg", "pyproject.toml"):
        (directory / name).write_text("[global]\nindex-url = http://127.0.0.1:9/\n[install]\nprefix = /x\n")
    monkeypatch.setenv("PYTHONPATH", str(directory))
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(directory / "pip.conf"))
    write(directory, "tinypkg==1.0")
    assert (build(kept, directory) / "tinypkg.py").is_file()
    assert not mark.exists()


def test_pip_sees_no_secret_of_the_server(monkeypatch, tmp_path):
    for name in ("AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "PIP_EXTRA_INDEX_URL", "PYTHONPATH", "RAY_AUTH_TOKEN"):
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    environment = package_envs._pip_environment(tmp_path)
    assert "secret" not in environment.values()
    assert environment["HTTPS_PROXY"] == "http://proxy:3128" and environment["HOME"] == str(tmp_path)


@pytest.mark.parametrize(
    "line", ["--index-url http://127.0.0.1:9/simple", "-e .", "./evil", "git+https://a/b"]
)
def test_a_refused_line_is_named(kept, directory, line):
    write(directory, "numpy", line)
    with pytest.raises(InstallFailed, match="pip package installation failed") as error:
        build(kept, directory)
    assert error.value.detail.startswith("requirements.txt, line 2: ")


@pytest.mark.slow
def test_settings_allow_options_and_hashes(directory, wheels, tmp_path):
    allowed = PackageEnvs(tmp_path / "environments", RuntimeSettings(pip_allow_options=True))
    write(directory, "--no-index", f"--find-links {wheels}", "tinypkg==1.0")
    keys = [build(allowed, directory, digest).name for digest in ("a", "b")]
    assert keys[0] != keys[1], "a line may name a file of the archive, so the environment is its own"
    strict = PackageEnvs(tmp_path / "environments", offline(wheels, pip_require_hashes=True))
    write(directory, "tinypkg==1.0")
    with pytest.raises(InstallFailed) as error:
        build(strict, directory)
    assert "require-hashes" in error.value.detail or "hash" in error.value.detail
    digest = hashlib.sha256((wheels / "tinypkg-1.0-py3-none-any.whl").read_bytes()).hexdigest()
    write(directory, f"tinypkg==1.0 --hash=sha256:{digest}")
    assert (build(strict, directory) / "tinypkg.py").is_file()


ENTER = """
import subprocess, sys
from pathlib import Path
from serve_app.runtime.package_envs import PackageEnvs
from serve_app.settings import RuntimeSettings
root, model = Path(sys.argv[1]), Path(sys.argv[2])
settings = RuntimeSettings(pip_index_url="none", pip_find_links=(sys.argv[4],))
PackageEnvs(root, settings).activate("m", model, "requirements.txt", sys.argv[3])
import tinypkg
child = subprocess.check_output([sys.executable, "-c", "import tinypkg; print(tinypkg.VERSION)"], text=True)
print(tinypkg.VERSION, child.strip(), flush=True)
sys.stdin.read()
"""


def process(tmp_path: Path, model: Path, digest: str, wheels: Path) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", ENTER, str(tmp_path / "environments"), str(model), digest, str(wheels)]
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.mark.nightly
def test_processes_see_their_own_version_and_share_what_they_can(tmp_path, wheels):
    running = []
    for number, version in enumerate(("1.0", "2.0", "2.0")):
        model = tmp_path / f"model{number}"
        model.mkdir()
        write(model, f"tinypkg=={version}")
        running.append(process(tmp_path, model, version, wheels))
    try:
        assert [p.stdout.readline().strip() for p in running] == ["1.0 1.0", "2.0 2.0", "2.0 2.0"]
        assert len([p for p in (tmp_path / "environments").iterdir() if p.name[0] != "."]) == 2
        assert "tinypkg" not in sys.modules
    finally:
        for p in running:
            p.communicate("")


@pytest.mark.nightly
def test_an_environment_that_nobody_uses_is_removed_after_a_week(kept, directory, wheels, tmp_path):
    write(directory, "tinypkg==1.0")
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
