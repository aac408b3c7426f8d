"""`torchrelay rollout`: let a version take over step by step, watch it, hold it, end it."""

from __future__ import annotations

import time
from datetime import datetime
from typing import Annotated, Any, Optional

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from serve_app.cli.talk import MANAGEMENT, ManagementUrl, Talk, Token, console

rollout_app = typer.Typer(help="Let a version take over step by step, or go back by itself.", no_args_is_help=True)

Model = Annotated[str, typer.Argument()]
_UNDER_WAY = ("starting", "running", "paused")
_COLOURS = {"rolled_back": "red", "aborted": "yellow", "paused": "yellow", "promoted": "green"}
_SHOWN = 12  # decisions, the last ones


@rollout_app.callback()
def rollout(context: typer.Context, management: ManagementUrl = MANAGEMENT, token: Token = "") -> None:
    """Let a version take over step by step, or go back by itself."""
    context.obj = management, token


@rollout_app.command()
def begin(
    context: typer.Context,
    model: Model,
    to: Annotated[str, typer.Argument(help="The version that takes over.")],
    steps: Annotated[Optional[str], typer.Option(help="Percent of the calls: 1,5,25,50,100.")] = None,  # noqa: UP045
    bake: Annotated[Optional[float], typer.Option(help="Seconds for which each step holds.")] = None,  # noqa: UP045
    min_calls: Annotated[Optional[int], typer.Option(help="Of the new version in each step.")] = None,  # noqa: UP045
    keep_warm: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Seconds for which the old version keeps its workers, or forever."),
    ] = None,
    guardrail: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            metavar="NAME=LIMIT", help="error_rate, p99, non_finite, empty, out_of_memory; LIMIT may be off. Repeat it."
        ),
    ] = None,
    key: Annotated[
        str, typer.Option(metavar="KIND=NAME", help="header, cookie or json: who shows the same gets the same version.")
    ] = "",
    follow: Annotated[bool, typer.Option("--watch", help="Show it until it ends, as `watch` does.")] = False,
) -> None:
    """Give a version a growing share of a model's calls, while it is as good as the one before."""
    document: dict[str, Any] = {"to": to, "bake_s": bake, "min_calls": min_calls}
    if steps is not None:
        document["steps"] = [_number("--steps", step) for step in steps.split(",")]
    document = {name: value for name, value in document.items() if value is not None}
    if keep_warm is not None:
        document["keep_warm_s"] = None if keep_warm == "forever" else _number("--keep-warm", keep_warm)
    if guardrail:
        limits = [_pair("--guardrail", said) for said in guardrail]
        document["guardrails"] = {
            name: None if limit == "off" else _number("--guardrail", limit) for name, limit in limits
        }
    if key:
        document["key"] = dict([_pair("--key", key)])
    with Talk(*context.obj) as client:
        said = client.begin_rollout(model, document)
        if follow:
            _watch(client, model, 1.0)
    console.print(shown(said))


@rollout_app.command()
def show(
    context: typer.Context,
    model: Model,
    as_json: Annotated[bool, typer.Option("--json", help="As the management API has it.")] = False,
) -> None:
    """Show how far a model's last rollout is, with its figures and its decisions."""
    with Talk(*context.obj) as client:
        said = client.rollout(model)
    if as_json:
        console.print_json(data=said)
    else:
        console.print(shown(said))


@rollout_app.command()
def watch(
    context: typer.Context,
    model: Model,
    period: Annotated[float, typer.Option(min=0.1, help="Seconds between looks.")] = 1.0,
) -> None:
    """Go on showing it until it ends; the exit code is 1 where the new version has not taken over."""
    with Talk(*context.obj) as client:
        _watch(client, model, period)


@rollout_app.command()
def pause(context: typer.Context, model: Model) -> None:
    """Hold it at its present share; its guardrails still watch."""
    _steer(context, model, "pause")


@rollout_app.command()
def resume(context: typer.Context, model: Model) -> None:
    """Let it go on."""
    _steer(context, model, "resume")


@rollout_app.command()
def abort(context: typer.Context, model: Model) -> None:
    """End it: the version that it began from has all calls again."""
    _steer(context, model, "abort")


def _steer(context: typer.Context, model: str, verb: Any) -> None:
    with Talk(*context.obj) as client:
        console.print(shown(client.steer_rollout(model, verb)))


def _watch(client: Talk, model: str, period: float) -> None:
    """Show a rollout until it ends, and end the command."""
    with Live(console=console, auto_refresh=False) as live:
        try:
            while True:
                said = client.rollout(model)
                live.update(shown(said), refresh=True)
                if said["state"] not in _UNDER_WAY:
                    break
                time.sleep(period)
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
    raise typer.Exit(0 if said["state"] == "promoted" else 1)


def shown(said: dict[str, Any]) -> RenderableType:
    """A rollout: its steps, what both versions' calls came to in this one, its guardrails, its decisions."""
    state = said["state"].replace("_", " ")
    head = Text(f"{said['model']}: {said['to']} in place of {said['baseline']}, {state}", style="bold")
    if said["next"]:
        head.append(f"; it waits for {said['next']}", style="dim")
    return Group(head, _steps(said), _figures(said), *_guardrails(said), _decisions(said))


def _steps(said: dict[str, Any]) -> Text:
    """Each step with how it stands."""
    line = Text()
    for number, percent in enumerate(said["plan"]["steps"]):
        if said["state"] == "promoted" or (number < said["step"] and said["state"] != "starting"):
            mark, style = "✓", "green"
        elif number == said["step"] and said["state"] != "starting":
            mark, style = {"rolled_back": "✗", "aborted": "✗", "paused": "‖"}.get(said["state"], "●"), "bold"
            style = _COLOURS.get(said["state"], style)
        else:
            mark, style = "·", "dim"
        line.append(f"{mark} {percent:g} %   ", style=style)
    return line


def _figures(said: dict[str, Any]) -> Table:
    table = Table("", "version", "calls", "failed", "error rate", "p50", "p99", "non-finite", "empty")
    for arm, version in (("candidate", said["to"]), ("baseline", said["baseline"])):
        figures = said["figures"][arm]
        failed = sum(figures["failed"].values())
        rate = "-" if figures["error_rate"] is None else f"{100 * figures['error_rate']:.3g} %"
        times = ("-" if figures[q] is None else f"{1000 * figures[q]:.3g} ms" for q in ("p50", "p99"))
        counts = (f"{figures[name]:,}" for name in ("non_finite", "empty"))
        table.add_row(arm, Text(version), f"{figures['calls']:,}", f"{failed:,}", rate, *times, *counts)
    return table


def _guardrails(said: dict[str, Any]) -> list[Text]:
    return [Text(one["words"], style="red" if one["broken"] else "dim") for one in said["guardrails"]]


def _decisions(said: dict[str, Any]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    for decision in said["decisions"][-_SHOWN:]:
        when = datetime.fromtimestamp(decision["time"]).strftime("%H:%M:%S")
        verdict = Text(decision["verdict"].replace("_", " "), style=_COLOURS.get(decision["verdict"], ""))
        table.add_row(Text(when, style="dim"), verdict, f"{decision['percent']:g} %", Text(decision["why"]))
    return table


def _number(option: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no number", param_hint=option) from None


def _pair(option: str, text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise typer.BadParameter(f"{text!r} has not the form of {option}", param_hint=option)
    return name, value
