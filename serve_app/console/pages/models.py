"""A model: its versions with their replicas, the last crash, and the actions on each."""

from __future__ import annotations

import time
from typing import Any

from nicegui import ui

from serve_app.client import formats
from serve_app.client.live_metrics import VersionFigures
from serve_app.console import charts
from serve_app.console.components import badge, confirm, heading, set_rows, table, text_block
from serve_app.console.layout import View, console_page, run_in_page
from serve_app.console.register_dialog import StartProgress


@console_page("/models/{model}", "Model", section="")
def model_page(view: View, model: str) -> None:
    page = _Model(view, model)
    view.every(2.0, page.refresh)


class _Model:
    """The contents of one open page."""

    def __init__(self, view: View, model: str) -> None:
        self._view = view
        self._model = model
        self._metrics = view.metrics
        self._shape: Any = None  # of the versions, which are built again when it changes
        self._versions: dict[str, _Version] = {}
        with ui.element("div").classes("columns"):
            self._rate = charts.show(self._options("rate"), "Requests per second of each version over time")
            self._latency = charts.show(self._options("p99"), "99th percentile latency of each version")
        self._progress = StartProgress()
        self._column = ui.column().classes("w-full")
        run_in_page(self._follow())

    async def _follow(self) -> None:
        await self._progress.follow(self._view, self._model, follow="true")

    async def refresh(self) -> None:
        """Show the current state of every version."""
        await self._view.load(self._metrics.refresh())
        described = await self._view.load(self._view.client.describe(self._model))
        if described is None:
            return
        shape = [(each["modelVersion"], index == 0) for index, each in enumerate(described)]
        if shape != self._shape:
            self._shape = shape
            self._column.clear()
            with self._column:
                self._versions = {
                    version: _Version(self._view, self._model, version, default, self.refresh)
                    for version, default in shape
                }
        for each in described:
            self._versions[each["modelVersion"]].show(each)
        charts.update(self._rate, self._options("rate"))
        charts.update(self._latency, self._options("p99"))

    def _options(self, attribute: str) -> dict[str, Any]:
        series = {
            version: [(moment, _value(each, attribute)) for moment, each in history]
            for (model, version), history in sorted(self._metrics.version_history.items())
            if model == self._model
        }
        if attribute == "rate":
            return charts.time_series("Requests per second", "", series)
        return charts.time_series("99th percentile latency", "ms", series)


def _value(figures: VersionFigures, attribute: str) -> float | None:
    if attribute == "rate":
        return round(figures.rate, 2)
    return None if figures.p99 is None else round(1000 * figures.p99, 2)


class _Version:
    """The panel of one version."""

    def __init__(self, view: View, model: str, version: str, default: bool, refresh: Any) -> None:
        self._view, self._model, self._version, self._refresh = view, model, version, refresh
        with ui.card().classes("panel"):
            with ui.row().classes("w-full items-center"):
                heading(f"Version {version}")
                if default:
                    badge("default")
                ui.space()
                scale = ui.button("Scale", on_click=self._open_scale).props("outline")
                set_default = ui.button("Set default", on_click=self._confirm_default).props("outline")
                remove = ui.button("Remove", on_click=self._confirm_removal, color="negative").props(
                    "outline"
                )
                set_default.set_visibility(not default)
                view.restrict(scale, set_default, remove)
            self._summary = ui.label().classes("muted")
            self._replicas = table(
                ["replica", "state", "node", "process", "memory", "GPU", "running for"],
                title=f"Replicas of version {version}",
            )
            with ui.column().classes("w-full") as self._failure:
                self._failure_title = ui.label().classes("bad")
                self._failure_text = text_block("")
            self._failure.set_visibility(False)
        self._workers = (0, 0)

    def show(self, each: dict[str, Any]) -> None:
        """Show a version's description."""
        self._workers = each["minWorkers"], each["maxWorkers"]
        low, high = self._workers
        bounds = str(low) if low == high else f"{low} to {high}, by load"
        self._summary.set_text(
            f"Replicas: {bounds} · batch of at most {each['batchSize']}, {each['maxBatchDelay']} ms · "
            f"timeout {each['responseTimeout']:g} s · {each['jobQueueStatus']['pendingRequests']} queued · "
            f"{each['modelUrl']}{_list_adapters(each)}{self._describe_cache()}"
        )
        set_rows(self._replicas, [_replica_row(worker) for worker in each["workers"]])
        error = each.get("lastError", "")
        self._failure.set_visibility(bool(error))
        if error:
            moment = formats.clock(formats.parse_time(each.get("lastErrorTime", "")))
            self._failure_title.set_text(f"Last failure of a replica, {moment}")
            self._failure_text.set_text(error)

    def _describe_cache(self) -> str:
        """Return the share of requests that the response cache answered lately; empty without one."""
        figures = self._view.metrics.versions.get((self._model, self._version))
        ratio = figures.cache_hit_ratio if figures is not None else None
        return "" if ratio is None else f" · {100 * ratio:.0f} % of the requests from the response cache"

    def _open_scale(self) -> None:
        view = self._view
        with ui.dialog() as dialog, ui.card():
            ui.label(f"Scale {self._model} {self._version}").classes("section-title")
            low = ui.number("At least", value=self._workers[0], min=0, precision=0)
            high = ui.number("At most", value=self._workers[1], min=0, precision=0)
            effect = ui.label().classes("muted")

            def describe() -> None:
                effect.set_text(_describe_scaling(int(low.value or 0), int(high.value or 0)))

            low.on_value_change(describe)
            high.on_value_change(describe)
            describe()

            async def apply() -> None:
                dialog.close()
                bounds = {"min_worker": int(low.value or 0), "max_worker": int(high.value or 0)}
                await view.change(view.client.scale(self._model, self._version, **bounds))
                await self._refresh()

            with ui.row().classes("w-full justify-end"):
                ui.button("Cancel", on_click=dialog.close).props("flat")
                ui.button("Apply", on_click=apply)
        dialog.props('aria-label="Scale"')
        dialog.open()

    def _confirm_default(self) -> None:
        async def run() -> None:
            await self._view.change(self._view.client.set_default(self._model, self._version))
            await self._refresh()

        confirm(
            f"Make {self._version} the default version?",
            f"Requests to {self._model} that name no version are answered by {self._version}, unless a "
            "traffic policy, an experiment or a rollout routes them. No request is lost.",
            "Set default",
            run,
        )

    def _confirm_removal(self) -> None:
        async def run() -> None:
            await self._view.change(self._view.client.unregister(self._model, self._version))
            await self._refresh()

        confirm(
            f"Remove version {self._version}?",
            f"Its replicas complete their requests and end. {self._model} {self._version} must be registered "
            "again to be served. The default version can be removed only as the last one.",
            "Remove",
            run,
        )


def _replica_row(worker: dict[str, Any]) -> dict[str, Any]:
    started = formats.parse_time(worker["startTime"])
    age = time.time() - started if started else None
    return {
        "replica": worker["id"],
        "state": worker["status"].lower(),
        "node": worker.get("node", "")[:12] or "–",
        "process": worker["pid"],
        "memory": formats.size(worker["memoryUsage"]),
        "GPU": worker["gpuUsage"] if worker["gpu"] else "–",
        "running_for": formats.duration(age),
    }


def _list_adapters(each: dict[str, Any]) -> str:
    names = each.get("adapters")
    return f" · adapters: {', '.join(names)}" if names else ""


def _describe_scaling(low: int, high: int) -> str:
    if high < low:
        return "The upper bound is below the lower one: the server refuses this."
    if high == 0:
        return "All replicas end; requests are refused with 503 until the version is scaled up."
    if low == high:
        return f"The version has exactly {formats.plural(low, 'replica')}."
    idle = " Without requests it has none, and the first one waits for a start." if low == 0 else ""
    return f"The number of replicas follows the load between {low} and {high}.{idle}"
