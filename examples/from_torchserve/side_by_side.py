"""Run one installation under TorchServe 0.12 and then under Torchrelay, and compare the responses.

``python side_by_side.py`` starts both with the same command line, one after the other. It needs Java 17 and
TorchServe (``--torchserve PYTHON`` names the interpreter that has it). With ``--recorded`` only Torchrelay is
started, and compared with the responses of an earlier run (``torchserve-0.12.0.json``). Exits with 1 if a
response has a difference that is not explained below.
"""

import argparse
import difflib
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from build import build
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
RECORD = HERE / "torchserve-0.12.0.json"
COMMAND = [
    "--start",
    "--ts-config",
    "config.properties",
    "--model-store",
    "model_store",
    "--no-config-snapshots",
]

# Fields that differ between two runs of one server.
VOLATILE = {"startTime", "memoryUsage", "pid", "id", "modelUrl"}
# Fields that Torchrelay adds to a description; a client of TorchServe does not read them.
ADDED = {"handler", "memory", "node", "sha256"}

# Intended differences of Torchrelay: the reason, and the exact lines.
EXPLAINED = {
    "health without a token": (
        "Health routes need no token, so that probes work; TorchServe rejects them.",
        [
            "- 400",
            '-  "code": 400,',
            '-  "type": "InvalidKeyException",',
            '-  "message": "Token Authorization failed. Token either incorrect, expired, '
            'or not provided correctly"',
            "+ 200",
            '+  "status": "Healthy"',
        ],
    ),
    "register it again": (
        "A version that is registered already is reported as a conflict (409); TorchServe fails on the copy "
        "of the archive in its own model store (500).",
        [
            "- 500",
            '-  "code": 500,',
            '-  "type": "InternalServerException",',
            '-  "message": "Model file already exists words-2.0.mar"',
            "+ 409",
            '+  "code": 409,',
            '+  "type": "ConflictStatusException",',
            '+  "message": "Model version 2.0 is already registered for model words"',
        ],
    ),
    "describe all": (
        "Each replica has its own queue, so two of them accept twice as many rows. And a version that was "
        "registered at run time was not loaded at start-up; TorchServe reports that it was.",
        [
            '-    "remainingCapacity": 50,',
            '+    "remainingCapacity": 100,',
            '-   "loadedAtStartup": true,',
            '+   "loadedAtStartup": false,',
        ],
    ),
}


class RunFailed(Exception):
    """A server or the client failed."""


def prepare_installation(folder: Path, archives: Path, ports: list[int]) -> None:
    """Copy the installation to ``folder``, with ``ports`` in its configuration."""
    shutil.copytree(HERE / "installation", folder)
    for name in ("model_store", "later"):
        shutil.copytree(archives.parent / name, folder / name, dirs_exist_ok=True)
    config = folder / "config.properties"
    text = config.read_text()
    for default_port, port in zip((8080, 8081, 8082), ports):
        text = text.replace(f":{default_port}", f":{port}")
    config.write_text(text)


def record_steps(command: list[str], folder: Path, ports: list[int], console: Console) -> list[dict]:
    """Start the server of ``command`` in ``folder``, run the client, stop it, and return the steps."""
    temporary = folder / "tmp"
    temporary.mkdir()
    # A separate folder for the pid file and TorchServe's sockets.
    env = {**os.environ, "TEMP": str(temporary), "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"}
    inference, management, metrics = (f"http://127.0.0.1:{port}" for port in ports)
    console.print(f"$ torchserve {' '.join(COMMAND)}", highlight=False)
    try:
        with (folder / "server.log").open("wb") as log:
            subprocess.run([*command, *COMMAND], cwd=folder, env=env, stdout=log, stderr=log, timeout=180)
        client = [sys.executable, "client.py", inference, management, metrics, str(folder)]
        result = subprocess.run(client, cwd=folder, capture_output=True, text=True, timeout=300)
        if result.returncode:
            raise RunFailed(f"{result.stderr}\n{(folder / 'server.log').read_text(errors='replace')[-3000:]}")
        return json.loads(result.stdout)
    finally:
        console.print("$ torchserve --stop", highlight=False)
        stop = subprocess.run(
            [*command, "--stop"], cwd=folder, env=env, capture_output=True, text=True, timeout=120
        )
        console.print(stop.stdout.strip(), highlight=False)


def normalize(step: dict, other: dict | None = None) -> str:
    """Return a response without volatile values, and with the numbers of ``other`` where they are close."""
    body = step["body"]
    if step["step"] in ("metrics", "some metrics"):
        body = _normalize_metrics(body)
    else:
        try:
            value, other_value = _load(step), _load(other or step)
            body = json.dumps(_normalize_value(value, other_value), indent=1)
        except ValueError:
            pass
    kept = ("content-type", "x-words", "access-control-allow-origin", "access-control-allow-methods")
    headers = [f"{name}: {step['headers'][name]}" for name in kept if name in step["headers"]]
    return "\n".join([str(step["status"]), *headers, body])


def _load(step: dict):
    """Return the document of a response; versions are sorted, as TorchServe's have no order."""
    value = json.loads(step["body"])
    return sorted(value, key=lambda each: each["modelVersion"]) if step["step"] == "describe all" else value


def _normalize_value(value, other):
    if isinstance(value, dict):
        others = other if isinstance(other, dict) else {}
        return {
            key: "…" if key in VOLATILE else _normalize_value(item, others.get(key))
            for key, item in value.items()
            if key not in ADDED
        }
    if isinstance(value, list):
        others = other if isinstance(other, list) and len(other) == len(value) else [None] * len(value)
        return [_normalize_value(item, other_item) for item, other_item in zip(value, others)]
    if (
        isinstance(value, float)
        and isinstance(other, float)
        and math.isclose(value, other, rel_tol=1e-4, abs_tol=1e-6)
    ):
        return other
    return value


def _normalize_metrics(page: str) -> str:
    """Return the names, types and labels of TorchServe's metrics, and the values of request counters."""
    lines = []
    for line in page.splitlines():
        if line.startswith("# ") or "torchrelay_" in line:
            kept = line if line.startswith("# TYPE") and "torchrelay_" not in line else ""
        else:
            name, _, rest = line.partition("{")
            labels, _, value = rest.rpartition("} ")
            labels = re.sub(r'(Hostname|hostname|WorkerName)="[^"]*"', r'\1="…"', labels)
            is_counter = name in ("WordsSeen", "ts_inference_requests_total")
            kept = f"{name}{{{labels}}}" + (f" {value}" if is_counter else "")
        if kept and kept not in lines:
            lines.append(kept)
    return "\n".join(sorted(lines))


def compare(expected_steps: list[dict], actual_steps: list[dict], console: Console) -> list[str]:
    """Print all steps, and return those with unexplained differences."""
    table = Table(title="One installation, one client", show_lines=True)
    for column in ("step", "TorchServe 0.12", "Torchrelay", ""):
        table.add_column(column, overflow="fold")
    unexplained = []
    different = []
    for expected_step, actual_step in zip(expected_steps, actual_steps, strict=True):
        if actual_step["port"] != "inference":
            expected_step = {**expected_step, "headers": _without_cors(expected_step["headers"])}
        left, right = normalize(expected_step), normalize(actual_step, expected_step)
        step = expected_step["step"]
        if left == right:
            table.add_row(step, _short(left), "the same", "[green]=[/green]")
            continue
        difference = _difference(left, right)
        reason, expected = EXPLAINED.get(step, ("", []))
        is_explained = sorted(difference) == sorted(expected)
        verdict = "[yellow]explained[/yellow]" if is_explained else "[red]differs[/red]"
        table.add_row(step, _short(left), _short(right), verdict)
        different.append((step, difference, reason if is_explained else "[red]not explained[/red]"))
        if not is_explained:
            unexplained.append(step)
    console.print(table)
    for step, difference, reason in different:
        console.rule(step)
        console.print(reason, highlight=False)
        for line in difference:
            console.print(line, style="red" if line[0] == "-" else "green", markup=False, highlight=False)
    same = len(expected_steps) - len(different)
    console.print(
        f"\n{len(expected_steps)} requests: {same} answered the same, "
        f"{len(different) - len(unexplained)} otherwise and explained, "
        f"{len(unexplained)} otherwise and not explained."
    )
    return unexplained


def _without_cors(headers: dict) -> dict:
    """Remove the headers that Torchrelay sends on the inference port only, TorchServe on all three."""
    return {name: value for name, value in headers.items() if not name.startswith("access-control-")}


def _difference(left: str, right: str) -> list[str]:
    lines = difflib.ndiff(left.splitlines(), right.splitlines())
    return [line for line in lines if line[0] in "-+"]


def _short(text: str) -> str:
    lines = text.splitlines()
    return "\n".join(lines[:6] + (["…"] if len(lines) > 6 else []))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--torchserve", metavar="PYTHON", default="", help="the interpreter that has TorchServe"
    )
    parser.add_argument("--recorded", action="store_true", help=f"compare with {RECORD.name}")
    parser.add_argument(
        "--record", action="store_true", help=f"write TorchServe's answers into {RECORD.name}"
    )
    parser.add_argument(
        "--ports", metavar="N,N,N", default="8080,8081,8082", help="inference, management, metrics"
    )
    args = parser.parse_args()
    ports = [int(port) for port in args.ports.split(",")]
    console = Console(width=150)
    with tempfile.TemporaryDirectory(prefix="torchserve-") as directory:
        store = Path(directory, "archives", "model_store")
        console.print("Building the archives …")
        build(store)

        def run(name: str, command: list[str]) -> list[dict]:
            console.print(f"[bold]{name}[/bold]")
            folder = Path(directory, name)
            prepare_installation(folder, store, ports)
            return record_steps(command, folder, ports, console)

        try:
            if args.recorded:
                expected = json.loads(RECORD.read_text())
            else:
                python = args.torchserve or _install_torchserve()
                expected = run("TorchServe", [python, "-m", "ts.model_server"])
                if args.record:
                    RECORD.write_text(json.dumps(expected, indent=1) + "\n")
            actual = run("Torchrelay", [sys.executable, "-m", "serve_app.cli.torchserve"])
        except (RunFailed, subprocess.SubprocessError) as error:
            sys.exit(str(error))
    sys.exit(1 if compare(expected, actual, console) else 0)


def _install_torchserve() -> str:
    """Return the interpreter of the benchmark's TorchServe, and install it if it is missing."""
    from tests.benchmarks import environments, servers

    try:
        servers.java_version()
        return str(environments.interpreter("torchserve"))
    except environments.PeerFailed as error:
        sys.exit(f"{error}\nCompare with the recorded answers instead: --recorded")


if __name__ == "__main__":
    main()
