"""Modules of this project that one request passes through, as a measure of its structure.

``python -m tests.benchmarks.request_modules`` traces the shortest prediction (one HTTP request to a replica's
application in this process, answered by callbacks) and one registration of a small archive (from its URL to
its spec). It prints the modules in which a function was entered; imports do not count.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from serve_app.control.archive_ingestion import ArchiveIngestor
from serve_app.domain.model import Registration
from serve_app.settings import Settings
from tests.benchmarks.request_budget import open_connections
from tests.support.archives import ECHO, make_archive

_PACKAGES = ("serve_app", "handlers")
_SETTLING_S = 0.2  # until all threads have recorded a request that is answered


@contextmanager
def record_modules() -> Iterator[set[str]]:
    """Yield the set of entered modules, which grows in this thread and those that the block starts."""
    modules: set[str] = set()

    def record(frame: FrameType, event: str, argument: Any) -> None:
        name = frame.f_globals.get("__name__", "")
        if event == "call" and name.partition(".")[0] in _PACKAGES and frame.f_code.co_name != "<module>":
            modules.add(name)

    threading.setprofile(record)
    sys.setprofile(record)
    try:
        yield modules
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


def trace_prediction() -> set[str]:
    """Return the modules of a prediction; the one before it has loaded what is loaded once."""
    return asyncio.run(_trace_prediction())


async def _trace_prediction() -> set[str]:
    with record_modules() as modules:
        async with open_connections("echo", connections=1, callbacks=True, key=False) as load:
            await load.run(1)
            await asyncio.sleep(_SETTLING_S)
            modules.clear()
            await load.run(1)
            await asyncio.sleep(_SETTLING_S)
            return set(modules)


def trace_registration() -> set[str]:
    """Return the modules of the registration of an archive with a handler and a model-config.yaml."""
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder, "model_store")
        store.mkdir()
        archive = make_archive(store, "echo", ECHO, config={"batchSize": 2})
        ingestor = ArchiveIngestor(Settings(home=folder))
        with record_modules() as modules:
            ingestor.ingest(Registration(archive.name))
    return modules


def main() -> None:
    """Print the modules of a registration and of a prediction."""
    # In this order: a loaded handler leaves an import hook, which a registration would enter.
    for name, trace in (("registration", trace_registration), ("prediction", trace_prediction)):
        modules = sorted(trace())
        print(f"{name}: {len(modules)} modules", *modules, sep="\n  ")


if __name__ == "__main__":
    main()
