"""The drift of a model's inputs and outputs: each feature's current window against its reference."""

from __future__ import annotations

from typing import Any

from nicegui import ui

from serve_app.client import NotFoundError, formats
from serve_app.console import charts
from serve_app.console.components import badge, confirm, heading, set_rows, table, tone
from serve_app.console.layout import View, console_page

_PLOTS = 6  # features that are drawn, the highest index first


@console_page("/models/{model}/drift", "Drift", section="/drift")
def drift(view: View, model: str) -> None:
    page = _DriftPage(view, model)
    view.every(5.0, page.refresh)


class _DriftPage:
    """The versions of one model whose requests are captured."""

    def __init__(self, view: View, model: str) -> None:
        self._view, self._model = view, model
        self._empty = ui.label(
            "No version of this model captures requests. The key capture of model-config.yaml switches it on."
        )
        self._column = ui.column().classes("w-full")
        self._versions: dict[str, _VersionDrift] = {}

    async def refresh(self) -> None:
        """Show the current windows."""
        document = await self._view.load(_get_drift(self._view, self._model))
        if document is None:
            return
        found = {each["version"]: each for each in document["versions"]}
        self._empty.set_visibility(not found)
        if found.keys() != self._versions.keys():
            self._column.clear()
            with self._column:
                self._versions = {each: _VersionDrift(self._view, self._model, each) for each in found}
        for version, each in found.items():
            self._versions[version].show(each)


async def _get_drift(view: View, model: str) -> dict[str, Any]:
    """Return the drift; no version where the model captures nothing."""
    try:
        return await view.client.drift(model)
    except NotFoundError as error:
        if error.reason == "model_not_found":
            raise
        return {"versions": []}


class _VersionDrift:
    """The panel of one version."""

    def __init__(self, view: View, model: str, version: str) -> None:
        self._view, self._model, self._version = view, model, version
        with ui.row().classes("w-full items-center"):
            heading(f"Version {version}")
            self._level = badge("none")
            ui.space()
            reset = ui.button("Make the current window the reference", on_click=self._confirm_reset)
            reset.props("outline")
            view.restrict(reset)
        self._windows = ui.label().classes("muted")
        columns = ["feature", "kind", "level", "PSI", "KS", "critical KS", "reference", "current"]
        self._table = table(columns, title=f"Features of version {version}")
        self._plots = ui.element("div").classes("columns")
        self._charts: dict[str, ui.echart] = {}

    def show(self, each: dict[str, Any]) -> None:
        """Show the statistics of each feature."""
        self._level.set_text(each["level"])
        self._level.classes(replace=f"badge {tone(each['level'])}")
        self._windows.set_text(
            f"{_describe_window('Reference', each['reference'])} · "
            f"{_describe_window('Current', each['current'])} · "
            f"{each['capture']['captured']:,} captured, {sum(each['capture']['dropped'].values()):,} dropped"
        )
        set_rows(self._table, [_row(feature) for feature in each["features"]])
        drawn = {f["name"]: f for f in each["features"] if f["histogram"] is not None}
        names = list(drawn)[:_PLOTS]
        if names != list(self._charts):
            self._plots.clear()
            with self._plots:
                self._charts = {
                    name: charts.show(histogram_options(drawn[name]), f"Distribution of {name}")
                    for name in names
                }
        for name, chart in self._charts.items():
            charts.update(chart, histogram_options(drawn[name]))

    def _confirm_reset(self) -> None:
        async def run() -> None:
            await self._view.change(
                self._view.client.reset_drift(self._model, self._version), "The reference is replaced."
            )

        confirm(
            "Replace the reference?",
            "Later windows are compared with the requests of the current one; the old reference is deleted.",
            "Replace",
            run,
        )


def _describe_window(name: str, window: dict[str, Any] | None) -> str:
    if window is None:
        return f"{name}: no request yet"
    state = "" if window["complete"] else ", incomplete"
    times = f"{formats.clock(window['since'])} to {formats.clock(window['until'])}"
    return f"{name}: {formats.plural(window['requests'], 'request')}, {times}{state}"


def _row(feature: dict[str, Any]) -> dict[str, Any]:
    return {
        "feature": feature["name"],
        "kind": feature["kind"].replace("_", " "),
        "level": feature["level"],
        "PSI": formats.number(feature["psi"]),
        "KS": formats.number(feature["ks"]),
        "critical_KS": formats.number(feature["ks_critical"]),
        "reference": f"{feature['reference_count']:,}",
        "current": f"{feature['current_count']:,}",
    }


def histogram_options(feature: dict[str, Any]) -> dict[str, Any]:
    """Return the plot of both windows' shares in the same bins."""
    histogram = feature["histogram"]
    names = histogram["categories"] or [
        f"{formats.number(low)} to {formats.number(high)}"
        for low, high in zip(histogram["edges"], histogram["edges"][1:])
    ]
    series = {name: [round(100 * share, 2) for share in histogram[name]] for name in ("reference", "current")}
    return charts.bars(feature["name"], "%", names, series)
