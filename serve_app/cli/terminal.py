"""The terminal: its consoles, errors that end a command, and documents, shown once or continuously."""

from __future__ import annotations

import time
from collections.abc import Callable, Container
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console, RenderableType
from rich.live import Live

console = Console()
errors = Console(stderr=True)

AsJson = Annotated[bool, typer.Option("--json", help="The management API's JSON.")]
Render = Callable[[Any], RenderableType]


def fail(message: str, code: int = 1) -> NoReturn:
    """Print an error and end the command."""
    errors.print(message, style="red", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(code) from None


def show_document(document: Any, render: Render, as_json: bool) -> None:
    """Print a document of the management API, rendered or as JSON."""
    if as_json:
        console.print_json(data=document)
    else:
        console.print(render(document))


def watch_document(
    fetch: Callable[[], dict[str, Any]], render: Render, active: Container[str], period: float
) -> dict[str, Any]:
    """Show a document every ``period`` seconds while its state is one of ``active``; return the last one."""
    with Live(console=console, auto_refresh=False) as live:
        while True:
            document = fetch()
            live.update(render(document), refresh=True)
            if document["state"] not in active:
                return document
            time.sleep(period)
