"""Lock the image's packages with the hashes of their files, from pyproject.toml and constraints.txt.

``python cluster/lock.py`` writes ``requirements/``: ``common.lock``, ``onnx.lock`` or ``gpu.lock`` for
RUNTIME, and ``cuda.lock`` with the CUDA libraries of torch, which its CPU build does not need. uv resolves
for Python 3.11 on x86-64 Linux, the image's. ``--torch-cpu`` names the CPU build's wheel, where PyTorch's
index is not reachable.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import httpx

ROOT = Path(__file__).parents[1]
LOCKS = Path(__file__).with_name("requirements")
EXTRAS = ("server", "gcs", "hf", "otel", "postgres", "s3")
RUNTIMES = ("onnx", "gpu")
PLATFORM = ("--python-version", "3.11", "--python-platform", "x86_64-manylinux_2_28")
TORCH_INDEX = "https://download.pytorch.org/whl/cpu/torch/"
HEADER = "# Written by cluster/lock.py. Install with pip install --require-hashes; do not edit.\n"

_CUDA = re.compile(r"(nvidia|cuda)-|triton==")
_BUILD = re.compile(r'requires = \["(.+?)"\]')


def compile_lock(runtime: str) -> dict[str, str]:
    """Resolve the packages of the image; return their entries by name."""
    build = _BUILD.search((ROOT / "pyproject.toml").read_text())
    assert build is not None
    with tempfile.TemporaryDirectory() as folder:
        # The build backend too: it runs without isolation, so that nothing is fetched without a hash.
        (Path(folder) / "build.in").write_text(build[1])
        done = subprocess.run(
            [
                *(sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--generate-hashes"),
                *("--no-header", "--no-annotate", "--constraint", str(ROOT / "constraints.txt"), *PLATFORM),
                *(option for extra in (*EXTRAS, runtime) for option in ("--extra", extra)),
                *(str(ROOT / "pyproject.toml"), f"{folder}/build.in"),
            ],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
    entries = re.split(r"\n(?=\S)", done.stdout.strip())
    return {entry.partition("==")[0]: entry for entry in entries}


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


def add_torch_cpu(entry: str, wheel: Path | None) -> str:
    """Return the entry of torch with the hash of its CPU build beside those of PyPI's builds."""
    version = re.match(r"torch==([\w.]+)", entry)
    assert version is not None
    return f"{entry} \\\n    --hash=sha256:{find_cpu_hash(version[1], wheel)}"


def main() -> None:
    """Write the locks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch-cpu", type=Path, help="the wheel of torch's CPU build")
    wheel = parser.parse_args().torch_cpu
    locks = {runtime: compile_lock(runtime) for runtime in RUNTIMES}
    shared = locks["onnx"].items() & locks["gpu"].items()
    files: dict[str, dict[str, str]] = {place: {} for place in ("common", "cuda", *RUNTIMES)}
    for runtime, entries in locks.items():
        for name, entry in entries.items():
            place = runtime if (name, entry) not in shared else "cuda" if _CUDA.match(entry) else "common"
            files[place][name] = entry
    files["common"]["torch"] = add_torch_cpu(files["common"]["torch"], wheel)
    LOCKS.mkdir(exist_ok=True)
    for place, entries in files.items():
        (LOCKS / f"{place}.lock").write_text(HEADER + "\n".join(entries.values()) + "\n")


if __name__ == "__main__":
    main()
