"""`torchrelay experiment`: begin, look at, stop; and say what became of calls."""

from __future__ import annotations

import json
import time
from datetime import datetime
from typing import Annotated, Any, Optional

import typer
import yaml
from rich.console import Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from serve_app.cli.talk import MANAGEMENT, ManagementUrl, Talk, Token, console, errors

experiment_app = typer.Typer(help="Compare versions of a model on its own calls.", no_args_is_help=True)

Id = Annotated[str, typer.Argument(metavar="ID", help="As `begin` and `list` say it.")]
_COLOURS = {"better": "green", "worse": "red"}
_PERIOD = 2.0  # seconds between looks


@experiment_app.callback()
def experiment(context: typer.Context, management: ManagementUrl = MANAGEMENT, token: Token = "") -> None:
    """Compare versions of a model on its own calls."""
    context.obj = management, token


@experiment_app.command()
def begin(
    context: typer.Context,
    model: Annotated[str, typer.Argument()],
    file: Annotated[typer.FileText, typer.Argument(help="The experiment as JSON or YAML; - reads it from here.")],
) -> None:
    """Deal a model's calls out to the arms of an experiment.

    FILE has name, arms (of each a version, and a weight in basis points), metrics, baseline, and key where each
    caller should stay with one arm.
    """
    document = _read(file)
    with Talk(*context.obj) as client:
        begun = client.begin_experiment(model, document)
    console.print(f"{begun['id']} has begun. Look at it: torchrelay experiment show {begun['id']}", highlight=False)


@experiment_app.command("list")
def list_(
    context: typer.Context,
    model: Annotated[Optional[str], typer.Argument(help="Of this model alone.")] = None,  # noqa: UP045
) -> None:
    """Show the experiments, the newest first."""
    with Talk(*context.obj) as client:
        found = client.experiments(model)
    table = Table("id", "model", "name", "arms", "state", "began")
    for one in found:
        arms = ", ".join(f"{name} {arm['version']} {arm['weight'] / 100:g} %" for name, arm in one["arms"].items())
        state = Text(one["state"], style="green" if one["state"] == "running" else "")
        table.add_row(one["id"], *map(escape, (one["model"], one["name"], arms)), state, _when(one["began"]))
    console.print(table)


@experiment_app.command()
def show(
    context: typer.Context,
    id: Id,
    as_json: Annotated[bool, typer.Option("--json", help="As the management API has it.")] = False,
) -> None:
    """Show what is known by now: you may look whenever you like."""
    with Talk(*context.obj) as client:
        said = client.experiment(id)
    if as_json:
        console.print_json(data=said)
    else:
        console.print(shown(said))


@experiment_app.command()
def watch(
    context: typer.Context,
    id: Id,
    period: Annotated[float, typer.Option(min=0.1, help="Seconds between looks.")] = _PERIOD,
) -> None:
    """Go on showing what is known, until the experiment is stopped or Ctrl-C."""
    with Talk(*context.obj) as client, Live(console=console, auto_refresh=False) as live:
        try:
            while True:
                said = client.experiment(id)
                live.update(shown(said), refresh=True)
                if said["state"] != "running":
                    return
                time.sleep(period)
        except KeyboardInterrupt:
            return


@experiment_app.command()
def stop(context: typer.Context, id: Id) -> None:
    """End it: the model's policy deals its calls out again, and what was measured stays."""
    with Talk(*context.obj) as client:
        said = client.stop_experiment(id)
    console.print(shown(said))


@experiment_app.command()
def forget(context: typer.Context, id: Id) -> None:
    """Drop an experiment that was stopped, with everything that was measured."""
    with Talk(*context.obj) as client:
        console.print(client.forget_experiment(id), highlight=False)


@experiment_app.command()
def reward(
    context: typer.Context,
    id: Id,
    value: Annotated[Optional[float], typer.Argument(help="What it came to.")] = None,  # noqa: UP045
    request_id: Annotated[str, typer.Option(help="The X-Request-Id of the call's answer.")] = "",
    key: Annotated[str, typer.Option(help="Or what its caller showed as a key.")] = "",
    metric: Annotated[str, typer.Option(help="Where the experiment has several rewards.")] = "",
    event_id: Annotated[str, typer.Option(help="Two with the same are one.")] = "",
    file: Annotated[
        Optional[typer.FileText],  # noqa: UP045
        typer.Option(help="Events as a JSON list, or one on each line; - reads them from here."),
    ] = None,
) -> None:
    """Say what became of a call, or of many. What is said twice counts once."""
    if (value is None) == (file is None):
        errors.print("Give either a VALUE or a --file of events.")
        raise typer.Exit(2)
    if file is not None:
        events = _events(file)
    else:
        said = {"request_id": request_id, "key": key, "metric": metric, "id": event_id}
        events = [{"value": value, **{name: word for name, word in said.items() if word}}]
    with Talk(*context.obj) as client:
        answers = [client.reward(id, *events[at : at + _AT_ONCE]) for at in range(0, len(events), _AT_ONCE)]
    counted, repeated = (sum(answer[word] for answer in answers) for word in ("counted", "repeated"))
    console.print(f"{counted} counted" + (f", {repeated} had been counted before" if repeated else ""), highlight=False)


_AT_ONCE = 5_000  # events in a request


def shown(said: dict[str, Any]) -> RenderableType:
    """An experiment as a table of arms and metrics, and in sentences."""
    keyed = said["key"] is not None
    table = Table("arm", "version", "share", "calls", *(("callers",) if keyed else ()), *map(escape, said["metrics"]))
    for name, arm in said["arms"].items():
        cells = [name, arm["version"], f"{arm['weight'] / 100:g} %", f"{arm['calls']:,}"]
        if keyed:
            cells.append(f"{arm['units']:,}")
        figures = [_figure(metric, name) for metric in said["metrics"].values()]
        table.add_row(*map(Text, cells), *figures)
    state = said["state"] if said["state"] == "running" else f"stopped {_when(said['ended'])}"
    head = Text(f"{said['name']}: {said['model']}, {state}, began {_when(said['began'])}", style="bold")
    sentences: list[Text] = []
    for metric in said["metrics"].values():
        for difference in metric["differences"].values():
            style = _COLOURS.get(difference["verdict"], "") if difference["trusted"] else "yellow"
            sentences.append(Text(difference["sentence"], style=style))
    if said["sample_ratio"]["alarm"]:
        sentences.append(Text(said["sample_ratio"]["sentence"], style="bold red"))
    return Group(head, table, *sentences, Text(said["sentence"], style="bold"))


def _figure(metric: dict[str, Any], arm: str) -> Text:
    """An arm's mean, where it is for sure, and how far it is from the baseline's."""
    seen = metric["arms"][arm]
    if seen["mean"] is None:
        return Text("-")
    unit = {"ms": " ms", "percentage points": " %"}.get(metric["unit"], "")
    text = Text(f"{_number(seen['mean'])}{unit}")
    if seen["low"] is not None and seen["high"] is not None:
        text.append(f"  [{_number(seen['low'])}, {_number(seen['high'])}]", style="dim")
    difference = metric["differences"].get(arm)
    if difference is not None and difference["low"] is not None:
        low, high = _number(difference["low"], "+"), _number(difference["high"], "+")
        style = _COLOURS.get(difference["verdict"], "dim")
        text.append(f"\n{_number(difference['difference'], '+')}  [{low}, {high}]", style=style)
    return text


def _number(value: float, sign: str = "") -> str:
    return f"{value:{sign},.4g}" if abs(value) < 10_000 else f"{value:{sign},.0f}"


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).isoformat(" ", timespec="seconds")


def _read(file: Any) -> Any:
    """A JSON or YAML document; a file that is none ends the command."""
    try:
        return yaml.safe_load(file)
    except yaml.YAMLError as error:
        errors.print(f"{file.name} is neither JSON nor YAML: {escape(str(error))}", highlight=False)
        raise typer.Exit(1) from None


def _events(file: Any) -> list[Any]:
    text = file.read()
    try:
        if text.lstrip().startswith("["):
            return json.loads(text)
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    except json.JSONDecodeError as error:
        errors.print(f"{file.name}: events are a JSON list, or one on each line: {error}", highlight=False)
        raise typer.Exit(1) from None
