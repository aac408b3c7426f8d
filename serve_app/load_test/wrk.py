"""wrk as the engine of a closed loop, where it is installed.

The generator shares the machine with what it measures; wrk is C and takes a fraction of what the
asyncio client takes. The script removes the latencies that wrk adds by its own guess at coordinated omission.
wrk cannot run an open loop, and of an error status it knows only that it was one.
"""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

from serve_app.load_test.profile import LoadProfile, LoadRequest, LoadResult

# Seconds at the beginning of a run that are not counted: a batch more or less is 3 % of two seconds.
_RAMP = 0.5
_MARK = "torchrelay-result "
_SCRIPT = resources.files(__package__) / "wrk.lua"


class WrkError(Exception):
    """wrk could not run; the message is its own."""


def installed() -> bool:
    return shutil.which("wrk") is not None


def can(request: LoadRequest, load: LoadProfile) -> bool:
    """Return whether wrk can send this load: a closed loop bounded by time, with nothing to check."""
    return load.rate is None and load.requests is None and load.limit is None and request.check is None


def run(request: LoadRequest, load: LoadProfile) -> LoadResult:
    """Send the load with wrk, in one thread up to 16 connections and in two above.

    It runs for whole seconds, so somewhat longer than it measures. Raises WrkError.
    """
    if not can(request, load):
        raise WrkError(
            "wrk measures a closed loop for a time: no rate, no count, no limit and no check of bodies."
        )
    with tempfile.TemporaryDirectory(prefix="torchrelay-wrk-") as folder:
        headers = dict(request.headers)
        bodies = request.bodies or (request.body,)
        if any(bodies):
            headers["Content-Type"] = request.content_type
        (Path(folder) / "method").write_text(request.method)
        for i, body in enumerate(bodies):
            (Path(folder) / f"body{i}").write_bytes(body)
        seconds = load.seconds or 1.0
        assignments: dict[str, str | float] = {"folder": folder, "mark": _MARK, "count": len(bodies)}
        assignments |= {"ramp": _RAMP, "seconds": seconds, "connections": load.connections}
        assignments |= {f"wrk.headers[{_lua(name)}]": value for name, value in headers.items()}
        lines = [f"{name} = {_lua(value)}" for name, value in assignments.items()]
        script = Path(folder) / "script.lua"
        script.write_text("\n".join(lines) + "\n" + _SCRIPT.read_text())
        threads = "1" if load.connections <= 16 else "2"
        command = ["wrk", "-t", threads, "-c", str(load.connections)]
        command += ["--timeout", f"{math.ceil(load.timeout)}s", "-s", str(script)]
        if load.warmup:
            _wrk([*command, "-d", f"{math.ceil(load.warmup)}s", request.url])
        output = _wrk([*command, "-d", f"{math.ceil(_RAMP + seconds)}s", request.url])
    return parse(output, load)


def parse(output: str, load: LoadProfile) -> LoadResult:
    """Return the result in wrk's output with the script. Raises WrkError where there is none.

    The throughput is that of the measured time; the other figures, for which wrk has no times, are of the
    whole run.
    """
    lines = [line for line in output.splitlines() if line.startswith(_MARK)]
    if not lines:
        raise WrkError(f"wrk printed no result:\n{output.strip()}")
    found: Mapping[str, float] = json.loads(lines[-1][len(_MARK) :])
    good = int(found["requests"] - found["status"])  # it counts every answer as a request
    kinds = {
        "status": found["status"],
        "timeout": found["timeout"],
        "connect": found["connect"],
        "disconnect": found["read"] + found["write"],
    }
    latencies = {k: found[k] / 1e6 if good else math.nan for k in ("p50", "p90", "p99", "max")}
    return LoadResult(
        engine="wrk",
        connections=load.connections,
        seconds=load.seconds or 1.0,
        requests=good,
        completed=round(found["counted"] * good / found["requests"]) if good else 0,
        errors={kind: int(count) for kind, count in kinds.items() if count},
        p50=latencies["p50"],
        p90=latencies["p90"],
        p99=latencies["p99"],
        max=latencies["max"],
    )


def _lua(value: str | float) -> str:
    """Return a Lua literal; for valid headers JSON's rules are Lua's."""
    return json.dumps(value, ensure_ascii=False)


def _wrk(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise WrkError("wrk is not installed (its package has that name), or not on the PATH.") from error
    if done.returncode:
        reason = (done.stderr or done.stdout).strip()
        if reason.startswith("unable to connect"):
            raise WrkError(f"No server responds at {command[-1]}: {reason}")
        raise WrkError(f"{' '.join(command)} ended with {done.returncode}: {reason}")
    return done.stdout
