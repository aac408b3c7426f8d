"""Virtual environments that contain exactly the wheel, its core packages and some extras."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from collections.abc import Iterator
from importlib.metadata import Distribution, PathDistribution, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]


def build_wheel(folder: Path) -> Path:
    """Build the wheel of this checkout in ``folder``, without a network."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return next(folder.glob("*.whl"))


class CleanEnvironment:
    """A virtual environment with the wheel and what ``pip`` would install with it for some extras.

    The packages are those of the running environment, which has the pinned versions: their files are linked,
    so that no test needs a network or copies torch.
    """

    def __init__(self, folder: Path, wheel: Path, *extras: str) -> None:
        venv.create(folder, with_pip=False, symlinks=True)
        self.bin = folder / "bin"
        self.python = self.bin / "python"
        pip = [sys.executable, "-m", "pip", "--python", str(self.python), "install", "--quiet"]
        subprocess.run([*pip, "--no-deps", "--no-index", "--no-compile", str(wheel)], check=True)
        self._site = next(folder.glob("lib/python*/site-packages"))
        self.packages: set[str] = set()
        for found in _resolve(PathDistribution(next(self._site.glob("torchrelay-*.dist-info"))), set(extras)):
            self.packages.add(canonicalize_name(found.name))
            self._link(found)

    def _link(self, package: Distribution) -> None:
        for file in package.files or ():
            source, target = Path(str(package.locate_file(file))), self._site / file
            if file.parts[0] != ".." and source.exists() and not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                os.symlink(source, target)
        for script in package.entry_points.select(group="console_scripts"):
            path = self.bin / script.name
            path.write_text(
                f"#!{self.python}\nimport sys\nfrom {script.module} import {script.attr.partition('.')[0]}\n"
                f"sys.exit({script.attr}())\n"
            )
            path.chmod(0o755)

    def run(self, *command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        """Run a command of the environment; nothing of this checkout can be imported."""
        hidden = ("PYTHONPATH", "VIRTUAL_ENV", "PATH")
        env = {name: value for name, value in os.environ.items() if name not in hidden}
        env["PATH"] = f"{self.bin}{os.pathsep}{os.environ['PATH']}"
        return subprocess.run(
            [str(self.bin / command[0]), *command[1:]],
            cwd=cwd, env=env, text=True, capture_output=True, timeout=300,
        )  # fmt: skip


def _resolve(root: Distribution, extras: set[str]) -> Iterator[Distribution]:
    """Yield the distributions that ``root`` requires with these extras, each once."""
    pending, seen = [(root, frozenset(extras))], set()
    while pending:
        package, wanted = pending.pop()
        for text in package.requires or ():
            required = Requirement(text)
            environments = [{"extra": extra} for extra in wanted or {""}]
            if required.marker and not any(required.marker.evaluate(e) for e in environments):
                continue
            entry = (canonicalize_name(required.name), frozenset(required.extras))
            if entry not in seen:
                seen.add(entry)
                found = distribution(required.name)
                yield found
                pending.append((found, entry[1]))
