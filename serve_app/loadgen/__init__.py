"""The benchmark: a load generator, and the comparison with other servers."""

from __future__ import annotations

from typing import Literal

from serve_app.loadgen import load, wrk
from serve_app.loadgen.profile import LoadProfile, LoadRequest, LoadResult

__all__ = ["Engine", "LoadProfile", "LoadRequest", "LoadResult", "send"]

Engine = Literal["auto", "asyncio", "wrk"]


def send(request: LoadRequest, load_: LoadProfile, engine: Engine = "auto") -> LoadResult:
    """Send a load and return its result; ``auto`` is wrk where it is installed and supports the load."""
    if engine == "wrk" or (engine == "auto" and wrk.installed() and wrk.can(request, load_)):
        return wrk.run(request, load_)
    return load.run(request, load_)
