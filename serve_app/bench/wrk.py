"""wrk as the engine of a closed loop, where it is installed.

The generator shares the machine with what it measures; wrk is C and takes a fraction of what the
asyncio client takes. Its latencies are corrected by its own guess at coordinated omission, it cannot
run an open loop, and of an error status it knows only that it was one.
"""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from serve_app.bench.load import Load, Request, Result

_SCRIPT = """
local function bytes(name)
  local file = assert(io.open("{folder}/" .. name, "rb"))
  local content = file:read("*a")
  file:close()
  return content
end

wrk.method = bytes("method")
if bytes("body0") ~= "" then wrk.body = bytes("body0") end
{headers}
{bodies}

function done(summary, latency, requests)
  local e = summary.errors
  io.write(string.format(
    '\\n{mark}{{"duration": %d, "requests": %d, "status": %d, "timeout": %d, ' ..
    '"connect": %d, "read": %d, "write": %d, ' ..
    '"p50": %.1f, "p90": %.1f, "p99": %.1f, "max": %.1f}}\\n',
    summary.duration, summary.requests, e.status, e.timeout, e.connect, e.read, e.write,
    latency:percentile(50), latency:percentile(90), latency:percentile(99), latency.max))
end
"""
_IN_TURN = """
local wires, turn = {{}}, 0

function init(args)
  for i = 1, {count} do wires[i] = wrk.format(nil, nil, nil, bytes("body" .. (i - 1))) end
end

function request()
  turn = turn % #wires + 1
  return wires[turn]
end
"""
_MARK = "torchrelay-result "


class WrkFailed(Exception):
    """wrk could not run; the message is its own."""


def installed() -> bool:
    return shutil.which("wrk") is not None


def can(request: Request, load: Load) -> bool:
    """Whether wrk can send this load: a closed loop bounded by time, with nothing to check."""
    return load.rate is None and load.requests is None and load.limit is None and request.check is None


def run(request: Request, load: Load, threads: int = 0) -> Result:
    """Send the load with wrk; ``threads`` is 1 up to 16 connections and 2 above where it is 0.

    Durations are whole seconds there, and are rounded up. Raises WrkFailed.
    """
    if not can(request, load):
        raise WrkFailed("wrk measures a closed loop for a time: no rate, no count, no limit and no check of bodies.")
    with tempfile.TemporaryDirectory(prefix="torchrelay-wrk-") as folder:
        headers = dict(request.headers)
        bodies = request.bodies or (request.body,)
        if any(bodies):
            headers["Content-Type"] = request.content_type
        (Path(folder) / "method").write_text(request.method)
        for i, body in enumerate(bodies):
            (Path(folder) / f"body{i}").write_bytes(body)
        script = Path(folder) / "script.lua"
        assignments = "\n".join(f"wrk.headers[{_lua(name)}] = {_lua(value)}" for name, value in headers.items())
        in_turn = _IN_TURN.format(count=len(bodies)) if len(bodies) > 1 else ""
        script.write_text(_SCRIPT.format(folder=folder, headers=assignments, bodies=in_turn, mark=_MARK))
        command = ["wrk", "-t", str(threads or (1 if load.connections <= 16 else 2)), "-c", str(load.connections)]
        command += ["--timeout", f"{math.ceil(load.timeout)}s", "-s", str(script)]
        if load.warmup:
            _wrk([*command, "-d", f"{math.ceil(load.warmup)}s", request.url])
        said = _wrk([*command, "-d", f"{math.ceil(load.seconds or 1)}s", request.url])
    return parse(said, load)


def parse(said: str, load: Load) -> Result:
    """The Result in what wrk printed with our script. Raises WrkFailed where there is none."""
    lines = [line for line in said.splitlines() if line.startswith(_MARK)]
    if not lines:
        raise WrkFailed(f"wrk printed no result:\n{said.strip()}")
    found: Mapping[str, float] = json.loads(lines[-1][len(_MARK) :])
    good = int(found["requests"] - found["status"])  # it counts every answer as a request
    kinds = {
        "status": found["status"],
        "timeout": found["timeout"],
        "connect": found["connect"],
        "disconnect": found["read"] + found["write"],
    }
    microseconds = {k: found[k] / 1e6 if good else math.nan for k in ("p50", "p90", "p99", "max")}
    return Result(
        engine="wrk",
        connections=load.connections,
        seconds=found["duration"] / 1e6,
        requests=good,
        completed=good,
        errors={kind: int(count) for kind, count in kinds.items() if count},
        **microseconds,
    )


def _lua(text: str) -> str:
    """A Lua string; for what a header may hold, JSON's rules are Lua's."""
    return json.dumps(text, ensure_ascii=False)


def _wrk(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise WrkFailed("wrk is not installed (its package has that name), or not on the PATH.") from error
    if done.returncode:
        raise WrkFailed(f"{' '.join(command)} ended with {done.returncode}: {(done.stderr or done.stdout).strip()}")
    return done.stdout
