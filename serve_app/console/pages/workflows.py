"""Workflows as graphs of their steps, with the latency of each."""

from __future__ import annotations

from typing import Any

from nicegui import ui

from serve_app.client import formats
from serve_app.console import charts
from serve_app.console.components import heading, set_rows, table
from serve_app.console.layout import View, console_page


@console_page("/workflows", "Workflows")
def workflows(view: View) -> None:
    element = table(["workflow", "archive"], links=["workflow"], title="Workflows")
    ui.label("A workflow is registered with `torchrelay workflow` or POST /workflows.").classes("note")

    async def refresh() -> None:
        found = await view.load(view.client.workflows())
        if found is not None:
            set_rows(
                element,
                [
                    {
                        "workflow": each["workflowName"],
                        "workflow_href": view.url(f"/workflows/{each['workflowName']}"),
                        "archive": each["workflowUrl"] or "–",
                    }
                    for each in found
                ],
            )

    view.every(5.0, refresh)


@console_page("/workflows/{name}", "Workflow")
def workflow(view: View, name: str) -> None:
    page = _WorkflowPage(view, name)
    view.every(3.0, page.refresh)


class _WorkflowPage:
    """Every version of one workflow."""

    def __init__(self, view: View, name: str) -> None:
        self._view, self._name = view, name
        self._metrics = view.metrics
        with ui.row().classes("items-center"):
            heading(name)
            view.link("Try it", f"/models/{name}/try")
        self._column = ui.column().classes("w-full")
        self._versions: dict[str, tuple[ui.label, ui.echart, ui.table]] = {}

    async def refresh(self) -> None:
        """Show the steps of each version."""
        found = await self._view.load(self._view.client.workflow(self._name))
        await self._view.load(self._metrics.refresh())
        if found is None:
            return
        names = [each["workflowVersion"] for each in found]
        if names != list(self._versions):
            self._column.clear()
            with self._column:
                self._versions = {each["workflowVersion"]: self._build(each) for each in found}
        for each in found:
            ongoing, chart, steps = self._versions[each["workflowVersion"]]
            default = ", the default" if each["defaultVersion"] else ""
            ongoing.set_text(
                f"Version {each['workflowVersion']}{default} · "
                f"{formats.plural(each['ongoing'], 'request')} in progress"
            )
            charts.update(chart, self._graph(each))
            set_rows(steps, [self._row(each, step, plan) for step, plan in each["steps"].items()])

    def _build(self, each: dict[str, Any]) -> tuple[ui.label, ui.echart, ui.table]:
        with ui.card().classes("panel"):
            ongoing = ui.label().classes("muted")
            edges = ", ".join(f"{source} to {target}" for source, target in list_edges(each["steps"]))
            chart = charts.show(self._graph(each), f"Graph of the steps: {edges or 'one step'}", "20rem")
            steps = table(["step", "runs", "needs", "p50", "p99"], title="Steps")
        return ongoing, chart, steps

    def _graph(self, each: dict[str, Any]) -> dict[str, Any]:
        steps = each["steps"]
        nodes = []
        for name, (column, row) in place_steps(steps).items():
            latency = self._latency(each, name, 0.5)
            label = f"{name}\n{formats.milliseconds(latency)}" if latency is not None else name
            nodes.append({"name": name, "label": label, "x": column * 220, "y": row * 90})
        return charts.graph("", nodes, list_edges(steps))

    def _row(self, each: dict[str, Any], step: str, plan: dict[str, Any]) -> dict[str, Any]:
        return {
            "step": step,
            "runs": plan.get("model") or f"function {plan.get('function')}",
            "needs": ", ".join(sorted(find_sources(plan, each["steps"]))) or "the request",
            "p50": formats.milliseconds(self._latency(each, step, 0.5)),
            "p99": formats.milliseconds(self._latency(each, step, 0.99)),
        }

    def _latency(self, each: dict[str, Any], step: str, q: float) -> float | None:
        return self._metrics.step_latency(self._name, each["workflowVersion"], step, q)


def find_sources(plan: dict[str, Any], steps: dict[str, Any]) -> set[str]:
    """Return the steps whose responses a step receives."""
    sources: list[str] = []
    for value in (plan.get("inputs"), plan.get("each")):
        sources += [value] if isinstance(value, str) else list((value or {}).values())
    return {source.partition(".")[0] for source in sources} & set(steps)


def list_edges(steps: dict[str, Any]) -> list[tuple[str, str]]:
    return [(source, name) for name, plan in steps.items() for source in sorted(find_sources(plan, steps))]


def place_steps(steps: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Return the column and the row of each step: a step is to the right of those that it needs."""
    columns: dict[str, int] = {}

    def column(name: str) -> int:
        if name not in columns:
            sources = find_sources(steps[name], steps)
            columns[name] = 0
            columns[name] = 1 + max(map(column, sources)) if sources else 0
        return columns[name]

    rows: dict[int, int] = {}
    places = {}
    for name in steps:
        place = column(name)
        places[name] = place, rows.get(place, 0)
        rows[place] = rows.get(place, 0) + 1
    return places
