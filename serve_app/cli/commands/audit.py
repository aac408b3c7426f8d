"""`torchrelay audit`: management changes, with their authors."""

from __future__ import annotations

import json
import time
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from serve_app.cli.api_client import MANAGEMENT, CliClient, ManagementUrl, Token
from serve_app.cli.terminal import AsJson, show_document

_MAX_CHANGE = 300  # characters of the changes of a record


def audit(
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Number of the newest records.")] = 20,
    actor: Annotated[str, typer.Option(help="Only changes with the key of this name.")] = "",
    action: Annotated[str, typer.Option(help="Only this action, such as register.")] = "",
    subject: Annotated[str, typer.Option(help="Only changes of this model, workflow or experiment.")] = "",
    result: Annotated[str, typer.Option(help="Only results that begin so: ok, refused, failed.")] = "",
    as_json: AsJson = False,
    management: ManagementUrl = MANAGEMENT,
    token: Token = "",
) -> None:
    """Show who changed what on the server, the newest changes first, and refused attempts."""
    given = {"actor": actor, "action": action, "subject": subject, "result": result}
    with CliClient(management, token) as client:
        records = client.audit({"limit": limit, **{name: value for name, value in given.items() if value}})
    show_document({"records": records}, render, as_json)


def render(document: dict[str, Any]) -> Table:
    """Return records as a table."""
    table = Table()
    for heading in ("time", "actor", "address", "action", "subject", "change", "result"):
        table.add_column(heading, overflow="fold")
    for record in document["records"]:
        moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record["time"]))
        fields = (record[name] for name in ("actor", "address", "action", "subject"))
        table.add_row(moment, *map(Text, fields), Text(describe_change(record)), Text(record["result"]))
    return table


def describe_change(record: dict[str, Any]) -> str:
    """Return the fields that differ, each with its values before and after."""
    before, after = record["before"] or {}, record["after"] or {}
    lines = []
    for name in {**before, **after}:
        if name not in before:
            lines.append(f"+ {name}")
        elif name not in after:
            lines.append(f"- {name}")
        else:
            old, new = before[name], after[name]
            lines += [f"{key}: {_format(old.get(key))} → {_format(new.get(key))}" for key in {**old, **new}]
    text = "\n".join(lines)
    return text if len(text) <= _MAX_CHANGE else text[:_MAX_CHANGE] + "…"


def _format(value: Any) -> str:
    return "-" if value is None else value if isinstance(value, str) else json.dumps(value)
