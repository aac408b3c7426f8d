"""Registration of many archives: several at a time, with a progress bar and a list of what failed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from serve_app.cli.store_copy import stored_copy
from serve_app.client import Client, ConflictError, ServerError, TransportError
from serve_app.model_store.archive import is_model_folder

ARCHIVES = (".mar", ".zip", ".tar.gz", ".tgz")
_MAX_LISTED = 20  # failures


@dataclass(frozen=True)
class Outcome:
    """The outcome of one registration; ``reason`` is for one that failed."""

    url: str
    status: Literal["registered", "skipped", "failed"]
    reason: str = ""


def find_archives(sources: Sequence[str]) -> list[str]:
    """Return the archives and model folders of folders; every other source is one itself."""
    return [found for source in sources for found in _expand(source)]


def _expand(source: str) -> Iterator[str]:
    folder = Path(source)
    if "://" in source or not folder.is_dir() or is_model_folder(folder) or (folder / "MAR-INF").is_dir():
        yield source
        return
    for path in sorted(folder.iterdir()):
        if path.name.lower().endswith(ARCHIVES) or is_model_folder(path) or (path / "MAR-INF").is_dir():
            yield str(path.absolute())


class BulkRegistration:
    """A registration of many archives with the same parameters.

    An archive whose version is registered already is skipped, so an interrupted run can be repeated.
    """

    def __init__(self, client: Client, model_store: Path, concurrency: int, **parameters: Any) -> None:
        self._client = client
        self._model_store = model_store
        self._concurrency = concurrency
        self._parameters = parameters

    def run(self, urls: Sequence[str], on_outcome: Callable[[Outcome], None]) -> None:
        """Register all, and call ``on_outcome`` in this thread for each; an interrupt cancels the rest."""
        executor = ThreadPoolExecutor(self._concurrency)
        waiting = iter(urls)
        running: set[Future[Outcome]] = set()
        try:
            while True:
                while len(running) < self._concurrency and (url := next(waiting, None)) is not None:
                    running.add(executor.submit(self._register, url))
                if not running:
                    return
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for each in done:
                    on_outcome(each.result())
        finally:
            executor.shutdown(wait=False, cancel_futures=True)

    def _register(self, url: str) -> Outcome:
        try:
            with stored_copy(url, self._model_store) as stored:
                self._client.register(stored, **self._parameters)
        except ConflictError as error:
            if error.reason == "version_exists":
                return Outcome(url, "skipped")
            return Outcome(url, "failed", str(error))
        except (ServerError, TransportError, OSError) as error:
            return Outcome(url, "failed", str(error) or type(error).__name__)
        except typer.Exit:
            return Outcome(url, "failed", f"{self._model_store} has another model of that name")
        return Outcome(url, "registered")


def show(registration: BulkRegistration, urls: Sequence[str], console: Console) -> int:
    """Register archives with a progress bar, print the result, and return the exit code."""
    counts = dict.fromkeys(("registered", "skipped", "failed"), 0)
    failures: list[Outcome] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bars:
        bar = bars.add_task("Registering", total=len(urls))

        def on_outcome(outcome: Outcome) -> None:
            counts[outcome.status] += 1
            if outcome.status == "failed":
                failures.append(outcome)
            failed = f", {len(failures)} failed" if failures else ""
            bars.update(bar, advance=1, description=f"Registering{failed}")

        interrupted = False
        try:
            registration.run(urls, on_outcome)
        except KeyboardInterrupt:
            interrupted = True
    if failures:
        table = Table("archive", "why it was not registered")
        for outcome in failures[:_MAX_LISTED]:
            table.add_row(outcome.url, outcome.reason)
        console.print(table, highlight=False)
        if len(failures) > _MAX_LISTED:
            console.print(f"and {len(failures) - _MAX_LISTED} more")
    summary = ", ".join(f"{count:,} {status}" for status, count in counts.items() if count)
    console.print(f"{summary or 'nothing'} of {len(urls):,}", highlight=False)
    if interrupted:
        console.print("Interrupted; the same command continues.")
        return 130
    return 1 if failures else 0
