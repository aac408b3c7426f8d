"""Experiments: the difference of each metric over time, the sample ratio, and the conclusion in words."""

from __future__ import annotations

from typing import Any

from nicegui import ui

from serve_app.client import formats
from serve_app.console import charts
from serve_app.console.components import badge, confirm, heading, set_rows, table
from serve_app.console.layout import View, console_page

_UNITS = {"percent": "percentage points"}


@console_page("/experiments", "Experiments")
def every_experiment(view: View) -> None:
    _ExperimentList(view, None)


@console_page("/models/{model}/experiments", "Experiments", section="/experiments")
def experiments_of_model(view: View, model: str) -> None:
    _ExperimentList(view, model)


class _ExperimentList:
    """The list of experiments, of one model or of all."""

    def __init__(self, view: View, model: str | None) -> None:
        self._view, self._model = view, model
        self._table = table(
            ["name", "model", "state", "arms", "started", "ended"], links=["name"], title="Experiments"
        )
        ui.label(
            "An experiment is started with `torchrelay experiment` or POST /models/MODEL/experiments."
        ).classes("note")
        view.every(5.0, self.refresh)

    async def refresh(self) -> None:
        found = await self._view.load(self._view.client.experiments(self._model))
        rows = [
            {
                "name": each["name"],
                "name_href": self._view.url(f"/experiments/{each['id']}"),
                "model": each["model"],
                "state": each["state"],
                "arms": ", ".join(f"{arm} = {plan['version']}" for arm, plan in each["arms"].items()),
                "started": formats.clock(each["started_at"]),
                "ended": formats.clock(each["ended"]),
            }
            for each in found or ()
        ]
        if found is not None:
            set_rows(self._table, rows)


@console_page("/experiments/{id}", "Experiment")
def experiment(view: View, id: str) -> None:
    _ExperimentPage(view, id)


class _ExperimentPage:
    """The page of one experiment."""

    def __init__(self, view: View, id: str) -> None:
        self._view, self._id = view, id
        with ui.row().classes("w-full items-center"):
            self._name = heading("…")
            self._state = badge("…")
            ui.space()
            self._stop = ui.button("Stop", on_click=self._confirm_stop, color="negative").props("outline")
            view.restrict(self._stop)
        self._sentence = ui.label().classes("banner")
        self._ratio = ui.label()
        self._arms = table(["arm", "version", "weight", "units", "requests", "failed"], title="Arms")
        self._plots = ui.element("div").classes("columns")
        self._charts: dict[str, Any] = {}
        view.every(3.0, self.refresh)

    async def refresh(self) -> None:
        """Show the current results and their history."""
        client = self._view.client
        document = await self._view.load(client.experiment(self._id))
        points = await self._view.load(client.experiment_history(self._id))
        if document is None or points is None:
            return
        self._name.set_text(f"{document['name']} · model {document['model']}")
        self._state.set_text(document["state"])
        self._stop.set_visibility(document["state"] == "running")
        self._sentence.set_text(document["sentence"])
        ratio = document["sample_ratio"]
        self._ratio.set_text(ratio["sentence"])
        self._ratio.classes(replace="banner" if ratio["alarm"] else "muted")
        set_rows(
            self._arms,
            [
                {
                    "arm": name + (" (baseline)" if name == document["baseline"] else ""),
                    "version": arm["version"],
                    "weight": f"{arm['weight'] / 100:g} %",
                    "units": f"{arm['units']:,}",
                    "requests": f"{arm['calls']:,}",
                    "failed": f"{sum(arm.get('failed', {}).values()):,}",
                }
                for name, arm in document["arms"].items()
            ],
        )
        for name, metric in document["metrics"].items():
            self._show_metric(name, metric, points)

    def _show_metric(self, name: str, metric: dict[str, Any], points: list[dict[str, Any]]) -> None:
        options = metric_options(name, metric, points)
        sentences = "\n".join(found["sentence"] for found in metric["differences"].values())
        if name not in self._charts:
            with self._plots, ui.card().classes("panel"):
                chart = charts.show(options, f"Difference of {name} over time with its confidence interval")
                verdicts = ui.label(sentences).style("white-space: pre-wrap")
            self._charts[name] = chart, verdicts
        chart, verdicts = self._charts[name]
        charts.update(chart, options)
        verdicts.set_text(sentences)

    def _confirm_stop(self) -> None:
        async def run() -> None:
            await self._view.change(
                self._view.client.stop_experiment(self._id), "The experiment has been stopped."
            )
            await self.refresh()

        confirm(
            "Stop the experiment?",
            "The traffic policy routes the requests again. The results are kept; it cannot be resumed.",
            "Stop",
            run,
        )


def metric_options(name: str, metric: dict[str, Any], points: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the plot of a metric's differences from the baseline, with their confidence sequences."""
    series: dict[str, list[tuple[float, float | None]]] = {}
    bands: dict[str, list[tuple[float, float | None, float | None]]] = {}
    for arm in metric["differences"]:
        for point in points:
            found = point["metrics"].get(name, {}).get(arm)
            if found is not None:
                series.setdefault(arm, []).append((point["time"], found["difference"]))
                bands.setdefault(arm, []).append((point["time"], found["low"], found["high"]))
    unit = _UNITS.get(metric["unit"], metric["unit"])
    goal = "higher is better" if metric["goal"] == "increase" else "lower is better"
    options = charts.time_series(f"{name}: difference from the baseline ({goal})", unit, series, bands=bands)
    options["series"].append(charts.zero_line())
    return options
