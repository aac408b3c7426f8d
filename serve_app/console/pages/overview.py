"""The overview: load and latency of the server, and its models."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from nicegui import ui

from serve_app.client import formats
from serve_app.console import charts
from serve_app.console.components import figures, heading, set_rows, table
from serve_app.console.first_steps import FirstSteps
from serve_app.console.layout import View, console_page
from serve_app.console.register_dialog import open_dialog

_PAGE_SIZE = 50
_LIST_INTERVAL_S = 10.0
_CONCURRENT_REQUESTS = 8


@console_page("/", "Overview")
def overview(view: View) -> None:
    page = _Overview(view)
    view.every(2.0, page.refresh)


class _Overview:
    """The contents of one open overview."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._metrics = view.metrics
        self._names: list[dict[str, Any]] = []
        self._listed_at = 0.0
        self._replicas: dict[tuple[str, str], str] = {}  # by state and node, of the shown versions
        self._start = 0
        self._first_steps = FirstSteps(view, self._list_again)
        self._figures = figures(
            "Requests/s", "Errors/s", "p50", "p99", "Queued rows", "Replicas", "Memory", "GPU"
        )
        with ui.element("div").classes("columns"):
            self._rate = charts.show(self._rate_options(), "Requests and errors per second over time")
            self._latency = charts.show(
                self._latency_options(), "Median and 99th percentile latency over time"
            )
        with ui.row().classes("w-full items-center"):
            heading("Models")
            ui.space()
            self._filter = ui.input("Filter by name", on_change=self._restart).props("dense clearable")
            register = ui.button("Register", icon="add", on_click=lambda: open_dialog(view, self._list_again))
            view.restrict(register)
        self._table = table(
            [
                "model",
                "version",
                "replicas",
                "state and node",
                "requests/s",
                "errors/s",
                "p50",
                "p99",
                "queued",
            ],
            links=["model"],
            title="Models",
        )
        with ui.row().classes("items-center"):
            self._back = ui.button("Previous", on_click=lambda: self._turn(-_PAGE_SIZE)).props("flat")
            self._place = ui.label().classes("muted")
            self._next = ui.button("Next", on_click=lambda: self._turn(_PAGE_SIZE)).props("flat")

    async def refresh(self) -> None:
        """Show the current figures."""
        await self._view.load(self._metrics.refresh())
        now = asyncio.get_running_loop().time()
        if now >= self._listed_at + _LIST_INTERVAL_S:
            names = await self._view.load(self._view.client.models())
            if names is not None:
                self._names, self._listed_at = names, asyncio.get_running_loop().time()
                await self._first_steps.refresh([entry["modelName"] for entry in names])
                await self._describe_shown()
        self._show_figures()
        self._show_models()
        charts.update(self._rate, self._rate_options())
        charts.update(self._latency, self._latency_options())

    def _show_figures(self) -> None:
        total, gauges = self._metrics.total, self._metrics.gauges
        used = sum(sample.value for sample in gauges.get("MemoryUsed", ())) * 1e6
        gpu = [sample.value for sample in gauges.get("GPUUtilization", ())]
        values = {
            "Requests/s": formats.number(total.rate),
            "Errors/s": formats.number(total.error_rate),
            "p50": formats.milliseconds(total.p50),
            "p99": formats.milliseconds(total.p99),
            "Queued rows": formats.number(total.queue),
            "Replicas": f"{total.replicas:.0f} of {total.desired:.0f}",
            "Memory": formats.size(used),
            "GPU": f"{sum(gpu) / len(gpu):.0f} %" if gpu else "–",
        }
        for name, value in values.items():
            self._figures[name].set_text(value)
        self._figures["Errors/s"].classes(replace="value bad" if total.error_rate else "value")

    async def _describe_shown(self) -> None:
        """Find the states and nodes of the replicas of the models in the table."""
        slots = asyncio.Semaphore(_CONCURRENT_REQUESTS)

        async def describe(model: str) -> list[dict[str, Any]]:
            async with slots:
                return await self._view.load(self._view.client.describe(model)) or []

        names = self._filtered()[self._start : self._start + _PAGE_SIZE]
        described = await asyncio.gather(*map(describe, names))
        self._replicas = {
            (each["modelName"], each["modelVersion"]): count_replicas(each["workers"])
            for versions in described
            for each in versions
        }

    def _filtered(self) -> list[str]:
        wanted = (self._filter.value or "").lower()
        return [entry["modelName"] for entry in self._names if wanted in entry["modelName"].lower()]

    def _show_models(self) -> None:
        names = self._filtered()
        self._start = min(self._start, max(0, (len(names) - 1) // _PAGE_SIZE * _PAGE_SIZE))
        page = names[self._start : self._start + _PAGE_SIZE]
        shown = set(page)
        versions: dict[str, list[str]] = {}
        for model, version in self._metrics.versions:
            if model in shown and version:
                versions.setdefault(model, []).append(version)
        rows = [self._row(model, version) for model in page for version in sorted(versions.get(model, [""]))]
        set_rows(self._table, rows)
        end = self._start + len(page)
        self._place.set_text(
            f"{self._start + 1 if page else 0}–{end} of {formats.plural(len(names), 'model')}"
        )
        self._back.set_enabled(self._start > 0)
        self._next.set_enabled(end < len(names))

    def _row(self, model: str, version: str) -> dict[str, Any]:
        each = self._metrics.versions.get((model, version))
        row = {"model": model, "model_href": self._view.url(f"/models/{model}"), "version": version or "–"}
        if each is None:
            return row
        return row | {
            "state_and_node": self._replicas.get((model, version), "–"),
            "replicas": f"{each.replicas:.0f} of {each.desired:.0f}",
            "requests/s": formats.number(each.rate),
            "errors/s": formats.number(each.error_rate),
            "p50": formats.milliseconds(each.p50),
            "p99": formats.milliseconds(each.p99),
            "queued": formats.number(each.queue),
        }

    def _rate_options(self) -> dict[str, Any]:
        history = self._metrics.history
        series = {
            "requests": [(moment, round(each.rate, 2)) for moment, each in history],
            "errors": [(moment, round(each.error_rate, 2)) for moment, each in history],
        }
        return charts.time_series("Requests per second", "", series)

    def _latency_options(self) -> dict[str, Any]:
        history = self._metrics.history

        def scaled(seconds: float | None) -> float | None:
            return None if seconds is None else round(1000 * seconds, 2)

        series = {
            "p50": [(moment, scaled(each.p50)) for moment, each in history],
            "p99": [(moment, scaled(each.p99)) for moment, each in history],
        }
        return charts.time_series("Latency", "ms", series)

    async def _turn(self, change: int) -> None:
        self._start = max(0, self._start + change)
        await self._show_page()

    async def _restart(self) -> None:
        self._start = 0
        await self._show_page()

    async def _show_page(self) -> None:
        self._show_models()
        await self._describe_shown()
        self._show_models()

    async def _list_again(self) -> None:
        self._listed_at = 0.0
        await self.refresh()


def count_replicas(workers: list[dict[str, Any]]) -> str:
    """Return how many replicas have each state on each node."""
    counts = Counter((worker["status"].lower(), worker.get("node", "")) for worker in workers)
    return ", ".join(
        f"{count} {state} on {node}" if node else f"{count} {state}"
        for (state, node), count in sorted(counts.items())
    )
