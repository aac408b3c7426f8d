"""The dialog that registers an archive and follows the stages of its start."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from nicegui import ui

from serve_app.client import ServerError, TransportError, formats
from serve_app.console.layout import View

_STAGES = ("accepted", "downloading", "unpacking", "checking", "installing", "starting", "loading", "warming")


def open_dialog(view: View, on_registered: Callable[[], Awaitable[None]]) -> None:
    """Open the dialog; ``on_registered`` is awaited after a registration."""
    with ui.dialog() as dialog, ui.card().style("width: 36rem; max-width: 95vw"):
        ui.label("Register a model").classes("section-title")
        url = ui.input("Archive or URL").classes("w-full").props("autofocus")
        url.props('hint="A file of the model store, or an https, s3, gs or hf URL"')
        with ui.row().classes("w-full"):
            name = ui.input("Name (default: the archive's)")
            workers = ui.number("Workers", value=1, min=0, precision=0)
        progress = StartProgress()

        async def submit() -> None:
            if not url.value:
                ui.notify("Enter an archive or a URL.", type="warning")
                return
            register.disable()
            registration = uuid.uuid4().hex
            parameters = {"model_name": name.value or None, "initial_workers": int(workers.value or 0)}
            watch = asyncio.ensure_future(
                progress.follow(view, name.value or url.value, registration=registration)
            )
            request = view.client.register(url.value, registration=registration, **parameters)
            done = await view.change(request)
            watch.cancel()
            register.enable()
            if done is not None:
                dialog.close()
                await on_registered()

        with ui.row().classes("w-full justify-end"):
            ui.button("Close", on_click=dialog.close).props("flat")
            register = ui.button("Register", on_click=submit)
    dialog.props('aria-label="Register a model"')
    dialog.open()


class StartProgress:
    """A progress bar with the stage of a model's start."""

    def __init__(self) -> None:
        self._label = ui.label().classes("muted")
        self._bar = ui.linear_progress(0.0, show_value=False).props('aria-label="Progress of the start"')
        self._bar.set_visibility(False)

    async def follow(self, view: View, model: str, **parameters: Any) -> None:
        """Show the stages until the model is ready or has failed."""
        with suppress(ServerError, TransportError):
            async for stage, details in view.client.events(model, **parameters):
                self.show(stage, details)

    def show(self, stage: str, details: dict[str, Any]) -> None:
        """Show one stage."""
        self._label.set_text(describe_stage(stage, details))
        done = stage in ("ready", "failed")
        share = 1.0 if done else (_STAGES.index(stage) + 0.5) / len(_STAGES) if stage in _STAGES else 0.0
        self._bar.set_value(share)
        self._bar.set_visibility(not done)


def describe_stage(stage: str, details: dict[str, Any]) -> str:
    """Return one line about a stage."""
    text = stage.capitalize()
    if "percent" in details:
        text += f" {details['percent']:.0f} % of {formats.size(details.get('total'))}"
    elif details.get("bytes"):
        text += f" {formats.size(details['bytes'])}"
    if details.get("warnings"):
        text += f": {'; '.join(details['warnings'])[:300]}"
    for key in ("line", "reason", "message", "waits_for"):
        if details.get(key):
            text += f": {str(details[key]).strip()[:300]}"
            break
    return text
