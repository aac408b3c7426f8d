"""Runs one installation first under TorchServe 0.12 and then under Torchrelay, and lays the answers side by side.

``python side_by_side.py`` starts both with the same command line, one after the other, and needs Java 17 and
TorchServe (``--torchserve PYTHON`` names the interpreter that has it). With ``--recorded`` TorchServe's answers are
those that were written down on an earlier run (``torchserve-0.12.0.json``), and nothing but Torchrelay is started.
Ends with 1 when an answer differs that is not among the differences explained below.
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
COMMAND = ["--start", "--ts-config", "config.properties", "--model-store", "model_store", "--no-config-snapshots"]

# What differs from one run of one server to the next.
VOLATILE = {"startTime", "memoryUsage", "pid", "id", "modelUrl"}

# Where Torchrelay answers otherwise, on purpose: why, and the very lines.
EXPLAINED = {
    "health without a token": (
        "Health routes need no token, so that a probe works; TorchServe refuses them.",
        [
            "- 400",
            '-  "code": 400,',
            '-  "type": "InvalidKeyException",',
            '-  "message": "Token Authorization failed. Token either incorrect, expired, or not provided correctly"',
            "+ 200",
            '+  "status": "Healthy"',
        ],
    ),
    "register it again": (
        "A version that is there already is said to be (409); TorchServe trips over the copy of the archive that it "
        "has put into its model store (500).",
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
        "Each replica has a queue of its own, so two of them have room for twice as many rows. And a version that was "
        "registered at run time was not loaded at start-up; TorchServe says that it was.",
        [
            '-    "remainingCapacity": 50,',
            '+    "remainingCapacity": 100,',
            '-   "loadedAtStartup": true,',
            '+   "loadedAtStartup": false,',
        ],
    ),
}


class Failed(Exception):
    """A server or the client did not do its part."""


def installed(folder: Path, archives: Path, ports: list[int]) -> None:
    """The installation's files in ``folder``, listening on ``ports``."""
    shutil.copytree(HERE / "installation", folder)
    for name in ("model_store", "later"):
        shutil.copytree(archives.parent / name, folder / name, dirs_exist_ok=True)
    config = folder / "config.properties"
    text = config.read_text()
    for usual, port in zip((8080, 8081, 8082), ports):
        text = text.replace(f":{usual}", f":{port}")
    config.write_text(text)


def answers(command: list[str], folder: Path, ports: list[int], console: Console) -> list[dict]:
    """What the client was told by the server that ``command`` starts in ``folder``; the server is stopped again."""
    temporary = folder / "tmp"
    temporary.mkdir()
    # Its pid file, and for TorchServe its sockets, are in a folder of their own.
    env = {**os.environ, "TEMP": str(temporary), "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"}
    inference, management, metrics = (f"http://127.0.0.1:{port}" for port in ports)
    console.print(f"$ torchserve {' '.join(COMMAND)}", highlight=False)
    try:
        with (folder / "server.log").open("wb") as log:
            subprocess.run([*command, *COMMAND], cwd=folder, env=env, stdout=log, stderr=log, timeout=180)
        client = [sys.executable, "client.py", inference, management, metrics, str(folder)]
        done = subprocess.run(client, cwd=folder, capture_output=True, text=True, timeout=300)
        if done.returncode:
            raise Failed(f"{done.stderr}\n{(folder / 'server.log').read_text(errors='replace')[-3000:]}")
        return json.loads(done.stdout)
    finally:
        console.print("$ torchserve --stop", highlight=False)
        stop = subprocess.run([*command, "--stop"], cwd=folder, env=env, capture_output=True, text=True, timeout=120)
        console.print(stop.stdout.strip(), highlight=False)


def settled(step: dict, other: dict | None = None) -> str:
    """An answer without what differs from run to run; a number is that of ``other`` where the two are close."""
    body = step["body"]
    if step["step"] in ("metrics", "some metrics"):
        body = _metrics(body)
    else:
        try:
            said = json.loads(body)
            body = json.dumps(_settled(said, json.loads(other["body"]) if other else said), indent=1)
        except ValueError:
            pass
    kept = ("content-type", "x-words", "access-control-allow-origin", "access-control-allow-methods")
    headers = [f"{name}: {step['headers'][name]}" for name in kept if name in step["headers"]]
    return "\n".join([str(step["status"]), *headers, body])


def _settled(value, other):
    if isinstance(value, dict):
        beside = other if isinstance(other, dict) else {}
        return {key: "…" if key in VOLATILE else _settled(item, beside.get(key)) for key, item in value.items()}
    if isinstance(value, list):
        beside = other if isinstance(other, list) and len(other) == len(value) else [None] * len(value)
        return [_settled(item, near) for item, near in zip(value, beside)]
    if isinstance(value, float) and isinstance(other, float) and math.isclose(value, other, rel_tol=1e-4, abs_tol=1e-6):
        return other
    return value


def _metrics(page: str) -> str:
    """TorchServe's metrics: their names, types and labels; the values where they are counts of the same calls."""
    lines = []
    for line in page.splitlines():
        if line.startswith("# ") or "torchrelay_" in line:
            kept = line if line.startswith("# TYPE") and "torchrelay_" not in line else ""
        else:
            name, _, rest = line.partition("{")
            labels, _, value = rest.rpartition("} ")
            labels = re.sub(r'(Hostname|hostname|WorkerName)="[^"]*"', r'\1="…"', labels)
            counted = name in ("WordsSeen", "ts_inference_requests_total")
            kept = f"{name}{{{labels}}}" + (f" {value}" if counted else "")
        if kept and kept not in lines:
            lines.append(kept)
    return "\n".join(sorted(lines))


def compare(theirs: list[dict], ours: list[dict], console: Console) -> list[str]:
    """Show every step; returns the steps that differ and are not explained."""
    table = Table(title="One installation, one client", show_lines=True)
    for column in ("step", "TorchServe 0.12", "Torchrelay", ""):
        table.add_column(column, overflow="fold")
    unexplained = []
    different = []
    for one, other in zip(theirs, ours, strict=True):
        left, right = settled(one), settled(other, one)
        step = one["step"]
        if left == right:
            table.add_row(step, _short(left), "the same", "[green]=[/green]")
            continue
        difference = _difference(left, right)
        reason, expected = EXPLAINED.get(step, ("", []))
        known = sorted(difference) == sorted(expected)
        verdict = "[yellow]explained[/yellow]" if known else "[red]differs[/red]"
        table.add_row(step, _short(left), _short(right), verdict)
        different.append((step, difference, reason if known else "[red]not explained[/red]"))
        if not known:
            unexplained.append(step)
    console.print(table)
    for step, difference, reason in different:
        console.rule(step)
        console.print(reason, highlight=False)
        for line in difference:
            console.print(line, style="red" if line[0] == "-" else "green", markup=False, highlight=False)
    same = len(theirs) - len(different)
    console.print(
        f"\n{len(theirs)} requests: {same} answered the same, {len(different) - len(unexplained)} otherwise and "
        f"explained, {len(unexplained)} otherwise and not explained."
    )
    return unexplained


def _difference(left: str, right: str) -> list[str]:
    lines = difflib.ndiff(left.splitlines(), right.splitlines())
    return [line for line in lines if line[0] in "-+"]


def _short(text: str) -> str:
    lines = text.splitlines()
    return "\n".join(lines[:6] + (["…"] if len(lines) > 6 else []))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torchserve", metavar="PYTHON", default="", help="the interpreter that has TorchServe")
    parser.add_argument("--recorded", action="store_true", help=f"compare with {RECORD.name}")
    parser.add_argument("--record", action="store_true", help=f"write TorchServe's answers into {RECORD.name}")
    parser.add_argument("--ports", metavar="N,N,N", default="8080,8081,8082", help="inference, management, metrics")
    args = parser.parse_args()
    ports = [int(port) for port in args.ports.split(",")]
    console = Console(width=150)
    with tempfile.TemporaryDirectory(prefix="torchserve-") as place:
        store = Path(place, "archives", "model_store")
        console.print("Building the archives …")
        build(store)

        def run(name: str, command: list[str]) -> list[dict]:
            console.print(f"[bold]{name}[/bold]")
            folder = Path(place, name)
            installed(folder, store, ports)
            return answers(command, folder, ports, console)

        try:
            if args.recorded:
                theirs = json.loads(RECORD.read_text())
            else:
                python = args.torchserve or _with_torchserve()
                theirs = run("TorchServe", [python, "-m", "ts.model_server"])
                if args.record:
                    RECORD.write_text(json.dumps(theirs, indent=1) + "\n")
            ours = run("Torchrelay", [sys.executable, "-m", "serve_app.cli.torchserve"])
        except (Failed, subprocess.SubprocessError) as error:
            sys.exit(str(error))
    sys.exit(1 if compare(theirs, ours, console) else 0)


def _with_torchserve() -> str:
    """The interpreter of the benchmark's TorchServe, installed where it is not there yet."""
    from serve_app.bench import peers

    try:
        peers.java_version()
        return str(peers.environment())
    except peers.PeerFailed as error:
        sys.exit(f"{error}\nCompare with the recorded answers instead: --recorded")


if __name__ == "__main__":
    main()
