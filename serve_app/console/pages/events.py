"""Events of models' starts, log records, and management changes, each with filters."""

from __future__ import annotations

from typing import Any

from nicegui import ui

from serve_app.client import formats
from serve_app.console.components import set_rows, table
from serve_app.console.layout import View, console_page
from serve_app.console.register_dialog import describe_stage

_LIMIT = 200
_STAGES = (
    "accepted",
    "downloading",
    "unpacking",
    "checking",
    "installing",
    "starting",
    "loading",
    "warming",
    "isolated",
    "recycling",
)
_MAX_TEXT = 1000


@console_page("/events", "Events and logs")
def events(view: View) -> None:
    with ui.tabs().props("align=left") as tabs:
        for name in ("Events", "Logs", "Changes"):
            ui.tab(name)
    with ui.tab_panels(tabs, value="Events").classes("w-full").props("animated=false keep-alive"):
        with ui.tab_panel("Events"):
            event_list = _Events(view)
        with ui.tab_panel("Logs"):
            log_list = _Logs(view)
        with ui.tab_panel("Changes"):
            change_list = _Changes(view)
    lists: dict[str, _Events | _Logs | _Changes] = {
        "Events": event_list,
        "Logs": log_list,
        "Changes": change_list,
    }

    async def refresh() -> None:
        await lists[str(tabs.value or "Events")].refresh()

    tabs.on_value_change(refresh)
    view.every(3.0, refresh)


class _Events:
    def __init__(self, view: View) -> None:
        self._view = view
        with ui.row().classes("items-end"):
            self._model = ui.input("Model", on_change=self.refresh).props("clearable debounce=400")
            stages = {"": "all", **{stage: stage for stage in (*_STAGES, "ready", "failed")}}
            self._stage = ui.select(stages, value="", label="Stage", on_change=self.refresh)
        columns = ["time", "model", "version", "stage", "details"]
        self._table = table(columns, links=["model"], title="Events")

    async def refresh(self) -> None:
        found = await self._view.load(
            self._view.client.list_events(self._model.value or None, self._stage.value or None, _LIMIT)
        )
        if found is not None:
            set_rows(self._table, [self._row(each) for each in found])

    def _row(self, each: dict[str, Any]) -> dict[str, Any]:
        return {
            "time": formats.clock(each["time"]),
            "model": each["model"],
            "model_href": self._view.url(f"/models/{each['model']}") if each["version"] else "",
            "version": each["version"] or "–",
            "stage": each["stage"],
            "details": describe_stage(each["stage"], each["details"]).partition(" ")[2][:_MAX_TEXT],
        }


class _Logs:
    def __init__(self, view: View) -> None:
        self._view = view
        with ui.row().classes("items-end"):
            logs = {"server": "server", "model": "models", "access": "access"}
            self._log = ui.select(logs, value="server", label="Log", on_change=self.refresh)
            levels = {"": "all", "INFO": "INFO", "WARNING": "WARNING", "ERROR": "ERROR"}
            self._level = ui.select(levels, value="", label="Level from", on_change=self.refresh)
            self._model = ui.input("Model", on_change=self.refresh).props("clearable debounce=400")
            self._text = ui.input("Text", on_change=self.refresh).props(
                "clearable debounce=400 maxlength=200"
            )
        self._table = table(["time", "level", "source", "message"], title="Log records")
        ui.label("The log of the head node, the newest record first.").classes("note")

    async def refresh(self) -> None:
        level = self._level.value if self._log.value != "access" else None
        found = await self._view.load(
            self._view.client.logs(
                self._log.value, level or None, self._model.value or None, self._text.value or None, _LIMIT
            )
        )
        if found is not None:
            set_rows(self._table, [{**each, "message": each["message"][:_MAX_TEXT]} for each in found])


class _Changes:
    def __init__(self, view: View) -> None:
        self._view = view
        with ui.row().classes("items-end"):
            self._subject = ui.input("Model, workflow or experiment", on_change=self.refresh)
            self._subject.props("clearable debounce=400")
            results = {"": "all", "ok": "ok", "refused": "refused", "failed": "failed"}
            self._result = ui.select(results, value="", label="Result", on_change=self.refresh)
        self._table = table(["time", "actor", "address", "action", "subject", "result"], title="Changes")

    async def refresh(self) -> None:
        filters = {"limit": _LIMIT, "subject": self._subject.value, "result": self._result.value}
        found = await self._view.load(
            self._view.client.audit({name: value for name, value in filters.items() if value})
        )
        if found is not None:
            set_rows(self._table, [{**each, "time": formats.clock(each["time"])} for each in found])
