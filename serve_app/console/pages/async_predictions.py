"""Async predictions: their states, responses, and cancellation."""

from __future__ import annotations

from typing import Any

from nicegui import ui
from nicegui.events import GenericEventArguments

from serve_app.client import ServerError, TransportError, formats
from serve_app.console.components import confirm, set_rows, table
from serve_app.console.layout import View, console_page
from serve_app.console.pages.try_it import show_response

_STATES = {
    "": "all",
    **{state: state for state in ("queued", "running", "done", "failed", "cancelled")},
}
_LIMIT = 100
_ACTIONS = """
<q-td :props="props">
  <q-btn flat dense label="Open" v-if="props.row.result" @click="() => $parent.$emit('open', props.row)" />
  <q-btn flat dense label="Remove" @click="() => $parent.$emit('remove', props.row)" />
</q-td>
"""


@console_page("/async", "Async predictions")
def async_predictions(view: View) -> None:
    page = _AsyncPage(view)
    view.every(3.0, page.refresh)


class _AsyncPage:
    """The newest async predictions."""

    def __init__(self, view: View) -> None:
        self._view = view
        with ui.row().classes("items-end"):
            self._model = ui.input("Model", on_change=self.refresh).props("clearable debounce=400")
            self._state = ui.select(_STATES, value="", label="State", on_change=self.refresh)
        columns = ["id", "model", "state", "created", "waited", "ran", "status", "webhook", "actions"]
        self._table = table(columns, title="Async predictions")
        self._table.add_slot("body-cell-actions", _ACTIONS)
        self._table.on("open", self._open)
        self._table.on("remove", self._remove)
        ui.label(f"The newest {_LIMIT} that the key may see.").classes("note")

    async def refresh(self) -> None:
        found = await self._view.load(
            self._view.client.async_predictions(self._model.value or None, self._state.value or None, _LIMIT)
        )
        if found is not None:
            set_rows(self._table, [_row(each) for each in found])

    async def _open(self, event: GenericEventArguments) -> None:
        id = str(event.args["id"])
        with ui.dialog() as dialog, ui.card().style("width: 45rem; max-width: 95vw"):
            ui.label(f"Response of {id}").classes("section-title")
            try:
                response = await self._view.client.async_result(id)
            except (ServerError, TransportError) as error:
                ui.label(str(error)).classes("bad")
            else:
                if response is None:
                    ui.label("There is no response yet.")
                else:
                    show_response(response)
            ui.button("Close", on_click=dialog.close).props("flat")
        dialog.props('aria-label="Response"')
        dialog.open()

    def _remove(self, event: GenericEventArguments) -> None:
        id, state = str(event.args["id"]), str(event.args["state"])

        async def run() -> None:
            await self._view.change(self._view.client.cancel_async(id), f"{id} is removed.")
            await self.refresh()

        effect = "It is cancelled." if state in ("queued", "running") else "Its response is deleted."
        confirm("Remove the async prediction?", effect, "Remove", run)


def _row(each: dict[str, Any]) -> dict[str, Any]:
    waited = each["started"] - each["created"] if each["started"] else None
    ran = each["ended"] - each["started"] if each["ended"] and each["started"] else None
    webhook = each.get("webhook") or {}
    return {
        "id": each["id"],
        "model": each["model"] + (f" {each['version']}" if each["version"] else ""),
        "state": each["state"],
        "created": formats.clock(each["created"]),
        "waited": formats.duration(waited),
        "ran": formats.duration(ran),
        "status": each["status"] or each.get("error", "–"),
        "webhook": webhook.get("state", "–"),
        "result": each["result"],
    }
