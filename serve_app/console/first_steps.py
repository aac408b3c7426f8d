"""A panel of the overview: what to try first, before and after a model is registered."""

from __future__ import annotations

import json
import shlex
from collections.abc import Awaitable, Callable
from typing import Any

from nicegui import ui

from serve_app.console.code_samples import CodeSamples
from serve_app.console.components import heading, text_block
from serve_app.console.forms import InputKind, RequestContent, detect_kind, example_text
from serve_app.console.layout import View
from serve_app.console.register_dialog import open_dialog

MAX_MODELS = 3  # of a server that is still shown first steps
_HIDDEN = "first_steps_hidden"  # in the session
_FILE_TYPES = {"image": "image/png", "audio": "audio/wav", "file": "application/octet-stream"}
_ARCHIVE = "torchrelay archive model.py\ntorchrelay models register ./model.mar"


class FirstSteps:
    """The panel, which is built again when the models have changed; ``on_registered`` lists them again."""

    def __init__(self, view: View, on_registered: Callable[[], Awaitable[None]]) -> None:
        self._view = view
        self._on_registered = on_registered
        self._shown: object = None
        self._panel = ui.card().classes("panel").props('role="region" aria-label="First steps"')
        self._panel.set_visibility(False)

    async def refresh(self, names: list[str]) -> None:
        """Show the steps for these models; none where there are many, or where the user has hidden them."""
        hidden = len(names) > MAX_MODELS or self._view.session.cache.get(_HIDDEN, False)
        self._panel.set_visibility(not hidden)
        if hidden:
            return
        versions = await self._view.load(self._view.client.describe(names[0])) if names else []
        if versions is None:
            return
        ready = any(worker["status"] == "READY" for each in versions[:1] for worker in each["workers"])
        state = (names[:1], [each["modelVersion"] for each in versions], ready)
        if state == self._shown:
            return
        curl = await self._build_curl(names[0]) if ready else ""
        self._shown = state
        self._panel.clear()
        with self._panel:
            if names:
                self._show_model(names[0], sorted(state[1]), curl)
            else:
                self._show_empty()

    def _show_empty(self) -> None:
        heading("No model is registered")
        ui.label("Archive a Python class with a method predict, and register it:")
        text_block(_ARCHIVE)
        ui.label("Or register an archive that the model store or a URL has:")
        with ui.row():
            self._add_register_button("Add a model")

    def _show_model(self, model: str, versions: list[str], curl: str) -> None:
        with ui.row().classes("w-full items-center"):
            heading("First steps")
            ui.space()
            ui.button("Hide", on_click=self._hide).props("flat")
        if curl:
            ui.label(f"Send a request to {model}:")
            text_block(curl)
        else:
            ui.label(f"No replica of {model} runs now; its page has the state and the last error.")
        if len(versions) > 1:
            ui.label(
                f"Start an A/B test of {versions[0]} and {versions[1]}, whose clients x-user distinguishes:"
            )
            text_block(self._build_experiment(model, versions))
        else:
            ui.label(f"For an A/B test, register a second version of {model}.")
        with ui.row().classes("items-baseline"):
            if curl:
                self._view.link("Try it in a form", f"/models/{model}/try")
            self._view.link(f"State of {model}", f"/models/{model}")
            self._view.link(f"Experiments of {model}", f"/models/{model}/experiments")
            self._view.link(f"Traffic of {model}", f"/models/{model}/traffic")
            self._add_register_button("Add a version")

    def _add_register_button(self, text: str) -> None:
        button = ui.button(text, icon="add", on_click=lambda: open_dialog(self._view, self._on_registered))
        self._view.restrict(button.props("outline"))

    def _hide(self) -> None:
        self._view.session.cache[_HIDDEN] = True
        self._panel.set_visibility(False)

    async def _build_curl(self, model: str) -> str:
        """Return a command that sends a request of the model's kind of input."""
        kind, metadata = await detect_kind(self._view, model)
        session = self._view.session
        content = _example(kind, metadata)
        inference = session.addresses.inference
        return CodeSamples(inference, model, "", kind, content, session.access["required"]).curl()

    def _build_experiment(self, model: str, versions: list[str]) -> str:
        """Return a command that starts an experiment of the first two versions."""
        document = {
            "name": "first test",
            "arms": {
                name: {"version": version, "weight": 5000} for name, version in zip(("a", "b"), versions)
            },
            "baseline": "a",
            "key": {"header": "x-user"},
            "metrics": [{"name": "latency", "kind": "latency"}, {"name": "errors", "kind": "error_rate"}],
        }
        session = self._view.session
        lines = [f"curl -X POST {shlex.quote(f'{session.addresses.management}/models/{model}/experiments')}"]
        if session.access["required"]:
            lines.append('-H "Authorization: Bearer $TORCHRELAY_TOKEN"')
        lines += ["-H 'Content-Type: application/json'", f"--data-raw {shlex.quote(json.dumps(document))}"]
        return " \\\n  ".join(lines)


def _example(kind: InputKind, metadata: dict[str, Any]) -> RequestContent | None:
    """Return a request of a kind of input; None for a chat, whose example the code has."""
    if kind in _FILE_TYPES:
        return RequestContent(b"", _FILE_TYPES[kind], "FILE")
    if kind == "text":
        return RequestContent(b"A text", "text/plain")
    if kind == "chat":
        return None
    return RequestContent(json.dumps(json.loads(example_text(kind, metadata))).encode(), "application/json")
