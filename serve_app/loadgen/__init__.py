"""The benchmark: a load generator, and the comparison with other servers."""

from __future__ import annotations

from typing import Literal

from serve_app.bench import load, wrk
from serve_app.bench.load import Load, Request, Result

__all__ = ["Engine", "Load", "Request", "Result", "send"]

Engine = Literal["auto", "asyncio", "wrk"]


def send(request: Request, load_: Load, engine: Engine = "auto") -> Result:
    """Send a load and return what came of it; ``auto`` is wrk where it is installed and can do what is asked."""
    if engine == "wrk" or (engine == "auto" and wrk.installed() and wrk.can(request, load_)):
        return wrk.run(request, load_)
    return load.run(request, load_)
