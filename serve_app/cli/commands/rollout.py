"""`torchrelay rollout`: start, show, pause, resume and abort rollouts."""

from __future__ import annotations

import math
from datetime import datetime
from typing import Annotated, Any, Literal

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from serve_app.cli.api_client import CliClient, use_server
from serve_app.cli.arguments import Pair, pair_option, parse_number
from serve_app.cli.terminal import AsJson, console, show_document, watch_document
from serve_app.client import Client
from serve_app.domain.rollout import ACTIVE_STATES

rollout_app = typer.Typer(
    callback=use_server,
    help="Move requests to a version step by step, with automatic rollback.",
    no_args_is_help=True,
)

Model = Annotated[str, typer.Argument()]
_COLOURS = {"rolled_back": "red", "aborted": "yellow", "paused": "yellow", "promoted": "green"}
_SHOWN_DECISIONS = 12  # the last ones


def _parse_steps(text: str) -> list[float]:
    return [parse_number(step) for step in text.split(",")]


def _parse_keep_warm(text: str) -> float:
    return math.inf if text == "forever" else parse_number(text)


def _parse_limit(text: str) -> float | None:
    return None if text == "off" else parse_number(text)


@rollout_app.command()
def start(
    context: typer.Context,
    model: Model,
    to: Annotated[str, typer.Argument(help="The new version.")],
    steps: Annotated[
        Any, typer.Option(parser=_parse_steps, metavar="TEXT", help="Percent of the requests: 1,5,25,50,100.")
    ] = None,
    bake: Annotated[float | None, typer.Option(help="Seconds of each step.")] = None,
    min_calls: Annotated[
        int | None, typer.Option(help="Minimum of the new version's requests in each step.")
    ] = None,
    keep_warm: Annotated[
        Any,
        typer.Option(
            parser=_parse_keep_warm,
            metavar="TEXT",
            help="Seconds for which the old version keeps its workers, or forever.",
        ),
    ] = None,
    guardrail: Annotated[
        list[Pair] | None,
        pair_option(
            "NAME=LIMIT",
            "error_rate, p99, non_finite, empty, out_of_memory; LIMIT may be off. Repeat it.",
            _parse_limit,
        ),
    ] = None,
    key: Annotated[
        Pair | None,
        pair_option("KIND=NAME", "header, cookie or json: clients with the same value get the same version."),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--watch", help="Show the rollout until it ends, as `watch` does.")
    ] = False,
) -> None:
    """Move a growing share of a model's requests to a version, while its guardrails hold."""
    options = {"steps": steps, "bake_s": bake, "min_calls": min_calls}
    document = {"to": to, **{name: value for name, value in options.items() if value is not None}}
    if keep_warm is not None:
        document["keep_warm_s"] = None if keep_warm == math.inf else keep_warm
    if guardrail:
        document["guardrails"] = dict(guardrail)
    if key:
        document["key"] = dict([key])
    with CliClient(*context.obj) as client:
        rollout = client.start_rollout(model, document)
        if follow:
            _watch(client, model, 1.0)
    console.print(render(rollout))


@rollout_app.command()
def show(context: typer.Context, model: Model, as_json: AsJson = False) -> None:
    """Show the progress of a model's last rollout, with its figures and decisions."""
    with CliClient(*context.obj) as client:
        rollout = client.rollout(model)
    show_document(rollout, render, as_json)


@rollout_app.command()
def watch(
    context: typer.Context,
    model: Model,
    period: Annotated[float, typer.Option(min=0.1, help="Seconds between updates.")] = 1.0,
) -> None:
    """Show a rollout until it ends; the exit code is 1 unless the new version was promoted."""
    with CliClient(*context.obj) as client:
        _watch(client, model, period)


@rollout_app.command()
def pause(context: typer.Context, model: Model) -> None:
    """Pause at the current share; guardrails stay active."""
    _update(context, model, "pause")


@rollout_app.command()
def resume(context: typer.Context, model: Model) -> None:
    """Resume a paused rollout."""
    _update(context, model, "resume")


@rollout_app.command()
def abort(context: typer.Context, model: Model) -> None:
    """Abort: the baseline version gets all requests again."""
    _update(context, model, "abort")


def _update(context: typer.Context, model: str, action: Literal["pause", "resume", "abort"]) -> None:
    with CliClient(*context.obj) as client:
        console.print(render(client.update_rollout(model, action)))


def _watch(client: Client, model: str, period: float) -> None:
    """Show a rollout until it ends, and exit."""
    rollout = watch_document(lambda: client.rollout(model), render, ACTIVE_STATES, period)
    raise typer.Exit(0 if rollout["state"] == "promoted" else 1)


def render(rollout: dict[str, Any]) -> RenderableType:
    """Return a rollout's steps, the figures of its current step, its guardrails and its decisions."""
    state = rollout["state"].replace("_", " ")
    head = Text(
        f"{rollout['model']}: {rollout['to']} in place of {rollout['baseline']}, {state}", style="bold"
    )
    if rollout["next"]:
        head.append(f"; waiting for {rollout['next']}", style="dim")
    return Group(head, _steps(rollout), _figures(rollout), *_guardrails(rollout), _decisions(rollout))


def _steps(rollout: dict[str, Any]) -> Text:
    """Return the steps with their states."""
    line = Text()
    for number, percent in enumerate(rollout["plan"]["steps"]):
        if rollout["state"] == "promoted" or (number < rollout["step"] and rollout["state"] != "starting"):
            mark, style = "✓", "green"
        elif number == rollout["step"] and rollout["state"] != "starting":
            mark, style = (
                {"rolled_back": "✗", "aborted": "✗", "paused": "‖"}.get(rollout["state"], "●"),
                "bold",
            )
            style = _COLOURS.get(rollout["state"], style)
        else:
            mark, style = "·", "dim"
        line.append(f"{mark} {percent:g} %   ", style=style)
    return line


def _figures(rollout: dict[str, Any]) -> Table:
    table = Table()
    for heading in ("", "version", "requests", "failed", "error rate", "p50", "p99", "non-finite", "empty"):
        table.add_column(heading, overflow="fold")
    for arm, version in (("candidate", rollout["to"]), ("baseline", rollout["baseline"])):
        figures = rollout["figures"][arm]
        failed = sum(figures["failed"].values())
        rate = "-" if figures["error_rate"] is None else f"{100 * figures['error_rate']:.3g} %"
        times = ("-" if figures[q] is None else f"{1000 * figures[q]:.3g} ms" for q in ("p50", "p99"))
        counts = (f"{figures[name]:,}" for name in ("non_finite", "empty"))
        table.add_row(arm, Text(version), f"{figures['calls']:,}", f"{failed:,}", rate, *times, *counts)
    return table


def _guardrails(rollout: dict[str, Any]) -> list[Text]:
    return [
        Text(guardrail["words"], style="red" if guardrail["broken"] else "dim")
        for guardrail in rollout["guardrails"]
    ]


def _decisions(rollout: dict[str, Any]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    for decision in rollout["decisions"][-_SHOWN_DECISIONS:]:
        time_of_day = datetime.fromtimestamp(decision["time"]).strftime("%H:%M:%S")
        verdict = Text(decision["verdict"].replace("_", " "), style=_COLOURS.get(decision["verdict"], ""))
        table.add_row(
            Text(time_of_day, style="dim"), verdict, f"{decision['percent']:g} %", Text(decision["reason"])
        )
    return table
