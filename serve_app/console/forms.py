"""Forms of a model's input, by the kind of data that it accepts."""

from __future__ import annotations

import base64
import binascii
import json
from dataclasses import dataclass
from typing import Any, Literal, get_args

from nicegui import ui
from nicegui.events import GenericEventArguments

from serve_app.console.layout import View
from serve_app.domain.schema_example import example_value

InputKind = Literal["image", "text", "json", "audio", "tensors", "file", "chat"]
KINDS: tuple[InputKind, ...] = get_args(InputKind)
_MAX_FILE_BYTES = 10 << 20
_CHAT_TASKS = ("text-generation",)
_CHAT_HANDLERS = ("llm", "causal_lm", "image_text_to_text", "vllm_handler", "trt_llm_handler")
# A file is read in the page and sent over its WebSocket.
_READ_FILE = """
async (event) => {
  const file = event.target.files[0];
  if (!file) return;
  if (file.size > LIMIT) return emit({name: file.name, size: file.size, data: null});
  const bytes = new Uint8Array(await file.arrayBuffer());
  let text = "";
  for (let i = 0; i < bytes.length; i += 32768) text += String.fromCharCode(...bytes.subarray(i, i + 32768));
  emit({name: file.name, size: file.size, type: file.type, data: btoa(text)});
}
""".replace("LIMIT", str(_MAX_FILE_BYTES))


@dataclass(frozen=True)
class RequestContent:
    """A body and its content type."""

    body: bytes
    content_type: str
    file_name: str = ""


async def detect_kind(view: View, model: str) -> tuple[InputKind, dict[str, Any]]:
    """Return the kind of a model's input, and its metadata by the Open Inference Protocol."""
    metadata = await view.load(view.client.model_metadata(model)) or {}
    described: list[dict[str, Any]] = []
    if view.session.has_right("observe"):
        described = await view.load(view.client.describe(model)) or []
    return select_kind(metadata, described[0] if described else {})


def select_kind(metadata: dict[str, Any], first: dict[str, Any]) -> tuple[InputKind, dict[str, Any]]:
    """Return the kind of the input that a version's description has, and its metadata.

    The metadata of a model class has the JSON schema of its input as ``schema``.
    """
    task, handler = first.get("task", ""), first.get("handler", "")
    if task in _CHAT_TASKS or handler in _CHAT_HANDLERS:
        return "chat", metadata
    input_schema = (first.get("schemas") or {}).get("input")
    if input_schema is not None and input_schema["mediaType"] in ("application/json", "text/plain"):
        kind: InputKind = "json" if input_schema["mediaType"] == "application/json" else "text"
        return kind, {**metadata, "schema": input_schema["schema"]}
    family = first.get("inputType", "").partition("/")[0]
    if task.startswith(("image-", "object-")) or family == "image":
        return "image", metadata
    if family == "audio" or task == "automatic-speech-recognition":
        return "audio", metadata
    if metadata.get("inputs"):
        return "tensors", metadata
    return "text" if task or family == "text" else "json", metadata


class FilePicker:
    """A file input whose content is sent over the page's connection."""

    def __init__(self, label: str, accept: str = "") -> None:
        self.content: RequestContent | None = None
        with ui.element("label").classes("column"):
            ui.label(label)
            element = ui.element("input").props(f'type=file accept="{accept}" aria-label="{label}"')
        element.on("change", self._receive, js_handler=_READ_FILE)
        self._preview = ui.column()

    def _receive(self, event: GenericEventArguments) -> None:
        file = event.args
        self.content = None
        self._preview.clear()
        with self._preview:
            if file.get("data") is None:
                limit = _MAX_FILE_BYTES >> 20
                ui.label(f"{file['name']} is larger than {limit} MiB; send it with curl.").classes("bad")
                return
            try:
                body = base64.b64decode(file["data"], validate=True)
            except (binascii.Error, TypeError):
                ui.label("The file could not be read.").classes("bad")
                return
            kind = str(file.get("type") or "application/octet-stream")
            self.content = RequestContent(body, kind, str(file["name"]))
            show_media(kind, body, f"The chosen file {file['name']}")


def show_media(content_type: str, body: bytes, description: str) -> bool:
    """Show an image or audio; return whether the type is one of them."""
    family = content_type.partition("/")[0]
    if family not in ("image", "audio") or "svg" in content_type:
        return False
    source = f"data:{content_type.partition(';')[0]};base64,{base64.b64encode(body).decode()}"
    if family == "image":
        text = description.replace('"', "'")
        ui.element("img").props(f'src="{source}" alt="{text}"').classes("preview")
    else:
        ui.audio(source)
    return True


class InputForm:
    """The form of one kind; ``read`` returns what it holds."""

    def __init__(self, kind: InputKind, metadata: dict[str, Any]) -> None:
        self._kind = kind
        self._picker: FilePicker | None = None
        self._text: ui.textarea | None = None
        if kind in ("image", "audio", "file"):
            accept = {"image": "image/*", "audio": "audio/*"}.get(kind, "")
            self._picker = FilePicker(f"Choose {'a file' if kind == 'file' else f'the {kind}'}", accept)
        elif kind != "chat":
            label = {"text": "Text", "json": "JSON", "tensors": "Open Inference request (JSON)"}[kind]
            self._text = ui.textarea(label, value=example_text(kind, metadata)).classes("w-full")
            self._text.props("outlined autogrow input-style='font-family: monospace'")

    def read(self) -> RequestContent:
        """Return the request's content. Raises ValueError with what is missing or invalid."""
        if self._picker is not None:
            if self._picker.content is None:
                raise ValueError("Choose a file first.")
            return self._picker.content
        assert self._text is not None
        text = self._text.value or ""
        if self._kind == "text":
            return RequestContent(text.encode(), "text/plain; charset=utf-8")
        try:
            json.loads(text)
        except ValueError as error:
            raise ValueError(f"This is not JSON: {error}") from None
        return RequestContent(text.encode(), "application/json")


def example_text(kind: InputKind, metadata: dict[str, Any]) -> str:
    """Return the text that a form begins with."""
    if kind == "tensors":
        return json.dumps(example_tensors(metadata), indent=2)
    if kind == "json":
        return json.dumps(example_value(metadata.get("schema", {"type": "object"})), indent=2)
    return ""


def example_tensors(metadata: dict[str, Any]) -> dict[str, Any]:
    """Return an Open Inference request with zeros for the inputs of a model."""
    inputs = []
    for port in metadata.get("inputs", ()):
        shape = [axis if axis > 0 else 1 for axis in port["shape"]]
        count = 1
        for axis in shape:
            count *= axis
        value: Any = {"BYTES": "", "BOOL": False}.get(port["datatype"], 0)
        data = [value] * min(count, 10_000)
        inputs.append({"name": port["name"], "datatype": port["datatype"], "shape": shape, "data": data})
    return {"inputs": inputs}
