"""`torchrelay experiment`: start, show and stop experiments; report rewards."""

from __future__ import annotations

import contextlib
import json
from datetime import datetime
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from serve_app.cli.api_client import CliClient, use_server
from serve_app.cli.arguments import read_document
from serve_app.cli.terminal import AsJson, console, fail, show_document, watch_document

experiment_app = typer.Typer(
    callback=use_server, help="Compare versions of a model on its own requests.", no_args_is_help=True
)

Id = Annotated[str, typer.Argument(metavar="ID", help="The id that `start` and `list` print.")]
_COLOURS = {"better": "green", "worse": "red"}
_BATCH = 5_000  # events in a request


@experiment_app.command()
def start(
    context: typer.Context,
    model: Annotated[str, typer.Argument()],
    document: Annotated[
        Any,
        typer.Argument(
            parser=read_document,
            metavar="FILE",
            help="The experiment as JSON or YAML; - is the standard input.",
        ),
    ],
) -> None:
    """Split a model's requests between the arms of an experiment.

    FILE has name, arms (each with a version, and a weight in basis points), metrics, baseline, and key where
    each caller should stay with one arm.
    """
    with CliClient(*context.obj) as client:
        started = client.start_experiment(model, document)
    console.print(
        f"{started['id']} has started. Show it: torchrelay experiment show {started['id']}", highlight=False
    )


@experiment_app.command("list")
def list_(
    context: typer.Context,
    model: Annotated[str | None, typer.Argument(help="Only those of this model.")] = None,
) -> None:
    """Show the experiments, the newest first."""
    with CliClient(*context.obj) as client:
        experiments = client.experiments(model)
    table = Table("id", "model", "name", "arms", "state", "started")
    for experiment in experiments:
        arms = ", ".join(
            f"{name} {arm['version']} {arm['weight'] / 100:g} %" for name, arm in experiment["arms"].items()
        )
        state = Text(experiment["state"], style="green" if experiment["state"] == "running" else "")
        table.add_row(
            experiment["id"],
            *map(escape, (experiment["model"], experiment["name"], arms)),
            state,
            _format_time(experiment["started_at"]),
        )
    console.print(table)


@experiment_app.command()
def show(context: typer.Context, id: Id, as_json: AsJson = False) -> None:
    """Show the current results; they are valid at any time."""
    with CliClient(*context.obj) as client:
        document = client.experiment(id)
    show_document(document, render, as_json)


@experiment_app.command()
def watch(
    context: typer.Context,
    id: Id,
    period: Annotated[float, typer.Option(min=0.1, help="Seconds between updates.")] = 2.0,
) -> None:
    """Show the results continuously, until the experiment is stopped or Ctrl-C."""
    with CliClient(*context.obj) as client, contextlib.suppress(KeyboardInterrupt):
        watch_document(lambda: client.experiment(id), render, ("running",), period)


@experiment_app.command()
def stop(context: typer.Context, id: Id) -> None:
    """Stop it: the model's policy routes its requests again, and the measurements are kept."""
    with CliClient(*context.obj) as client:
        document = client.stop_experiment(id)
    console.print(render(document))


@experiment_app.command()
def delete(context: typer.Context, id: Id) -> None:
    """Delete a stopped experiment with its measurements."""
    with CliClient(*context.obj) as client:
        console.print(client.delete_experiment(id), highlight=False)


@experiment_app.command()
def reward(
    context: typer.Context,
    id: Id,
    value: Annotated[float | None, typer.Argument(help="The reward.")] = None,
    request_id: Annotated[str, typer.Option(help="The X-Request-Id of the response.")] = "",
    key: Annotated[str, typer.Option(help="The client's key, instead of a request id.")] = "",
    metric: Annotated[str, typer.Option(help="The metric, where the experiment has several rewards.")] = "",
    event_id: Annotated[str, typer.Option(help="The event's id; events with the same id count once.")] = "",
    file: Annotated[
        typer.FileText | None,
        typer.Option(help="Events as a JSON list, or one on each line; - is the standard input."),
    ] = None,
) -> None:
    """Report the reward of a request, or of many. A repeated event counts once."""
    if (value is None) == (file is None):
        fail("Give either a VALUE or a --file of events.", code=2)
    if file is not None:
        events = _read_events(file)
    else:
        fields = {"request_id": request_id, "key": key, "metric": metric, "id": event_id}
        events = [{"value": value, **{name: text for name, text in fields.items() if text}}]
    with CliClient(*context.obj) as client:
        results = [
            client.reward(id, *events[start : start + _BATCH]) for start in range(0, len(events), _BATCH)
        ]
    counted, repeated = (sum(result[name] for result in results) for name in ("counted", "repeated"))
    console.print(
        f"{counted} counted" + (f", {repeated} had been counted before" if repeated else ""), highlight=False
    )


def render(experiment: dict[str, Any]) -> RenderableType:
    """Return an experiment as a table of arms and metrics, with sentences."""
    has_key = experiment["key"] is not None
    counts = ("requests", "keys") if has_key else ("requests",)
    table = Table()
    for heading in ("arm", "version", "share", *counts, *map(escape, experiment["metrics"])):
        table.add_column(heading, overflow="fold")  # names of metrics may be long
    for name, arm in experiment["arms"].items():
        cells = [name, arm["version"], f"{arm['weight'] / 100:g} %", f"{arm['calls']:,}"]
        if has_key:
            cells.append(f"{arm['units']:,}")
        figures = [_figure(metric, name) for metric in experiment["metrics"].values()]
        table.add_row(*map(Text, cells), *figures)
    state = (
        experiment["state"]
        if experiment["state"] == "running"
        else f"stopped {_format_time(experiment['ended'])}"
    )
    started_at = _format_time(experiment["started_at"])
    head = Text(f"{experiment['name']}: {experiment['model']}, {state}, started {started_at}", style="bold")
    sentences: list[Text] = []
    for metric in experiment["metrics"].values():
        for difference in metric["differences"].values():
            style = _COLOURS.get(difference["verdict"], "") if difference["trusted"] else "yellow"
            sentences.append(Text(difference["sentence"], style=style))
    if experiment["sample_ratio"]["alarm"]:
        sentences.append(Text(experiment["sample_ratio"]["sentence"], style="bold red"))
    return Group(head, table, *sentences, Text(experiment["sentence"], style="bold"))


def _figure(metric: dict[str, Any], arm: str) -> Text:
    """Return an arm's mean, its confidence interval, and its difference from the baseline."""
    estimate = metric["arms"][arm]
    if estimate["mean"] is None:
        return Text("-")
    unit = {"ms": " ms", "percentage points": " %"}.get(metric["unit"], "")
    text = Text(f"{_number(estimate['mean'])}{unit}")
    if estimate["low"] is not None and estimate["high"] is not None:
        text.append(f"  [{_number(estimate['low'])}, {_number(estimate['high'])}]", style="dim")
    difference = metric["differences"].get(arm)
    if difference is not None and difference["low"] is not None:
        low, high = _number(difference["low"], "+"), _number(difference["high"], "+")
        style = _COLOURS.get(difference["verdict"], "dim")
        text.append(f"\n{_number(difference['difference'], '+')}  [{low}, {high}]", style=style)
    return text


def _number(value: float, sign: str = "") -> str:
    return f"{value:{sign},.4g}" if abs(value) < 10_000 else f"{value:{sign},.0f}"


def _format_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).isoformat(" ", timespec="seconds")


def _read_events(file: Any) -> list[Any]:
    text = file.read()
    try:
        if text.lstrip().startswith("["):
            return json.loads(text)
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    except json.JSONDecodeError as error:
        fail(f"{file.name}: events are a JSON list, or one on each line: {error}")
