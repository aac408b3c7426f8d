"""``torchrelay migrate``: convert a config.properties to an app.yaml, and list what changes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from serve_app import torchserve_config
from serve_app.cli.terminal import errors, fail
from serve_app.cli.torchserve_flags import app_yaml, count_gpus
from serve_app.errors import ConfigurationError

_FATES = {
    "setting": ("green", "is now "),
    "unneeded": ("dim", "not needed: "),
    "unserved": ("yellow", "not served: "),
}

# Differences that concern every migration.
_DIFFERENCES = (
    "Models: without load_models TorchServe loads nothing; control.load_models is none unless it is set.",
    "Replicas: 0 default workers are one replica at start-up, not one for each GPU or CPU.",
    "Queues: job_queue_size counts in each replica, so two replicas hold twice as many rows.",
    "State: models registered at run time are restored at the next start; control.state_dir holds them.",
    "Tokens, the model API and the metrics mode have TorchServe's defaults here, not Torchrelay's.",
)


def migrate(
    source: Annotated[Path, typer.Argument(metavar="CONFIG.PROPERTIES", help="TorchServe's file.")],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="The app.yaml; by default the standard output."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", "-f", help="Overwrite an existing file.")] = False,
) -> None:
    """Convert a config.properties to an app.yaml, and show what each key becomes."""
    try:
        text = torchserve_config.decode(source.read_bytes())
        translated = torchserve_config.read(text, str(source), os.environ, gpus=count_gpus(os.environ))
        document = app_yaml(translated, source.name, source.parent.resolve())
        if output is not None:
            with output.open("w" if force else "x") as file:
                file.write(document)
    except FileExistsError:
        fail(f"{output} exists already; --force overwrites it")
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}")
    except ConfigurationError as error:
        fail(str(error))
    if output is None:  # the standard output is for the document alone
        typer.echo(document, nl=False)
    table = Table("key", "value", "becomes", title=str(source))
    for note in translated.notes:
        style, prefix = _FATES[note.fate]
        remark = f" ({note.remark})" if note.remark else ""
        table.add_row(
            note.key,
            Text(_truncate(note.value)),
            Text(prefix + note.becomes.replace("`", "") + remark, style=style),
        )
    errors.print(table)
    for warning in translated.warnings:
        errors.print(f"[yellow]check[/yellow]  {warning}", highlight=False, soft_wrap=True)
    for difference in _DIFFERENCES:
        errors.print(f"[cyan]note[/cyan]   {difference}", highlight=False, soft_wrap=True)
    if output is not None:
        errors.print(
            f"\nWritten to {output}. Start it with: torchrelay start {output}",
            highlight=False,
            soft_wrap=True,
        )


def _truncate(value: str) -> str:
    line = " ".join(value.split())
    return line if len(line) <= 60 else line[:57] + "…"
