"""``torchrelay migrate``: an app.yaml in place of a config.properties, and what changes with it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Optional

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from serve_app import properties
from serve_app.cli.translation import app_yaml, gpus
from serve_app.errors import ConfigurationError

_FATES = {"setting": ("green", "is now "), "unneeded": ("dim", "not needed: "), "unserved": ("yellow", "not served: ")}

# What is true of every move, whatever the file says.
_CHECK = (
    "Models: without load_models TorchServe loads nothing, so control.load_models is none unless the file says more.",
    "Replicas: 0 default workers are one replica at start-up, not one for each GPU or CPU.",
    "Queues: job_queue_size counts in each replica, so two replicas hold twice as many rows.",
    "State: what is registered at run time comes back at the next start; it is in control.state_dir.",
    "Tokens, the model API and the metrics mode are TorchServe's defaults here, not ours; change them as you like.",
)


def migrate(
    source: Annotated[Path, typer.Argument(metavar="CONFIG.PROPERTIES", help="TorchServe's file.")],
    output: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("-o", "--output", help="Where the app.yaml goes; without it, to the output."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", "-f", help="Write over a file that is there.")] = False,
) -> None:
    """Write the app.yaml that says what a config.properties says, and show what becomes of each key."""
    console = Console(stderr=True)  # the document itself may go to the output
    try:
        text = properties.decode(source.read_bytes())
        reading = properties.read(text, str(source), os.environ, gpus=gpus(os.environ))
        document = app_yaml(reading, source.name, source.parent.resolve())
        if output is not None:
            with output.open("w" if force else "x") as file:
                file.write(document)
    except FileExistsError:
        console.print(f"{output} is there already; --force writes over it", style="red", highlight=False)
        raise typer.Exit(1) from None
    except OSError as error:
        console.print(f"{error.filename}: {error.strerror}", style="red", highlight=False)
        raise typer.Exit(1) from None
    except ConfigurationError as error:
        console.print(str(error), style="red", highlight=False)
        raise typer.Exit(1) from None
    if output is None:
        typer.echo(document, nl=False)
    table = Table("key", "value", "what becomes of it", title=str(source))
    for note in reading.notes:
        style, words = _FATES[note.fate]
        remark = f" ({note.remark})" if note.remark else ""
        table.add_row(
            note.key, Text(_short(note.value)), Text(words + note.becomes.replace("`", "") + remark, style=style)
        )
    console.print(table)
    for warning in reading.warnings:
        console.print(f"[yellow]check[/yellow]  {warning}", highlight=False, soft_wrap=True)
    for words in _CHECK:
        console.print(f"[cyan]know[/cyan]   {words}", highlight=False, soft_wrap=True)
    if output is not None:
        console.print(
            f"\nWritten to {output}. Start it with: torchrelay start {output}", highlight=False, soft_wrap=True
        )


def _short(value: str) -> str:
    line = " ".join(value.split())
    return line if len(line) <= 60 else line[:57] + "…"
