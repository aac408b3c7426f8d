"""Runs the build steps of cluster/Dockerfile, and containers of its targets, in a Debian made by debootstrap.

Each stage is a directory of changes above its parent's, joined by overlayfs. Every step runs in namespaces of
its own, so that its mounts and processes end with it.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "cluster/Dockerfile"
TOOLS = ("debootstrap", "ip", "nsenter", "setpriv", "unshare")
MIRROR = "http://deb.debian.org/debian"
# What the base image has and Debian's smallest system lacks: Python with its headers, and pip.
PACKAGES = "ca-certificates,libpython3.11-dev,python3-pip,python3-wheel,python3.11,python-is-python3"
CERTIFICATES = "etc/ssl/certs/ca-certificates.crt"

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


def missing_tools() -> str:
    """Return why images cannot be built here, or an empty text."""
    absent = [tool for tool in TOOLS if shutil.which(tool) is None]
    if os.geteuid() != 0:
        return "needs root, to make a root file system"
    return f"needs {', '.join(absent)}" if absent else ""


def make_debian(folder: Path) -> Path:
    """Install Debian 12 with Python 3.11 in place of the base image."""
    command = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", str(folder), MIRROR]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if "Failed getting release file" in done.stdout + done.stderr:
        pytest.skip("needs a mirror of Debian")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (folder / "usr/lib/python3.11/EXTERNALLY-MANAGED").unlink()  # the base image has no such mark
    # Debian's images have this option, too: dpkg does not wait for the disk after each file.
    (folder / "etc/dpkg/dpkg.cfg.d/unsafe-io").write_text("force-unsafe-io\n")
    shutil.copy(Path("/", CERTIFICATES), folder / CERTIFICATES)  # with those of a proxy
    return folder


@dataclass
class Stage:
    """A built stage: its layers, lowest first, and the settings of its containers."""

    layers: list[Path]
    env: dict[str, str] = field(default_factory=dict)
    workdir: str = "/"
    user: str = "0:0"
    settings: dict[str, str] = field(default_factory=dict)

    @property
    def top(self) -> Path:
        return self.layers[-1]

    def command(self, name: str) -> list[str]:
        """Return the words of CMD, ENTRYPOINT or the CMD of HEALTHCHECK."""
        return list(json.loads(self.settings[name][self.settings[name].index("[") :]))


class ImageBuilder:
    """Builds stages of the Dockerfile above ``base``.

    Args:
        folder: Receives the layers; not on an overlay file system.
        base: The root file system of the base image.
        arguments: Build arguments, which the steps see as variables.
        wheels: A directory that the steps see as ``/mnt/wheels``.

    """

    def __init__(self, folder: Path, base: Path, arguments: Mapping[str, str], wheels: Path) -> None:
        self._folder, self._base, self._wheels = folder, base, wheels
        self._arguments = dict(arguments)
        self._stages = read_stages()
        self._built: dict[str, Stage] = {}

    def build(self, name: str) -> Stage:
        """Return a stage, which is built after the stages that it uses."""
        if name not in self._built:
            instructions = self._stages[name]
            parent = instructions[0][1].partition(" AS ")[0]
            stage = self._derive(name, parent)
            for word, rest in instructions[1:]:
                self._apply(stage, word, rest)
            self._built[name] = stage
        return self._built[name]

    def _derive(self, name: str, parent: str) -> Stage:
        layer = self._folder / name
        layer.mkdir()
        if parent not in self._stages:
            return Stage([self._base, layer], {"PATH": "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"})
        above = self.build(parent)
        return Stage([*above.layers, layer], dict(above.env), above.workdir, above.user, dict(above.settings))

    def _apply(self, stage: Stage, word: str, rest: str) -> None:
        if word == "RUN":
            self._run(stage, rest)
        elif word == "COPY":
            self._copy(stage, shlex.split(rest))
        elif word == "ENV":
            stage.env.update(pair.partition("=")[::2] for pair in shlex.split(rest))
        elif word == "WORKDIR":
            stage.workdir = rest
            stage.top.joinpath(rest[1:]).mkdir(parents=True, exist_ok=True)
        elif word == "USER":
            stage.user = rest
        else:
            stage.settings[word] = rest

    def _copy(self, stage: Stage, words: Sequence[str]) -> None:
        context = ROOT
        if words[0].startswith("--from="):
            context, words = self.build(words[0].partition("=")[2]).top, words[1:]
        *sources, target = words
        place = stage.top / Path(stage.workdir, target).relative_to("/")
        for source in (context / name.lstrip("/") for name in sources):
            if source.is_dir():  # a directory's contents, a file itself
                shutil.copytree(
                    source, place, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__")
                )
            else:
                file = place / source.name if target.endswith("/") else place
                file.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, file)

    def _run(self, stage: Stage, step: str) -> None:
        work, temporary = self._folder / f"{stage.top.name}.work", self._folder / f"{stage.top.name}.tmp"
        for folder in (work, temporary):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
        lower = ":".join(map(str, reversed(stage.layers[:-1])))
        mounts = [
            f"mount -t overlay overlay -o lowerdir={lower},upperdir={stage.top},workdir={work} $ROOT",
            "mount -t proc proc $ROOT/proc",
            "mount --rbind /dev $ROOT/dev",
            f"mount --bind {temporary} $ROOT/tmp",
            "mkdir -p $ROOT/mnt/wheels",
            f"mount --bind {self._wheels} $ROOT/mnt/wheels",
            "mount --bind /etc/resolv.conf $ROOT/etc/resolv.conf",
        ]
        env = {**stage.env, **self._arguments, "HOME": "/root", "DEBIAN_FRONTEND": "noninteractive"}
        command = enter(self._folder / "root", mounts, env, stage.workdir, "0:0", ["sh", "-c", step])
        done = subprocess.run(command, capture_output=True, text=True, timeout=480, check=False)
        assert done.returncode == 0, f"{step}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
        shutil.rmtree(temporary)


class Container:
    """A process of a stage, as Docker's ``--read-only --cap-drop ALL --network none`` starts it.

    ``volume`` is mounted at the path of VOLUME and receives what the image has there.
    """

    def __init__(self, stage: Stage, folder: Path, volume: Path, output: Path) -> None:
        self._stage = stage
        place = stage.settings["VOLUME"][1:]
        for layer in stage.layers:
            if (layer / place).is_dir():
                shutil.copytree(layer / place, volume, dirs_exist_ok=True)
        user = int(stage.user.partition(":")[0])
        for path in (volume, *volume.rglob("*")):
            os.chown(path, user, user)
        lower = ":".join(map(str, reversed(stage.layers)))
        self._mounts = [
            f"mount -t overlay overlay -o ro,lowerdir={lower} $ROOT",  # without an upper layer: read-only
            "mount -t proc proc $ROOT/proc",
            "mount --rbind /dev $ROOT/dev",
            "mount -t tmpfs tmpfs $ROOT/dev/shm",
            "mount -t tmpfs tmpfs $ROOT/tmp",
            f"mount -t tmpfs -o uid={user},gid={user} tmpfs $ROOT/home/torchrelay",
            f"mount --bind {volume} $ROOT/{place}",
            "ip link set lo up",
        ]
        self._env = {**stage.env, "HOME": "/home/torchrelay"}
        words = [*stage.command("ENTRYPOINT"), *stage.command("CMD")]
        command = enter(folder, self._mounts, self._env, stage.workdir, stage.user, words, "--net")
        with output.open("wb") as file:
            self._process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        self._output = output
        self._first = self._wait_for_first()

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def logs(self) -> str:
        """Return the end of what the container wrote."""
        return self._output.read_text(errors="replace")[-4000:]

    def exec(self, *words: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        """Run a command inside, as the same user."""
        command = [
            "nsenter",
            f"--target={self._first}",
            "--all",
            "--root",
            "--wd",
            *limit(self._stage.user),
        ]
        return subprocess.run(
            [*command, *export(self._env), *words], input=stdin, capture_output=True, timeout=120, check=False
        )

    def stop(self) -> int:
        """Send the image's STOPSIGNAL and return the exit status; end the namespace after 60 s."""
        os.kill(self._first, signal.Signals[self._stage.settings["STOPSIGNAL"]])
        try:
            return self._process.wait(60)
        finally:
            self.close()

    def _wait_for_first(self) -> int:
        """Return the container's first process, as this machine numbers it, when it has changed its root."""
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        deadline = time.monotonic() + 30
        while True:
            assert self.running and time.monotonic() < deadline, self.logs()
            found = children.read_text().split()
            if found and not os.path.samefile(f"/proc/{found[0]}/root", "/"):
                return int(found[0])
            time.sleep(0.01)

    def close(self) -> None:
        self._process.kill()  # unshare --kill-child ends everything inside
        self._process.wait()


def enter(
    folder: Path,
    mounts: Sequence[str],
    env: Mapping[str, str],
    workdir: str,
    user: str,
    words: Sequence[str],
    *namespaces: str,
) -> list[str]:
    """Return the command that runs ``words`` as ``user`` in a root with these mounts."""
    folder.mkdir(exist_ok=True)
    inside = f"cd {shlex.quote(workdir)} && exec {shlex.join([*limit(user), *export(env), *words])}"
    script = "\n".join(["set -e", *mounts, f"exec chroot $ROOT sh -c {shlex.quote(inside)}"])
    unshare = ["unshare", "--mount", "--pid", "--ipc", *namespaces, "--fork", "--kill-child"]
    return ["env", f"ROOT={folder}", *unshare, "sh", "-c", script]


def limit(user: str) -> list[str]:
    """Return the command that takes the rights of root, unless ``user`` is root."""
    name, _, group = user.partition(":")
    if name == "0":
        return []
    rights = ["--no-new-privs", "--bounding-set=-all", "--inh-caps=-all"]
    return ["setpriv", f"--reuid={name}", f"--regid={group}", "--clear-groups", *rights]


def export(env: Mapping[str, str]) -> list[str]:
    """Return the command that sets exactly these variables."""
    return ["env", "-i", *(f"{name}={value}" for name, value in env.items())]
