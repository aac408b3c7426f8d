"""Two versions of one model, and how its calls are dealt out to them."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from serve_app.load_test import LoadProfile, LoadResult
from tests.benchmarks import report, servers
from tests.benchmarks.servers import Peer, PeerFailed
from tests.benchmarks.targets import Contender

CALLER = {"x-user": "somebody"}
_KEY = {"header": "x-user"}
_90_10 = {"1.0": 9000, "2.0": 1000}


@dataclass(frozen=True)
class Setup:
    """Send the management requests that precede a measurement of a model with two versions."""

    name: str
    word: str
    put: Callable[[Peer, str], None]


def put_policy(relay: Peer, model: str, policy: dict[str, Any]) -> None:
    relay.tell("PUT", f"/models/{model}/traffic", policy)


def _policy(**policy: Any) -> Callable[[Peer, str], None]:
    return lambda relay, model: put_policy(relay, model, policy)


def _experiment(relay: Peer, model: str) -> None:
    arms = {name: {"version": version, "weight": 5000} for name, version in (("a", "1.0"), ("b", "2.0"))}
    metrics = [{"name": "latency", "kind": "latency"}, {"name": "errors", "kind": "error_rate"}]
    document = {"name": "benchmark", "arms": arms, "metrics": metrics, "baseline": "a"}
    relay.tell("POST", f"/models/{model}/experiments", document)


SETUPS = (
    Setup(report.SPLIT, "split", _policy(policy="weighted", versions=_90_10)),
    Setup(report.STICKY, "sticky", _policy(policy="sticky", key=_KEY, versions=_90_10)),
    Setup(report.MEASURED, "measured", _experiment),
)


def under(policy: dict[str, Any], name: str, contender: Contender, relay: Peer, model: str) -> Contender:
    """Return the same contender, with the same replica, under a policy while it is measured."""

    def measure(load: LoadProfile) -> LoadResult:
        put_policy(relay, model, policy)
        try:
            return contender.measure(load)
        finally:
            relay.tell("DELETE", f"/models/{model}/traffic", None)

    return replace(contender, name=name, measure=measure)


def two_versions(relay: Peer, archive: Path, folder: Path, model: str, *, batch_size: int) -> str:
    """Register an archive as versions 1.0 and 2.0 of ``model``, one worker each; its URL.

    Raises PeerFailed.
    """
    second = folder / f"{archive.stem}-2.0.mar"
    with zipfile.ZipFile(archive) as old, zipfile.ZipFile(second, "w") as new:
        for name in old.namelist():
            content = old.read(name)
            if name == "MAR-INF/MANIFEST.json":
                manifest = json.loads(content)
                manifest["model"]["modelVersion"] = "2.0"
                content = json.dumps(manifest).encode()
            new.writestr(name, content)
    url = relay.register(archive, model, batch_size=batch_size)
    relay.add_version(second, model, batch_size=batch_size)
    return url


def at_rate(contender: Contender, rate: float) -> Contender:
    """Return the same contender under an open loop of ``rate`` requests a second."""
    return replace(contender, measure=lambda load: contender.measure(replace(load, rate=rate)))


def assignment() -> str:
    """Describe what selecting a version costs, by kind of policy. Raises PeerFailed."""
    command = [sys.executable, "-m", "tests.benchmarks.version_selection"]
    done = subprocess.run(command, cwd=servers.ROOT, capture_output=True, text=True)
    if done.returncode:
        raise PeerFailed(f"the assignment was not measured: {done.stderr.strip()[-500:]}")
    return ", ".join(
        f"{kind} {microseconds:.2f} µs" for kind, microseconds in json.loads(done.stdout).items()
    )
