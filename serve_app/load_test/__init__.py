"""Load tests of a server: a load generator, and the tuner that searches configurations with it."""

from __future__ import annotations

from typing import Literal

from handlers import extras
from serve_app.load_test import wrk
from serve_app.load_test.profile import LoadProfile, LoadRequest, LoadResult

__all__ = ["Engine", "EngineMissing", "LoadProfile", "LoadRequest", "LoadResult", "send"]

Engine = Literal["auto", "asyncio", "wrk"]


class EngineMissing(Exception):
    """An error: the package of the selected engine is not installed."""


def send(request: LoadRequest, load_: LoadProfile, engine: Engine = "auto") -> LoadResult:
    """Send a load and return its result; ``auto`` is wrk where it is installed and supports the load.

    Raises EngineMissing with the command that installs the engine.
    """
    if engine == "wrk" or (engine == "auto" and wrk.installed() and wrk.can(request, load_)):
        return wrk.run(request, load_)
    try:
        from serve_app.load_test import http_load  # late: httptools belongs to an extra
    except ModuleNotFoundError as error:
        command = extras.install_command("httptools")
        raise EngineMissing(
            f"The engine asyncio needs httptools, which is not installed: {command}"
        ) from error
    return http_load.run(request, load_)
