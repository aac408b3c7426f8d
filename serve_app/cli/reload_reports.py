"""The reports of reloads, which replicas append to a file, on the terminal."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

_PERIOD_S = 0.1


class ReloadReports:
    """A thread that prints each report; several replicas report the same reload once."""

    def __init__(self, file: Path, console: Console) -> None:
        self._file = file
        self._console = console
        self._ended = threading.Event()
        file.touch()
        self._thread = threading.Thread(target=self._run, name="reload reports", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        last: tuple[Any, ...] = ()
        for report in read_reports(self._file, self._ended.wait):
            key = report["revision"], report["ok"], report["message"]
            if key != last and report["message"] != "watching":
                self._print(report)
            last = key

    def _print(self, report: dict[str, Any]) -> None:
        if not report["ok"]:
            self._console.print(
                f"[red]Not reloaded:[/red] the code from before serves on.\n{report['message']}",
                highlight=False,
                soft_wrap=True,
            )
            return
        kept = f", with {', '.join(report['kept'])} kept" if report["kept"] else ""
        note = f"; {report['message']}" if report["message"] else ""
        text = f"[green]Reloaded[/green] in {report['seconds']:.2f} s{kept}{note}"
        self._console.print(text, highlight=False, soft_wrap=True)


def read_reports(file: Path, wait: Callable[[float], bool]) -> Iterator[dict[str, Any]]:
    """Yield the reports of a file as they are appended, until ``wait(seconds)`` returns true."""
    with file.open() as lines:
        buffer = ""
        while True:
            buffer += lines.read()
            *complete, buffer = buffer.split("\n")
            for line in complete:
                yield json.loads(line)
            if wait(_PERIOD_S):
                return
