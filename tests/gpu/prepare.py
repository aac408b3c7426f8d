"""Collect the wheels that the server needs on a machine with a GPU and without a network.

``python -m tests.gpu.prepare`` writes them to ``build/wheels``, for Python 3.12 on x86-64 Linux. The packages
of ``PRESENT`` come with PyTorch and transformers, and are not collected. There, in the project's folder:

    python3 -m pip install --no-index --no-deps --no-compile --target /tmp/site build/wheels/*.whl
    PYTHONPATH=/tmp/site:$PWD python3 -m tests.gpu.check
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.server import ROOT

MAX_MIB = 50  # of all wheels: with the project's files they are copied to the other machine as one upload
# What an environment of PyTorch and transformers has; what these need is there, too.
PRESENT = frozenset(
    """
    accelerate aiohttp annotated-doc anyio attrs click filelock fsspec h11 httpx jinja2 markupsafe msgpack
    numpy packaging pillow prometheus-client psutil pyyaml requests rich safetensors six torch typer
    typing-extensions typing-inspection uvloop wrapt
    """.split()  # noqa: SIM905
)
# These are there, too, with what they need, but perhaps as older releases than constraints.txt has. Generated
# code refuses older ones of the first two, and the handler llm uses internals of transformers.
REPLACED = frozenset(("grpcio", "protobuf", "transformers"))
OMITTED = {
    "captum": "no check explains a prediction",
    "cryptography": "it verifies signed tokens, and no check sends one",
    "nicegui": "no check opens the console",
    "py-spy": "Ray's dashboard reads stacks with it",
    "swagger-ui-py": "no check opens the page /docs",
    "virtualenv": "Ray creates environments of tasks with it",
}
# Files of wheels that no check reads.
UNUSED = {
    "ray": re.compile(r"ray/(jars|dashboard/client|rllib|include|cpp)/"),
    "transformers": re.compile(r"transformers/models/(?!(auto|bert|llama)/)\w+/"),
}
_MANYLINUX = ("1", "2014", *(f"_2_{minor}" for minor in (5, 12, 17, 24, 26, 27, 28, 31, 34)))
_MARKERS = {
    "python_version": "3.12",
    "python_full_version": "3.12.3",
    "platform_system": "Linux",
    "platform_machine": "x86_64",
    "sys_platform": "linux",
}
_COMPRESSED = 1 << 20  # bytes from which a wheel is compressed again


def server_packages() -> set[str]:
    """Return the packages of the extra ``server`` and what they need; of some, only their names are read."""
    found: set[str] = set()
    pending = list(project_requirements("server"))
    while pending:
        required = pending.pop()
        name = canonicalize_name(required.name)
        entry = f"{name}[{','.join(sorted(required.extras))}]"
        if entry in found:
            continue
        found |= {name, entry}
        if name not in PRESENT | REPLACED | OMITTED.keys():
            pending += _applicable(map(Requirement, requires(name) or ()), required.extras)
    return {name for name in found if "[" not in name}


def collected_packages() -> list[str]:
    """Return the names of the wheels to collect."""
    return sorted((server_packages() | REPLACED) - PRESENT - OMITTED.keys())


def project_requirements(extra: str) -> Iterator[Requirement]:
    """Yield the project's dependencies with those of an extra, and of the extras that it names."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pending, optional = [*project["dependencies"]], project["optional-dependencies"]
    pending += optional[extra]
    while pending:
        required = Requirement(pending.pop())
        if required.name == project["name"]:
            pending += [text for name in required.extras for text in optional[name]]
        elif any(_applicable([required], ())):
            yield required


def _applicable(requirements: Iterable[Requirement], extras: Iterable[str]) -> Iterator[Requirement]:
    """Yield the requirements of Python 3.12 on Linux, without extras and with each of ``extras``."""
    environments: list[Mapping[str, str]] = [{**_MARKERS, "extra": extra} for extra in ("", *extras)]
    for required in requirements:
        if required.marker is None or any(map(required.marker.evaluate, environments)):
            yield required


def collect(folder: Path) -> float:
    """Download the wheels into an empty ``folder``; return their size in MiB."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as downloads:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += ["--constraint", str(ROOT / "constraints.txt"), "--dest", downloads]
        command += ["--python-version", "3.12", "--implementation", "cp"]
        command += [part for tag in _MANYLINUX for part in ("--platform", f"manylinux{tag}_x86_64")]
        subprocess.run([*command, *collected_packages()], check=True)
        for wheel in sorted(Path(downloads).glob("*.whl")):
            unused = UNUSED.get(wheel.name.partition("-")[0])
            if unused or wheel.stat().st_size > _COMPRESSED:
                repack(wheel, folder / wheel.name, unused)
            else:
                shutil.copy(wheel, folder)
    return sum(wheel.stat().st_size for wheel in folder.iterdir()) / (1 << 20)


def repack(wheel: Path, target: Path, unused: re.Pattern[str] | None = None) -> None:
    """Copy a wheel without the files ``unused``, compressed by LZMA: a third smaller than by deflate."""

    def is_kept(name: str) -> bool:
        return unused is None or unused.match(name) is None

    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(target, "w") as new:
        for entry in filter(lambda entry: is_kept(entry.filename), old.infolist()):
            content = old.read(entry)
            if entry.filename.endswith(".dist-info/RECORD"):
                lines = content.decode().splitlines(keepends=True)
                content = "".join(filter(is_kept, lines)).encode()
            new.writestr(entry, content, zipfile.ZIP_LZMA)


def main() -> None:
    parser = argparse.ArgumentParser(description="Collect the wheels that a machine without a network needs.")
    parser.add_argument("--output", type=Path, default=ROOT / "build/wheels")
    folder = parser.parse_args().output
    size = collect(folder)
    print(f"{len(list(folder.iterdir()))} wheels, {size:.1f} MiB, in {folder}")
    if size > MAX_MIB:
        raise SystemExit(f"The wheels take more than {MAX_MIB} MiB: omit a package, or parts of one.")


if __name__ == "__main__":
    main()
