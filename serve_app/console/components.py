"""Parts that several pages share: figures, badges, tables, and texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from nicegui import ui

_LINK_CELL = """
<q-td :props="props"><a v-if="props.row.{href}" :href="props.row.{href}">{{{{ props.value }}}}</a>
<span v-else>{{{{ props.value }}}}</span></q-td>
"""
_GOOD = ("ready", "running", "done", "promoted", "agreed", "delivered", "ok", "better", "none")
_BAD = ("failed", "rolled_back", "unhealthy", "error", "worse", "major", "lost")


def heading(text: str) -> ui.label:
    return ui.label(text).classes("section-title").props('role="heading" aria-level="2"')


def figures(*names: str) -> dict[str, ui.label]:
    """Add a row of figures; return the label of each value."""
    labels = {}
    with ui.element("div").classes("figures"):
        for name in names:
            with ui.column().classes("figure"):
                ui.label(name).classes("muted")
                labels[name] = ui.label("–").classes("value")
    return labels


def badge(state: str) -> ui.label:
    """Add the name of a state, in the colour of what it means."""
    return ui.label(state.replace("_", " ")).classes(f"badge {tone(state)}")


def tone(state: str) -> str:
    """Return the class of a state's colour."""
    if state in _GOOD:
        return "good"
    return "bad" if state in _BAD else "warn"


def table(columns: Sequence[str], *, links: Sequence[str] = (), title: str = "") -> ui.table:
    """Add a table without rows; a row's field ``NAME_href`` is the target of the cell of column NAME.

    The names of the columns are the keys of the rows, with underscores for spaces.
    """
    definitions = [
        {"name": key, "label": name, "field": key, "align": "left", "classes": f"cell-{key}"}
        for name in columns
        for key in [name.replace(" ", "_")]
    ]
    element = ui.table(rows=[], columns=definitions, row_key="key", pagination=0)
    element.props('flat bordered dense hide-pagination wrap-cells no-data-label="None"')
    element.classes("w-full")
    if title:
        element.props(f'aria-label="{title}"')
    for name in links:
        key = name.replace(" ", "_")
        element.add_slot(f"body-cell-{key}", _LINK_CELL.format(href=f"{key}_href"))
    return element


def set_rows(element: ui.table, rows: Sequence[dict[str, Any]]) -> None:
    """Replace the rows of a table if they differ."""
    numbered = [{"key": index, **row} for index, row in enumerate(rows)]
    if numbered != element.rows:
        element.rows[:] = numbered
        element.update()


def text_block(text: str) -> ui.label:
    """Add a text in its own lines; it is shown as it is, whatever markup it has."""
    return ui.label(text).classes("text-block").props('tabindex="0"')


def confirm(title: str, effect: str, action: str, on_confirm: Callable[[], Any]) -> None:
    """Open a dialog that states the effect of an action and runs it after a confirmation."""
    with ui.dialog() as dialog, ui.card():
        ui.label(title).classes("section-title")
        ui.label(effect)
        with ui.row().classes("w-full justify-end"):
            ui.button("Cancel", on_click=dialog.close).props("flat")

            async def run() -> None:
                dialog.close()
                result = on_confirm()
                if hasattr(result, "__await__"):
                    await result

            ui.button(action, on_click=run, color="negative")
    dialog.props(f'aria-label="{title}"')
    dialog.open()
