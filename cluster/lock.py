"""Lock the packages of the image's targets with the hashes of their files.

``python cluster/lock.py`` resolves ``pyproject.toml`` and ``constraints.txt`` into ``requirements/``.
``common.lock`` has what the targets ``cpu`` and ``gpu`` share, a lock of each name the rest. ``llm.lock``
is the whole target ``llm``, whose versions ``llm.in`` constrains: vLLM requires another torch.
``build.lock`` has the build backends, ``source.lock`` the packages without wheels. uv resolves for Python
3.11 on x86-64 Linux, the image's. ``--torch-cpu`` names the wheel of torch's CPU build, where PyTorch's
index is not reachable.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import httpx

ROOT = Path(__file__).parents[1]
LOCKS = Path(__file__).with_name("requirements")
LLM = LOCKS / "llm.in"
EXTRAS = ("server", "gcs", "hf", "llm", "otel", "postgres", "s3")
TARGETS = {"cpu": (*EXTRAS, "onnx"), "gpu": (*EXTRAS, "gpu", "deepspeed"), "llm": EXTRAS}
# In the order in which the Dockerfile installs them.
IMAGES = {"cpu": ("common", "cpu"), "gpu": ("common", "gpu", "source"), "llm": ("llm",)}
BUILDERS = ("hatchling", "setuptools", "wheel")
SOURCES = ("deepspeed",)  # published without wheels
PLATFORM = ("--python-version", "3.11", "--python-platform", "x86_64-manylinux_2_28")
TORCH_INDEX = "https://download.pytorch.org/whl/cpu/torch/"
HEADER = "# Written by cluster/lock.py. Install with pip install --require-hashes; do not edit.\n"

_CUDA = re.compile(r"(nvidia|cuda)-|triton==")

Entries = dict[str, str]


def compile_lock(*inputs: str | Path, extras: tuple[str, ...] = (), pinned: bool = True) -> Entries:
    """Resolve requirement files; return the entries by name.

    The versions of constraints.txt are required, or preferred where ``pinned`` is false.
    """
    constraints = ROOT / "constraints.txt"
    with tempfile.TemporaryDirectory() as folder:
        lock = Path(folder) / "lock.txt"
        if not pinned:
            shutil.copy(constraints, lock)  # uv keeps the versions of an earlier lock where it can
        command = [
            *(sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--generate-hashes", "--no-header"),
            *("--no-annotate", *PLATFORM, "--output-file", str(lock)),
            *(("--constraint", str(constraints)) if pinned else ()),
            *(option for extra in extras for option in ("--extra", extra)),
            *map(str, inputs),
        ]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        entries = re.split(r"\n(?=\S)", lock.read_text().strip())
    return {entry.partition("==")[0]: entry for entry in entries}


def compile_builders() -> Entries:
    """Resolve the build backends, which run without isolation: nothing is fetched without a hash."""
    with tempfile.TemporaryDirectory() as folder:
        requirements = Path(folder) / "build.in"
        requirements.write_text("\n".join(BUILDERS))
        return compile_lock(requirements)


def find_cpu_hash(version: str, wheel: Path | None) -> str:
    """Return the SHA-256 of the CPU build of torch, from a wheel or from PyTorch's index."""
    name = f"torch-{version}+cpu-cp311-cp311-manylinux_2_28_x86_64.whl"
    if wheel is not None:
        if wheel.name != name:
            raise SystemExit(f"{wheel.name} is another build; the lock needs {name}")
        return hashlib.sha256(wheel.read_bytes()).hexdigest()
    page = httpx.get(TORCH_INDEX, timeout=30, follow_redirects=True).raise_for_status().text
    found = re.search(re.escape(name.replace("+", "%2B")) + r"#sha256=([0-9a-f]{64})", page)
    if found is None:
        raise SystemExit(f"{TORCH_INDEX} has no {name} with a hash")
    return found[1]


def lock_torch_cpu(entry: str, wheel: Path | None) -> str:
    """Return the entry of torch's CPU build instead of PyPI's build, which needs CUDA's libraries."""
    found = re.match(r"torch==([\w.]+)", entry)
    assert found is not None
    return f"torch=={found[1]}+cpu \\\n    --hash=sha256:{find_cpu_hash(found[1], wheel)}"


def split_locks(cpu: Entries, gpu: Entries) -> dict[str, Entries]:
    """Divide the entries of two targets into common ones, those of one target and sources."""
    cpu = {name: entry for name, entry in cpu.items() if not _CUDA.match(entry)}
    common = {name: entry for name, entry in cpu.items() if gpu.get(name) == entry}
    rest = {name: entry for name, entry in gpu.items() if name not in common}
    return {
        "common": common,
        "cpu": {name: entry for name, entry in cpu.items() if name not in common},
        "gpu": {name: entry for name, entry in rest.items() if name not in SOURCES},
        "source": {name: rest[name] for name in SOURCES},
    }


def write_locks(wheel: Path | None) -> None:
    """Resolve the packages of all targets and write their locks."""
    project = ROOT / "pyproject.toml"
    cpu, gpu = (compile_lock(project, extras=TARGETS[target]) for target in ("cpu", "gpu"))
    cpu["torch"] = lock_torch_cpu(cpu["torch"], wheel)
    locks = split_locks(cpu, gpu)
    locks["llm"] = compile_lock(project, LLM, extras=TARGETS["llm"], pinned=False)
    locks["build"] = compile_builders()
    for place, entries in locks.items():
        (LOCKS / f"{place}.lock").write_text(HEADER + "\n".join(entries.values()) + "\n")


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch-cpu", type=Path, help="the wheel of torch's CPU build")
    parser.add_argument("--print", choices=IMAGES, help="print the locks of a target and write nothing")
    options = parser.parse_args()
    if options.print:
        print("".join((LOCKS / f"{place}.lock").read_text() for place in IMAGES[options.print]))
    else:
        write_locks(options.torch_cpu)


if __name__ == "__main__":
    main()
