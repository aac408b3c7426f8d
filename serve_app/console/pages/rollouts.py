"""The rollout of a model: the timeline of its decisions with the figures of the guardrails."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from nicegui import ui

from serve_app.client import NotFoundError, formats
from serve_app.console import charts
from serve_app.console.components import badge, confirm, heading, set_rows, table, tone
from serve_app.console.layout import View, console_page

_EFFECTS: dict[str, tuple[str, str]] = {
    "pause": ("Pause the rollout?", "The share stays as it is; guardrails still roll back a bad version."),
    "resume": ("Resume the rollout?", "The share grows again after the step's time and guardrails."),
    "abort": ("Abort the rollout?", "The old version gets every request again at once."),
}
_ACTIVE = ("starting", "running", "paused")


@console_page("/models/{model}/rollout", "Rollout", section="/rollout")
def rollout(view: View, model: str) -> None:
    page = _RolloutPage(view, model)
    view.every(1.0, page.refresh)


class _RolloutPage:
    """The last rollout of one model, and the form that starts one."""

    def __init__(self, view: View, model: str) -> None:
        self._view, self._model = view, model
        self._shown = ""  # the id and the number of decisions that the timeline has
        with ui.row().classes("w-full items-center"):
            self._title = heading("No rollout yet")
            self._state = badge("none")
            ui.space()
            self._buttons = {
                action: ui.button(action.capitalize(), on_click=lambda action=action: self._confirm(action))
                for action in ("pause", "resume", "abort")
            }
            for button in self._buttons.values():
                button.props("outline").set_visibility(False)
            start = ui.button("Start a rollout", on_click=self._open_form)
            view.restrict(start, *self._buttons.values())
        self._next = ui.label().classes("muted")
        self._share = charts.show(_share_options([]), "Share of the new version over time", "13rem")
        self._share.set_visibility(False)
        self._guardrails = table(
            ["guardrail", "state", "new version", "baseline", "limit", "details"], title="Guardrails"
        )
        heading("Timeline")
        self._timeline = ui.column().classes("timeline").props('role="list"')

    async def refresh(self) -> None:
        """Show the current state."""
        document = await self._view.load(_get_rollout(self._view, self._model))
        if document is None:
            return
        state = document["state"]
        self._title.set_text(f"{document['baseline']} → {document['to']}: {document['percent']:g} %")
        self._state.set_text(state.replace("_", " "))
        self._state.classes(replace=f"badge {tone(state)}")
        self._next.set_text(document["next"] or "")
        for action, button in self._buttons.items():
            expected = {"pause": ("running",), "resume": ("paused",), "abort": _ACTIVE}[action]
            button.set_visibility(state in expected)
        set_rows(self._guardrails, [_guardrail_row(each) for each in document["guardrails"]])
        self._share.set_visibility(True)
        charts.update(self._share, _share_options(document["decisions"]))
        shown = f"{document['id']} {len(document['decisions'])}"
        if shown != self._shown:
            self._shown = shown
            self._show_timeline(document)

    def _show_timeline(self, document: dict[str, Any]) -> None:
        self._timeline.clear()
        with self._timeline:
            for decision in reversed(document["decisions"]):
                with ui.column().props('role="listitem"').style("gap: 0"):
                    with ui.row().classes("items-center"):
                        badge(decision["verdict"])
                        ui.label(f"{decision['percent']:g} %").style("font-weight: 600")
                        after = formats.duration(decision["time"] - document["started_at"])
                        ui.label(f"{formats.clock(decision['time'])}, after {after}").classes("muted")
                    ui.label(decision["reason"])

    def _confirm(self, action: Literal["pause", "resume", "abort"]) -> None:
        async def run() -> None:
            await self._view.change(self._view.client.update_rollout(self._model, action), f"Done: {action}.")
            await self.refresh()

        title, effect = _EFFECTS[action]
        confirm(title, effect, action.capitalize(), run)

    async def _open_form(self) -> None:
        described = await self._view.load(self._view.client.describe(self._model))
        if described is None:
            return
        versions = [each["modelVersion"] for each in described]
        if len(versions) < 2:
            ui.notify("A rollout needs a second version; register one first.", type="warning")
            return
        with ui.dialog() as dialog, ui.card().style("width: 32rem; max-width: 95vw"):
            ui.label(f"Start a rollout of {self._model}").classes("section-title")
            to = ui.select(versions[1:], value=versions[1], label="New version").classes("w-full")
            steps = ui.input("Steps in percent", value="1, 5, 25, 50, 100").classes("w-full")
            bake = ui.number("Seconds of each step", value=60, min=0)
            calls = ui.number("Requests of each step, at least", value=50, min=0, precision=0)

            async def start() -> None:
                try:
                    shares = [float(part) for part in (steps.value or "").split(",")]
                except ValueError:
                    ui.notify("Steps are numbers separated by commas.", type="warning")
                    return
                plan = {"to": to.value, "steps": shares, "bake_s": bake.value or 0}
                plan["min_calls"] = int(calls.value or 0)
                done = await self._view.change(
                    self._view.client.start_rollout(self._model, plan), "The rollout has started."
                )
                if done is not None:
                    dialog.close()
                    await self.refresh()

            with ui.row().classes("w-full justify-end"):
                ui.button("Cancel", on_click=dialog.close).props("flat")
                ui.button("Start", on_click=start)
        dialog.props('aria-label="Start a rollout"')
        dialog.open()


async def _get_rollout(view: View, model: str) -> dict[str, Any] | None:
    """Return the last rollout; None where the model had none."""
    try:
        return await view.client.rollout(model)
    except NotFoundError as error:
        if error.reason == "model_not_found":
            raise
        await asyncio.sleep(0)
        return None


def _share_options(decisions: list[dict[str, Any]]) -> dict[str, Any]:
    points = [(decision["time"], decision["percent"]) for decision in decisions]
    options = charts.time_series("Share of the new version", "%", {"share": points})
    for series in options["series"]:
        series["step"] = "end"
    return options


def _guardrail_row(each: dict[str, Any]) -> dict[str, Any]:
    def shown(value: float | None) -> str:
        if value is None:
            return "–"
        if each["name"] == "p99":
            return formats.milliseconds(value)
        return formats.number(value) if each["name"] == "out_of_memory" else formats.percent(value)

    limit = f"{each['limit']:g} times" if each["name"] == "p99" else f"{each['limit']:g}"
    return {
        "guardrail": each["name"].replace("_", " "),
        "state": "broken" if each["broken"] else "within its limit",
        "new_version": shown(each["value"]),
        "baseline": shown(each["baseline"]),
        "limit": limit,
        "details": each.get("words") or each.get("sentence") or "",
    }
