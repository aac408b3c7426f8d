"""The shadow of a model: agreement over time, latencies, and the worst disagreements with their inputs."""

from __future__ import annotations

import base64
import io
import json
import math
from itertools import pairwise
from typing import Any

from nicegui import ui
from PIL import Image

from serve_app.client import NotFoundError, formats
from serve_app.console import charts
from serve_app.console.components import confirm, figures, heading, set_rows, table, text_block
from serve_app.console.layout import View, console_page

_MAX_SHOWN = 20
_MAX_TEXT = 2000
_MIN_SIDE = 8  # pixels of a square that numbers are drawn as


@console_page("/models/{model}/shadow", "Shadow", section="/shadow")
def shadow(view: View, model: str) -> None:
    page = _ShadowPage(view, model)
    view.every(3.0, page.refresh)


class _ShadowPage:
    """The comparison of one model's shadow."""

    def __init__(self, view: View, model: str) -> None:
        self._view, self._model = view, model
        self._empty = ui.label(
            "This model has no shadow. Choose a shadow version on the page Traffic: it gets copies of the "
            "requests, and its responses are compared and discarded."
        )
        self._column = ui.column().classes("w-full")
        self._pairs: dict[str, _Pair] = {}

    async def refresh(self) -> None:
        """Show the current comparison."""
        document = await self._view.load(_get_shadow(self._view, self._model))
        trends = {}
        if document:
            history = await self._view.load(self._view.client.shadow_history(self._model)) or []
            trends = {trend["version"]: trend["points"] for trend in history}
        if document is None:
            return
        pairs = {each["version"]: each for each in document.get("against", ())}
        self._empty.set_visibility(not pairs)
        if document.get("shadow") and not pairs:
            version = document["shadow"]["version"]
            self._empty.set_text(f"Version {version} is the shadow; no request has been compared yet.")
        if pairs.keys() != self._pairs.keys():
            self._column.clear()
            with self._column:
                self._pairs = {
                    version: _Pair(self._view, self._model, each) for version, each in pairs.items()
                }
        for version, each in pairs.items():
            self._pairs[version].show(each, trends.get(version, []))


async def _get_shadow(view: View, model: str) -> dict[str, Any]:
    """Return the comparison; an empty document where the model has no shadow."""
    try:
        return await view.client.shadow(model)
    except NotFoundError as error:
        if error.reason == "model_not_found":
            raise
        return {}


class _Pair:
    """The comparison of one live version with its shadow."""

    def __init__(self, view: View, model: str, each: dict[str, Any]) -> None:
        self._view, self._model = view, model
        self._shown: Any = None
        with ui.row().classes("w-full items-center"):
            heading(f"Live {each['version']} against shadow {each['shadow']}")
            ui.space()
            delete = ui.button("Delete the figures", on_click=self._confirm_deletion, color="negative")
            delete.props("outline")
            view.restrict(delete)
        self._figures = figures("Agreement", "Compared", "Disagreed", "Failed by the shadow", "Not compared")
        with ui.element("div").classes("columns"):
            self._chart = charts.show(agreement_options([]), "Agreement of the shadow over time")
            with ui.column():
                self._latency = table(["version", "p50", "p95", "p99"], title="Latency")
                self._reasons = table(["outcome", "reason", "requests"], title="Outcomes")
        heading("Worst disagreements")
        self._worst = ui.column().classes("w-full")

    def show(self, each: dict[str, Any], points: list[dict[str, Any]]) -> None:
        """Show the current figures."""
        calls = each["calls"]
        compared = calls["agreed"] + calls["disagreed"]
        values = {
            "Agreement": formats.percent(each["agreement_rate"]),
            "Compared": f"{compared:,}",
            "Disagreed": f"{calls['disagreed']:,}",
            "Failed by the shadow": f"{calls['error']:,}",
            "Not compared": f"{calls['skipped'] + calls['dropped']:,}",
        }
        for name, value in values.items():
            self._figures[name].set_text(value)
        charts.update(self._chart, agreement_options(points))
        latency = [
            {"version": name, **{q: f"{formats.number(found[f'{q}_ms'])} ms" for q in ("p50", "p95", "p99")}}
            for name, found in each["latency"].items()
        ]
        set_rows(self._latency, latency)
        reasons = [
            {"outcome": outcome, "reason": reason, "requests": f"{count:,}"}
            for outcome, counts in each["reasons"].items()
            for reason, count in counts.items()
        ]
        set_rows(self._reasons, reasons)
        if each["disagreements"] != self._shown:
            self._shown = each["disagreements"]
            self._show_worst(each["disagreements"][:_MAX_SHOWN])

    def _show_worst(self, disagreements: list[dict[str, Any]]) -> None:
        self._worst.clear()
        with self._worst:
            for each in disagreements:
                with ui.card().classes("panel"):
                    ui.label(
                        f"{each['reason']} · distance {formats.number(each['distance'])} · "
                        f"{formats.clock(each['time'])} · request {each['request_id']}"
                    ).classes("muted")
                    with ui.element("div").classes("columns"):
                        for title, parts in (
                            ("Input", each["inputs"]),
                            ("Live response", [each["live"]]),
                            ("Shadow response", [each["shadow"]]),
                        ):
                            with ui.column():
                                ui.label(title).style("font-weight: 600")
                                for part in parts:
                                    _show_part(part)

    def _confirm_deletion(self) -> None:
        async def run() -> None:
            await self._view.change(
                self._view.client.delete_shadow_stats(self._model), "The figures are deleted."
            )

        confirm(
            "Delete the figures?",
            "The comparison starts anew; the stored inputs and the history are deleted.",
            "Delete",
            run,
        )


def _show_part(part: dict[str, Any]) -> None:
    """Show one stored input or response; an image as a thumbnail."""
    content_type = str(part.get("content_type") or "")
    if part.get("redacted"):
        ui.label(f"Redacted, {formats.size(part.get('bytes'))}").classes("muted")
    elif "base64" in part:
        data = base64.b64decode(part["base64"])
        kind = content_type if content_type.startswith("image/") else _image_type(data)
        if kind and "svg" not in kind:
            source = f"data:{kind.partition(';')[0]};base64,{part['base64']}"
            ui.element("img").props(f'src="{source}" alt="The input image"').classes("thumbnail")
        else:
            ui.label(f"{formats.size(part.get('bytes'))} of {content_type or 'binary data'}").classes("muted")
        if part.get("cut"):
            ui.label("Only its beginning is stored.").classes("muted")
    elif "json" in part:
        if picture := _draw_grid(part["json"]):
            ui.element("img").props(f'src="{picture}" alt="The input drawn as an image"').classes("thumbnail")
        text_block(json.dumps(part["json"], indent=1, ensure_ascii=False)[:_MAX_TEXT])
    else:
        text_block(str(part.get("text", ""))[:_MAX_TEXT])


def _draw_grid(value: Any) -> str:
    """Return a list of numbers that forms a square of pixels as the URL of an image, else an empty text."""
    side = math.isqrt(len(value)) if isinstance(value, list) else 0
    if side < _MIN_SIDE or side**2 != len(value):
        return ""
    if not all(isinstance(each, (int, float)) for each in value):
        return ""
    top = max(max(value), 1e-9)
    image = Image.new("L", (side, side))
    image.putdata([round(255 * max(0.0, min(1.0, each / top))) for each in value])
    data = io.BytesIO()
    image.resize((16 * side, 16 * side), Image.Resampling.NEAREST).save(data, "PNG")
    return f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"


def _image_type(data: bytes) -> str:
    """Return the type of an image by its first bytes; empty where it is none that a browser shows."""
    for start, kind in ((b"\x89PNG", "image/png"), (b"\xff\xd8", "image/jpeg"), (b"GIF8", "image/gif")):
        if data.startswith(start):
            return kind
    return "image/webp" if data[:4] == b"RIFF" and data[8:12] == b"WEBP" else ""


def agreement_options(points: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the plot of the agreement in all compared requests, and in those since the point before."""

    def share(agreed: int, disagreed: int) -> float | None:
        return round(100 * agreed / (agreed + disagreed), 2) if agreed + disagreed else None

    total = [(point["time"], share(point["agreed"], point["disagreed"])) for point in points]
    recent = [
        (now["time"], share(now["agreed"] - old["agreed"], now["disagreed"] - old["disagreed"]))
        for old, now in pairwise(points)
    ]
    return charts.time_series("Agreement", "%", {"all requests": total, "since the last point": recent})
