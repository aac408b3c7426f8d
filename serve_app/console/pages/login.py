"""The login with a key, where the server requires one."""

from __future__ import annotations

import asyncio

from fastapi import Request
from nicegui import ui

from serve_app.client import AuthenticationError, ServerError, TransportError
from serve_app.console import layout

_DELAY_AFTER_FAILURE_S = 1.0


@ui.page("/login", title="Log in · Torchrelay")
def login(request: Request) -> None:
    layout.use_theme(request)
    prefix = layout.get_prefix(request)
    with (
        ui.column().classes("content items-center").props('role="main"'),
        ui.card().classes("panel").style("max-width: 28rem; margin-top: 10vh"),
    ):
        ui.label("Torchrelay").classes("page-title").props('role="heading" aria-level="1"')
        ui.label(
            "This server requires a key. It stays in the console's process; the browser keeps a session."
        )
        key = ui.input("Key", password=True, password_toggle_button=True).classes("w-full").props("autofocus")
        message = ui.label().classes("bad").props('role="alert"')

        async def submit() -> None:
            if not key.value:
                message.set_text("Enter a key.")
                return
            try:
                ticket = await layout.get_sessions().log_in(key.value.strip())
            except AuthenticationError as error:
                await asyncio.sleep(_DELAY_AFTER_FAILURE_S)
                message.set_text(error.message)
            except (ServerError, TransportError) as error:
                message.set_text(f"The server does not respond: {error}")
            else:
                ui.navigate.to(f"{prefix}/session?ticket={ticket}")

        key.on("keydown.enter", submit)
        ui.button("Log in", on_click=submit).classes("w-full")
        ui.label(
            "Keys with the right manage may change the server; keys with observe may look at everything."
        ).classes("note")
