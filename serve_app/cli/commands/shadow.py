"""`torchrelay shadow`: agreement of a model's shadow with its live versions."""

from __future__ import annotations

import json
from functools import partial
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from serve_app.cli.api_client import MANAGEMENT, CliClient, ManagementUrl, Token
from serve_app.cli.terminal import AsJson, console, show_document

_WIDTH = 60  # characters of an input or an output in the table


def shadow(
    model: Annotated[str, typer.Argument()],
    worst: Annotated[int, typer.Option(min=0, help="Number of the worst mismatches.")] = 5,
    forget: Annotated[
        bool, typer.Option("--reset", help="Delete the figures and the stored inputs.")
    ] = False,
    as_json: AsJson = False,
    management: ManagementUrl = MANAGEMENT,
    token: Token = "",
) -> None:
    """Show how a shadow's responses agree with the live ones, and the worst mismatches."""
    with CliClient(management, token) as client:
        if forget:
            console.print(client.delete_shadow_stats(model), highlight=False)
            return
        document = client.shadow(model)
    show_document(document, partial(render, worst=worst), as_json)


def render(document: dict[str, Any], worst: int = 5) -> RenderableType:
    """Return a shadow's figures as a table of live versions, and the mismatches under it."""
    active = document["shadow"]
    head = (
        f"{document['model']}: no active shadow"
        if active is None
        else f"{document['model']}: shadow {active['version']}"
    )
    if active is not None:
        head += f", {active['percent']:g} % of the requests, compared as {active['compare']['kind']}"
    columns = (
        "live",
        "shadow",
        "compared",
        "agree",
        "label flips",
        "errors",
        "not sent",
        "p99 live",
        "p99 shadow",
    )
    table = Table(*columns)
    for pair in document["against"]:
        calls, latency = pair["calls"], pair["latency"]
        table.add_row(
            pair["version"],
            pair["shadow"],
            f"{calls['agreed'] + calls['disagreed']:,}",
            _share(pair["agreement_rate"]),
            _share(pair["label_flip_rate"]),
            _count(pair, "error"),
            _count(pair, "skipped", "dropped"),
            *(
                f"{latency[which]['p99_ms']:.4g} ms" if which in latency else "-"
                for which in ("live", "shadow")
            ),
        )
    if not document["against"]:
        return Group(Text(head, style="bold"), Text("No comparisons yet."))
    parts: list[RenderableType] = [Text(head, style="bold"), table]
    for pair in document["against"]:
        if means := {name: value for name, value in pair["measures"].items() if name != "label_flipped"}:
            mean_texts = ", ".join(f"{name} {value:.4g}" for name, value in means.items())
            parts.append(Text(f"{pair['version']} and {pair['shadow']}, on average: {mean_texts}"))
        if worst and pair["disagreements"]:
            parts.append(_mismatch_table(pair, worst))
    return Group(*parts)


def _mismatch_table(pair: dict[str, Any], worst: int) -> Table:
    table = Table("why", "distance", "input", pair["version"], pair["shadow"], title="The worst mismatches")
    for mismatch in pair["disagreements"][:worst]:
        inputs = " ".join(_truncate(part) for part in mismatch["inputs"])
        table.add_row(
            mismatch["reason"],
            f"{mismatch['distance']:.4g}",
            *map(Text, (inputs, _truncate(mismatch["live"]), _truncate(mismatch["shadow"]))),
        )
    return table


def _share(rate: float | None) -> str:
    return "-" if rate is None else f"{100 * rate:.2f} %"


def _count(pair: dict[str, Any], *outcomes: str) -> str:
    """Return the number of requests with these outcomes, and of how many."""
    reasons: dict[str, int] = {}
    for outcome in outcomes:
        for reason, calls in pair["reasons"].get(outcome, {}).items():
            reasons[reason] = reasons.get(reason, 0) + calls
    total = sum(pair["calls"][outcome] for outcome in outcomes)
    return f"{total:,}" + "".join(f"\n{reason} {calls:,}" for reason, calls in sorted(reasons.items()))


def _truncate(part: dict[str, Any]) -> str:
    """Return the stored part of an input or an output, truncated."""
    if "json" in part:
        text = json.dumps(part["json"], ensure_ascii=False)
    elif "text" in part:
        text = part["text"]
    else:
        text = f"({part['bytes']} bytes)"
    return text if len(text) <= _WIDTH else text[: _WIDTH - 1] + "…"
