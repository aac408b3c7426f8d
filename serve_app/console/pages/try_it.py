"""A form that sends one request to a model, and shows the response, its times, and equivalent code."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import httpx
from nicegui import ui

from serve_app.client import Prediction, ServerError, TransportError, formats
from serve_app.console import charts
from serve_app.console.code_samples import CodeSamples
from serve_app.console.components import figures, heading, set_rows, table, text_block
from serve_app.console.forms import KINDS, InputForm, InputKind, RequestContent, detect_kind, show_media
from serve_app.console.layout import View, console_page, run_in_page

_MAX_TEXT = 20_000  # characters of a response that are shown
_MAX_ROWS = 50
_TITLES = {"json": "JSON", "tensors": "Tensors"}


@console_page("/models/{model}/try", "Try it", section="/try")
async def try_it(view: View, model: str) -> None:
    kind, metadata = await detect_kind(view, model)
    _TryIt(view, model, kind, metadata)


class _TryIt:
    """The contents of one open page."""

    def __init__(self, view: View, model: str, kind: InputKind, metadata: dict[str, Any]) -> None:
        self._view, self._model, self._metadata = view, model, metadata
        self._kind: InputKind = kind
        self._form: InputForm | None = None
        with ui.element("div").classes("columns"):
            with ui.card().classes("panel"):
                heading("Request")
                with ui.row().classes("items-end"):
                    choices = {each: _TITLES.get(each, each.capitalize()) for each in KINDS}
                    ui.select(choices, value=kind, label="Input", on_change=self._select_kind)
                    versions = {"": "default", **{each: each for each in metadata.get("versions", [])}}
                    self._version = ui.select(versions, value="", label="Version")
                self._area = ui.column().classes("w-full")
                self._explain = ui.checkbox("Explain the prediction")
                self._send = ui.button("Send", icon="send", on_click=self._submit)
            with ui.card().classes("panel"):
                heading("Response")
                self._response = ui.column().classes("w-full").props('aria-live="polite"')
        with ui.card().classes("panel"):
            heading("Code")
            self._code = ui.column().classes("w-full")
        self._build_form()

    def _select_kind(self, event: Any) -> None:
        self._kind = event.value
        self._build_form()

    def _build_form(self) -> None:
        self._area.clear()
        is_chat = self._kind == "chat"
        with self._area:
            self._form = None
            if is_chat:
                _Chat(self._view, self._model)
            else:
                self._form = InputForm(self._kind, self._metadata)
        self._send.set_visibility(not is_chat)
        self._explain.set_visibility(self._kind not in ("chat", "tensors"))
        self._show_code(None)

    async def _submit(self) -> None:
        assert self._form is not None
        try:
            content = self._form.read()
        except ValueError as error:
            ui.notify(str(error), type="warning")
            return
        self._show_code(content)
        self._send.disable()
        started = time.perf_counter()
        try:
            outcome: Prediction | Exception = await self._request(content)
        except (ServerError, TransportError) as error:
            outcome = error
        seconds = time.perf_counter() - started
        self._send.enable()
        self._response.clear()
        with self._response:
            if isinstance(outcome, Exception):
                _show_error(outcome)
            else:
                _show_times(outcome, seconds)
                show_response(outcome)

    async def _request(self, content: RequestContent) -> Prediction:
        version = self._version.value or None
        client = self._view.client
        if self._kind != "tensors":
            return await client.request(
                self._model, content.body, content.content_type, version, explain=self._explain.value
            )
        document = await client.infer(self._model, json.loads(content.body), version)
        headers = httpx.Headers({"content-type": "application/json"})
        return Prediction(json.dumps(document).encode(), 200, headers)

    def _show_code(self, content: RequestContent | None) -> None:
        address = self._view.session.addresses.inference
        required = self._view.session.access["required"]
        version = self._version.value or ""
        code = CodeSamples(address, self._model, version, self._kind, content, required)
        samples = code.by_language()
        self._code.clear()
        with self._code:
            with ui.tabs().props("dense align=left") as tabs:
                for language in samples:
                    ui.tab(language)
            with ui.tab_panels(tabs, value="curl").classes("w-full").props("animated=false"):
                for language, text in samples.items():
                    with ui.tab_panel(language):
                        text_block(text)


def _show_error(error: Exception) -> None:
    if not isinstance(error, ServerError):
        ui.label(f"The server does not respond: {error!r}").classes("bad")
        return
    ui.label(f"Status {error.status}: {error.message}").classes("bad")
    ui.label(f"Reason: {error.reason} · request {error.request_id}").classes("muted")
    if error.detail:
        text_block(error.detail)


def _show_times(response: Prediction, seconds: float) -> None:
    """Show the version, and the time of each stage."""
    timing: dict[str, str] = {}
    for entry in response.headers.get("server-timing", "").split(","):
        name, _, value = entry.strip().partition(";")
        timing[name] = value.partition("=")[2]
    shown = figures("Version", "Total", "Queue", "Inference", "Batch")
    shown["Version"].set_text(response.version or "–")
    shown["Total"].set_text(formats.milliseconds(seconds))
    for name in ("queue", "inference"):
        if timing.get(name):
            shown[name.capitalize()].set_text(f"{formats.number(float(timing[name]))} ms")
    shown["Batch"].set_text(timing.get("batch", "–"))


def show_response(response: Prediction) -> None:
    """Show a response as an image, as audio, as scores, as a table, or as text."""
    if show_media(response.content_type, response.body, "The response"):
        return
    try:
        value = json.loads(response.body)
    except ValueError:
        text = response.body[:_MAX_TEXT].decode("utf-8", "replace")
        text_block(text or "The response is empty.")
        return
    scores = _scores(value)
    if scores:
        names, values = zip(*scores[:10])
        options = charts.bars("Scores", "", names, {"score": values})
        alternative = ", ".join(f"{name} {formats.number(score)}" for name, score in scores[:10])
        charts.show(options, f"Scores: {alternative}", "12rem")
    elif isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
        _show_table(value)
    text_block(json.dumps(value, indent=2, ensure_ascii=False)[:_MAX_TEXT])


def _scores(value: Any) -> list[tuple[str, float]]:
    """Return the numbers of a response by label, the highest first; nothing where it is no such response."""
    if isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
        if not all("label" in row and isinstance(row.get("score"), (int, float)) for row in value):
            return []
        value = {str(row["label"]): row["score"] for row in value}
    if not isinstance(value, dict) or len(value) < 2:
        return []
    if not all(isinstance(each, (int, float)) and not isinstance(each, bool) for each in value.values()):
        return []
    return sorted(value.items(), key=lambda item: -item[1])


def _show_table(rows: list[dict[str, Any]]) -> None:
    names = list(dict.fromkeys(name for row in rows[:_MAX_ROWS] for name in row))
    element = table([name.replace("_", " ") for name in names], title="Response")
    cells = [{name.replace(" ", "_"): _cell(row.get(name)) for name in names} for row in rows[:_MAX_ROWS]]
    set_rows(element, cells)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return formats.number(value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


class _Chat:
    """A chat with a language model, whose answers are shown as they are generated."""

    def __init__(self, view: View, model: str) -> None:
        self._view, self._model = view, model
        self._messages: list[dict[str, Any]] = []
        self._log = ui.column().classes("w-full").props('role="log" aria-live="polite"')
        with ui.row().classes("w-full items-end"):
            self._tokens = ui.number("Tokens at most", value=128, min=1, precision=0)
            self._temperature = ui.number("Temperature", value=0.0, min=0, max=2, step=0.1)
        self._text = ui.textarea("Message").classes("w-full").props("outlined autogrow")
        with ui.row():
            self._send = ui.button("Send", icon="send", on_click=self._submit)
            ui.button("New chat", on_click=self._clear).props("flat")
        self._note = ui.label().classes("muted")

    def _clear(self) -> None:
        self._messages.clear()
        self._log.clear()
        self._note.set_text("")

    def _submit(self) -> None:
        if not (self._text.value or "").strip():
            return
        self._messages.append({"role": "user", "content": self._text.value})
        with self._log:
            ui.chat_message(self._text.value, name="You", sent=True)
            with ui.chat_message(name=self._model):
                answer = ui.label().style("white-space: pre-wrap")
        self._text.set_value("")
        self._send.disable()
        run_in_page(self._stream(answer))

    async def _stream(self, answer: ui.label) -> None:
        started, first, count = time.perf_counter(), 0.0, 0
        parameters = {"max_tokens": int(self._tokens.value or 1), "temperature": self._temperature.value or 0}
        try:
            async for piece in self._view.client.stream_chat(self._model, self._messages, **parameters):
                count += 1
                first = first or time.perf_counter() - started
                answer.set_text(answer.text + piece)
                await asyncio.sleep(0)
        except (ServerError, TransportError, RuntimeError) as error:
            answer.set_text(f"{answer.text}\n{error}".strip())
            answer.classes("bad")
        else:
            self._messages.append({"role": "assistant", "content": answer.text})
            seconds = time.perf_counter() - started
            rate = f"{formats.number((count - 1) / (seconds - first))} tokens/s" if count > 1 else ""
            self._note.set_text(f"First token after {formats.milliseconds(first)} · {rate}")
        self._send.enable()
