"""`torchrelay shadow`: how a model's shadow agrees with its live versions."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from serve_app.cli.talk import MANAGEMENT, ManagementUrl, Talk, Token, console

_WIDTH = 60  # characters of an input or an output in the table


def shadow(
    model: Annotated[str, typer.Argument()],
    worst: Annotated[int, typer.Option(min=0, help="So many of the worst disagreements.")] = 5,
    forget: Annotated[bool, typer.Option("--forget", help="Drop the figures, and the inputs that are kept.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="As the management API has it.")] = False,
    management: ManagementUrl = MANAGEMENT,
    token: Token = "",
) -> None:
    """Show how the answers of a model's shadow agree with the live ones, and where they differ most."""
    with Talk(management, token) as client:
        if forget:
            console.print(client.forget_shadow(model), highlight=False)
            return
        said = client.shadow(model)
    if as_json:
        console.print_json(data=said)
    else:
        console.print(shown(said, worst))


def shown(said: dict[str, Any], worst: int = 5) -> RenderableType:
    """A shadow's figures as a table of live versions, and the disagreements under it."""
    now = said["shadow"]
    head = f"{said['model']}: no shadow now" if now is None else f"{said['model']}: shadow {now['version']}"
    if now is not None:
        head += f", {now['percent']:g} % of the calls, compared as {now['compare']['kind']}"
    columns = ("live", "shadow", "compared", "agree", "label flips", "errors", "not sent", "p99 live", "p99 shadow")
    table = Table(*columns)
    for pair in said["against"]:
        calls, latency = pair["calls"], pair["latency"]
        table.add_row(
            pair["version"],
            pair["shadow"],
            f"{calls['agreed'] + calls['disagreed']:,}",
            _share(pair["agreement_rate"]),
            _share(pair["label_flip_rate"]),
            _count(pair, "error"),
            _count(pair, "skipped", "dropped"),
            *(f"{latency[which]['p99_ms']:.4g} ms" if which in latency else "-" for which in ("live", "shadow")),
        )
    if not said["against"]:
        return Group(Text(head, style="bold"), Text("Nothing was compared yet."))
    parts: list[RenderableType] = [Text(head, style="bold"), table]
    for pair in said["against"]:
        if means := {name: value for name, value in pair["measures"].items() if name != "label_flipped"}:
            said_means = ", ".join(f"{name} {value:.4g}" for name, value in means.items())
            parts.append(Text(f"{pair['version']} and {pair['shadow']}, on average: {said_means}"))
        if worst and pair["disagreements"]:
            parts.append(_disagreements(pair, worst))
    return Group(*parts)


def _disagreements(pair: dict[str, Any], worst: int) -> Table:
    table = Table("why", "distance", "input", pair["version"], pair["shadow"], title="The worst disagreements")
    for one in pair["disagreements"][:worst]:
        inputs = " ".join(_short(part) for part in one["inputs"])
        table.add_row(
            one["why"], f"{one['distance']:.4g}", *map(Text, (inputs, _short(one["live"]), _short(one["shadow"])))
        )
    return table


def _share(rate: float | None) -> str:
    return "-" if rate is None else f"{100 * rate:.2f} %"


def _count(pair: dict[str, Any], *outcomes: str) -> str:
    """How many calls came to these, and of what."""
    reasons: dict[str, int] = {}
    for outcome in outcomes:
        for reason, calls in pair["reasons"].get(outcome, {}).items():
            reasons[reason] = reasons.get(reason, 0) + calls
    total = sum(pair["calls"][outcome] for outcome in outcomes)
    return f"{total:,}" + "".join(f"\n{reason} {calls:,}" for reason, calls in sorted(reasons.items()))


def _short(part: dict[str, Any]) -> str:
    """What is kept of an input or an output, on a line or two."""
    if "json" in part:
        text = json.dumps(part["json"], ensure_ascii=False)
    elif "text" in part:
        text = part["text"]
    else:
        text = f"({part['bytes']} bytes)"
    return text if len(text) <= _WIDTH else text[: _WIDTH - 1] + "…"
