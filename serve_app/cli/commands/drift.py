"""``torchrelay drift``: the drift of a model's captured requests."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from serve_app.cli.api_client import MANAGEMENT, CliClient, ManagementUrl, Token
from serve_app.cli.terminal import AsJson, console, show_document

_STYLES = {"none": "", "moderate": "yellow", "major": "bold red"}


def drift(
    model: Annotated[str, typer.Argument()],
    version: Annotated[str, typer.Argument(help="By default every version with capture.")] = "",
    reset: Annotated[bool, typer.Option("--reset", help="Make the current window the reference.")] = False,
    as_json: AsJson = False,
    management: ManagementUrl = MANAGEMENT,
    token: Token = "",
) -> None:
    """Show the drift of each feature from the reference."""
    if reset and not version:
        raise typer.BadParameter("name the version: torchrelay drift MODEL VERSION --reset")
    with CliClient(management, token) as client:
        document = client.reset_drift(model, version) if reset else client.drift(model, version or None)
    if reset and not as_json:
        console.print(f"{model} {version}: the current window is the reference now", highlight=False)
        return
    show_document(document, render, as_json)


def render(document: dict[str, Any]) -> RenderableType:
    """Return a table of features for each version."""
    return Group(*(part for version in document["versions"] for part in _render_version(document, version)))


def _render_version(document: dict[str, Any], version: dict[str, Any]) -> list[RenderableType]:
    windows = [f"{key}: {_window(version[key])}" for key in ("reference", "current")]
    capture = version["capture"]
    lost = sum(capture["dropped"].values())
    head = f"{document['model']} {version['version']}: {version['level']} drift; {', '.join(windows)}"
    parts: list[RenderableType] = [Text(head, style="bold")]
    if lost or capture["last_error"]:
        parts.append(Text(f"{capture['captured']:,} captured, {lost:,} lost. {capture['last_error']}"))
    if version["omitted_features"]:
        parts.append(Text(f"{version['omitted_features']} features beyond max_features are not measured."))
    if not version["features"]:
        return [*parts, Text("No comparison yet: it needs a complete reference and a current window.")]
    table = Table("feature", "kind", "PSI", "KS", "KS critical", "reference", "current", "level")
    for feature in version["features"]:
        table.add_row(
            Text(feature["name"]),
            feature["kind"],
            *map(_number, (feature["psi"], feature["ks"], feature["ks_critical"])),
            f"{feature['reference_count']:,}",
            f"{feature['current_count']:,}",
            Text(feature["level"], style=_STYLES[feature["level"]]),
        )
    return [*parts, table]


def _window(window: dict[str, Any] | None) -> str:
    if window is None:
        return "none"
    return f"{window['requests']:,} requests{'' if window['complete'] else ' (incomplete)'}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
