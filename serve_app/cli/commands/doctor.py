"""``torchrelay doctor``: what this machine can run, and how to fix what is missing."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from serve_app import __version__
from serve_app.cli import container_contract
from serve_app.cli.app_config import read_config
from serve_app.cli.container_contract import ContainerContract
from serve_app.cli.machine_checks import MachineCheck, check_machine
from serve_app.cli.terminal import console

_COLORS = {"ok": "green", "absent": "dim", "warning": "yellow", "failed": "red"}


def doctor(
    config: Annotated[
        Path | None, typer.Argument(help="The application whose ports are checked, as for `start`.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    container: Annotated[
        bool, typer.Option("--container", help="Show the platform that started this container instead.")
    ] = False,
) -> None:
    """Show what this machine can run: devices, engines, codecs, extras, ports and limits, each with a fix.

    The exit code is 1 where a check fails, so that no server starts here, and 0 otherwise.
    """
    if container:
        return _show_contract(container_contract.inspect(os.environ), as_json)
    http, settings = read_config(config)
    checks = list(check_machine(http, settings, os.environ))
    is_ready = not any(check.state == "failed" for check in checks)
    if as_json:
        document = [dataclasses.asdict(check) for check in checks]
        console.print_json(data={"version": __version__, "ready": is_ready, "checks": document})
    else:
        console.print(_table(checks))
        for check in checks:
            if check.fix:
                line = f"[{_COLORS[check.state]}]{check.name}[/]: {escape(check.fix)}"
                console.print(line, highlight=False, soft_wrap=True)
        console.print(
            "A server starts here." if is_ready else "No server starts here until the red lines are fixed.",
            style="green" if is_ready else "red",
        )
    if not is_ready:
        raise typer.Exit(1)


def _show_contract(contract: ContainerContract, as_json: bool) -> None:
    if as_json:
        console.print_json(data=dataclasses.asdict(contract))
    else:
        table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, show_header=False)
        for name, value in dataclasses.asdict(contract).items():
            lines = "\n".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else value
            if lines:
                table.add_row(name, escape(lines))
        console.print(table)
    if contract.problem:
        raise typer.Exit(1)


def _table(checks: Iterable[MachineCheck]) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name in ("", "check", "state", "found"):
        table.add_column(name, no_wrap=name != "found", overflow="fold")
    section = ""
    for check in checks:
        title = check.section if check.section != section else ""
        section = check.section
        color = _COLORS[check.state]
        table.add_row(title, escape(check.name), f"[{color}]{check.state}", escape(check.found))
    return table
