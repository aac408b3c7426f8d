"""Images of cluster/Dockerfile, built by buildah, and their containers, run by podman.

The base image is made by mmdebstrap, under the name that the Dockerfile has, because no registry is needed
then. Everything stays in ``STORE``, so that the next build repeats only the steps whose input has changed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from cluster import lock

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "cluster/Dockerfile"
STORE = Path(os.environ.get("TORCHRELAY_IMAGES", "/var/tmp/torchrelay-images"))
TOOLS = ("buildah", "mmdebstrap", "podman", "runc")
MIRROR = "http://deb.debian.org/debian"
# What the base image has and Debian's smallest system lacks: Python with its headers, and pip.
PACKAGES = "ca-certificates,libpython3.11-dev,python3-pip,python3-wheel,python3.11,python-is-python3"
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
BUILD_TIMEOUT = 1500  # seconds; the packages are downloaded

Instruction = tuple[str, str]


def read_stages(dockerfile: Path = DOCKERFILE) -> dict[str, list[Instruction]]:
    """Return the instructions of each stage by its name; those before the first are under the empty name."""
    text = re.sub(r"^\s*#.*\n", "", dockerfile.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    stages: dict[str, list[Instruction]] = {"": []}
    for word, _, rest in (line.partition(" ") for line in text.splitlines() if line):
        if word == "FROM":
            stages[rest.rpartition(" AS ")[2]] = []
        next(reversed(stages.values())).append((word, " ".join(rest.split())))
    return stages


def read_target(name: str) -> list[Instruction]:
    """Return the instructions of a stage after those of its parents."""
    stages = read_stages()
    parent = stages[name][0][1].partition(" AS ")[0]
    return [*(read_target(parent) if parent in stages else []), *stages[name][1:]]


def base_name() -> str:
    """Return the name of the base image."""
    [name] = [rest.partition("=")[2] for word, rest in read_stages()[""] if rest.startswith("BASE_IMAGE=")]
    return name


def missing_tools() -> str:
    """Return why images cannot be built here, or an empty text."""
    absent = [tool for tool in TOOLS if shutil.which(tool) is None]
    if os.geteuid() != 0:
        return "needs root, to make a root file system"
    return f"needs {', '.join(absent)}" if absent else ""


def make_debian(archive: Path) -> None:
    """Write the root file system of the base image as a tar archive: Debian 12 with Python 3.11."""
    changes = (
        "rm $1/usr/lib/python3.11/EXTERNALLY-MANAGED",  # the base image has no such mark
        # Debian's images have this option, too: dpkg does not wait for the disk after each file.
        "echo force-unsafe-io >$1/etc/dpkg/dpkg.cfg.d/unsafe-io",
        f"cp {CERTIFICATES} $1{CERTIFICATES}",  # with those of a proxy
    )
    options = (
        "--variant=minbase",
        f"--include={PACKAGES}",
        *(f"--customize-hook={step}" for step in changes),
    )
    command = ["mmdebstrap", *options, "bookworm", str(archive), MIRROR]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if "E: apt-get update" in done.stderr:
        pytest.skip("needs a mirror of Debian")
    assert done.returncode == 0, done.stderr[-4000:]


def download_torch(folder: Path) -> None:
    """Download the CPU build of torch that the lock names, and write an index of it to ``index``.

    pip finds the wheel by its own configuration where PyTorch's index is not reachable.
    """
    [pin] = re.findall(r"^torch==\S+", (lock.LOCKS / "cpu.lock").read_text(), re.MULTILINE)
    page = folder / "index/torch/index.html"
    name = pin.replace("==", "-")
    if page.exists() and name in page.read_text():
        return
    shutil.rmtree(folder, ignore_errors=True)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "download", "--no-deps", "--retries", "0", "--dest", str(folder)),
            *("--only-binary", ":all:", "--python-version", "3.11", "--platform", "manylinux_2_28_x86_64"),
            *("--extra-index-url", TORCH_INDEX, pin),
        ],
        capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        pytest.skip(f"needs a download of {pin}: {done.stderr[-200:]}")
    [wheel] = folder.glob("torch-*.whl")
    page.parent.mkdir(parents=True)
    page.write_text(f'<a href="../../{wheel.name}">{wheel.name}</a>')


def run(*words: str | Path, timeout: float = 120) -> str:
    """Run a command, which must succeed, and return its output without the line end."""
    done = execute(*words, timeout=timeout)
    errors = done.stderr.decode(errors="replace")
    assert done.returncode == 0, f"{words}: {done.stdout[-2000:].decode(errors='replace')}{errors[-4000:]}"
    return done.stdout.decode().rstrip("\n")


def execute(
    *words: str | Path, timeout: float = 120, stdin: bytes = b""
) -> subprocess.CompletedProcess[bytes]:
    """Run a command and return its result."""
    env = {**os.environ, "DISABLE_HC_SYSTEMD": "true"}  # podman's health checks would need systemd
    command = list(map(str, words))
    return subprocess.run(command, input=stdin, env=env, capture_output=True, timeout=timeout, check=False)


def _allowed(limit: int) -> int:
    """Return a limit that every runtime may set: podman's own defaults may exceed those of this process."""
    hard = resource.getrlimit(limit)[1]
    return 10_000 if hard == resource.RLIM_INFINITY else min(hard, 10_000)


def ulimits() -> list[str]:
    """Return the limits of a container as podman's options and configuration write them."""
    limits = [("nofile", resource.RLIMIT_NOFILE), ("nproc", resource.RLIMIT_NPROC)]
    return [f"{name}={_allowed(limit)}:{_allowed(limit)}" for name, limit in limits]


class Images:
    """The images of the Dockerfile's targets, in a folder."""

    def __init__(self, folder: Path = STORE) -> None:
        self._folder = folder
        self._storage = (
            *("--root", folder / "storage", "--runroot", folder / "run"),
            *("--storage-driver", "overlay"),
        )
        self.podman = (
            *("podman", *self._storage, "--runtime", "runc", "--cgroup-manager", "cgroupfs"),
            *("--tmpdir", folder / "libpod", "--events-backend", "none"),
        )
        self.buildah = ("buildah", *self._storage)

    @cached_property
    def base(self) -> str:
        """The name of the base image, which is made if it does not exist."""
        name = f"docker.io/library/{base_name()}"
        if not run(*self.podman, "images", "--quiet", name):
            archive = self._folder / "debian.tar"
            make_debian(archive)
            path = "ENV PATH=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin"
            run(*self.podman, "import", "--change", path, archive, name, timeout=300)
            archive.unlink()
        return name

    def build(self, target: str, context: Path = ROOT) -> str:
        """Build a target as a user does, and return the name of its image."""
        wheels, name = self._folder / "wheels", f"localhost/torchrelay:{target}"
        assert self.base
        download_torch(wheels)
        run(
            *(*self.buildah, "build", "--isolation", "chroot", "--format", "docker", "--layers"),
            *("--pull-never", "--volume", f"{wheels}:/torch:ro"),
            *("--build-arg", "TORCH_INDEX=file:///torch/index"),
            *("--ignorefile", context / "cluster/Dockerfile.dockerignore"),
            *("--file", context / "cluster/Dockerfile", "--target", target, "--tag", name, context),
            timeout=BUILD_TIMEOUT,
        )
        return name

    @contextlib.contextmanager
    def mounted(self, image: str) -> Iterator[Path]:
        """Mount the files of an image for reading."""
        yield Path(run(*self.podman, "image", "mount", image))
        run(*self.podman, "image", "unmount", image)

    def remove_containers(self) -> None:
        """Remove all containers and volumes, also those of an aborted run."""
        run(*self.podman, "rm", "--all", "--force", "--volumes")
        run(*self.podman, "volume", "prune", "--force")

    def inspect(self, name: str) -> dict[str, Any]:
        """Return the description of an image or a container."""
        [found] = json.loads(run(*self.podman, "inspect", name))
        return dict(found)


class Container:
    """A container of an image, started by ``podman run`` with these options.

    It has a network of its own, without other machines, so that its ports are free, or that of ``network``.
    """

    def __init__(
        self,
        images: Images,
        image: str,
        *options: str,
        command: Sequence[str] = (),
        network: str = "none",
    ) -> None:
        self.image = image
        self._images, self._podman = images, images.podman
        limits = (f"--ulimit={limit}" for limit in ulimits())
        words = ("run", "--detach", "--network", network, *limits, *options, image, *command)
        self.id = run(*self._podman, *words)

    @property
    def state(self) -> dict[str, Any]:
        return dict(self._images.inspect(self.id)["State"])

    def logs(self) -> str:
        """Return the end of what the container wrote."""
        done = execute(*self._podman, "logs", "--tail", "60", self.id)
        return (done.stdout + done.stderr).decode(errors="replace")

    def exec(self, *words: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        """Run a command inside, as the same user."""
        return execute(*self._podman, "exec", "--interactive", self.id, *words, stdin=stdin)

    def wait_until_healthy(self, timeout: float = 600) -> None:
        """Run the image's health check until it succeeds."""
        deadline = time.monotonic() + timeout
        while self.health() != 0:
            assert self.state["Running"] and time.monotonic() < deadline, self.logs()
            time.sleep(0.5)

    def health(self) -> int:
        """Return the exit status of the image's health check."""
        return execute(*self._podman, "healthcheck", "run", self.id).returncode

    def stop(self, timeout: int = 10) -> int:
        """Send the stop signal, kill the container after ``timeout`` seconds, and return its exit code."""
        run(*self._podman, "stop", "--time", str(timeout), self.id, timeout=timeout + 60)
        return int(self.state["ExitCode"])

    def kill(self) -> None:
        """Kill every process of the container at once."""
        run(*self._podman, "kill", "--signal", "KILL", self.id)
        run(*self._podman, "wait", self.id)

    def start(self) -> None:
        """Start a stopped container again, with its files."""
        run(*self._podman, "start", self.id)

    def remove(self) -> None:
        run(*self._podman, "rm", "--force", "--volumes", self.id)
