"""The traffic policy of a model: weights of its versions, sticky keys, labels, and the shadow."""

from __future__ import annotations

import json
from typing import Any

from nicegui import ui
from nicegui.events import ValueChangeEventArguments

from serve_app.console.components import confirm, heading, set_rows, table, text_block
from serve_app.console.layout import View, console_page

_WHOLE = 10_000  # basis points
_KEYS = {"": "none", "header": "header", "cookie": "cookie", "json": "JSON path"}


@console_page("/models/{model}/traffic", "Traffic", section="/traffic")
def traffic(view: View, model: str) -> None:
    page = _Traffic(view, model)
    view.every(5.0, page.refresh)


def balance(weights: dict[str, float], changed: str, value: float) -> dict[str, float]:
    """Return weights in percent that sum to 100 after one of them was set.

    The others keep their ratio; where they are all zero they share the rest evenly.
    """
    value = min(100.0, max(0.0, value))
    others = {name: weight for name, weight in weights.items() if name != changed}
    if not others:
        return {changed: 100.0}
    rest, total = 100.0 - value, sum(others.values())
    scaled = {name: rest * (weight / total if total else 1 / len(others)) for name, weight in others.items()}
    return {name: value if name == changed else scaled[name] for name in weights}


def to_basis_points(weights: dict[str, float]) -> dict[str, int]:
    """Return percentages as basis points that sum to 10,000; versions without a share are left out."""
    points = {name: round(weight * 100) for name, weight in weights.items()}
    largest = max(points, key=lambda name: points[name])
    points[largest] += _WHOLE - sum(points.values())
    return {name: count for name, count in points.items() if count > 0}


class _Traffic:
    """The contents of one open page; the form is built once, and the active shares are kept current."""

    def __init__(self, view: View, model: str) -> None:
        self._view, self._model = view, model
        self._weights: dict[str, float] = {}
        self._sliders: dict[str, tuple[ui.slider, ui.number]] = {}
        self._built = False
        with ui.card().classes("panel"):
            heading("Active shares")
            self._reason = ui.label().classes("muted")
            self._shares = table(["version", "share"], title="Active shares")
        self._form = ui.card().classes("panel")
        with ui.card().classes("panel"):
            heading("Policy as JSON")
            self._json = text_block("")

    async def refresh(self) -> None:
        """Show the active policy; build the form on the first call."""
        document = await self._view.load(self._view.client.traffic(self._model))
        if document is None:
            return
        active = document["active"]
        shares = active.get("shares") or active.get("versions") or {}
        set_rows(
            self._shares,
            [{"version": name, "share": f"{count / 100:g} %"} for name, count in shares.items()],
        )
        owner = next((active[key] for key in ("experiment", "rollout") if active.get(key)), "")
        self._reason.set_text(
            f"An experiment or a rollout ({owner}) routes the requests." if owner else "The policy routes."
        )
        self._json.set_text(json.dumps({k: v for k, v in document.items() if k != "active"}, indent=2))
        if not self._built:
            described = await self._view.load(self._view.client.describe(self._model))
            if described is not None:
                self._build(document, [each["modelVersion"] for each in described])

    def _build(self, document: dict[str, Any], versions: list[str]) -> None:
        self._built = True
        self._document = document
        given = document.get("versions") or {versions[0]: _WHOLE}
        self._weights = {version: given.get(version, 0) / 100 for version in versions}
        self._form.clear()
        with self._form:
            heading("Weights")
            ui.label("The weights sum to 100 %: the others follow the one that you move.").classes("muted")
            for version in versions:
                self._add_slider(version)
            self._add_key(document.get("key") or {})
            labels = document.get("labels") or {}
            self._labels = ui.input("Labels (name=version, …)", value=_join(labels)).classes("w-full")
            shadow = (document.get("shadow") or {}).get("version", "")
            with ui.row().classes("items-end"):
                choices = {"": "none", **{version: version for version in versions}}
                self._shadow = ui.select(choices, value=shadow, label="Shadow version")
                percent = (document.get("shadow") or {}).get("percent", 100)
                self._percent = ui.number("Copied requests in percent", value=percent, min=0.01, max=100)
            with ui.row():
                apply = ui.button("Apply", on_click=self._apply)
                reset = ui.button("Reset to the default version", on_click=self._confirm_reset)
                reset.props("outline")
        controls = [apply, reset, *(control for pair in self._sliders.values() for control in pair)]
        self._view.restrict(*controls)

    def _add_slider(self, version: str) -> None:
        value = self._weights[version]
        with ui.row().classes("w-full items-center no-wrap"):
            ui.label(version).style("min-width: 6rem")
            slider = ui.slider(min=0, max=100, step=0.1, value=value).classes("col")
            slider.props(f'aria-label="Weight of {version}"')
            number = ui.number(value=round(value, 2), min=0, max=100, step=1, suffix="%").style("width: 7rem")
            number.props(f'dense aria-label="Weight of {version} in percent"')
        self._sliders[version] = slider, number

        def move(event: ValueChangeEventArguments[Any]) -> None:
            if event.value is not None and abs(event.value - self._weights[version]) > 0.005:
                self._set(version, event.value)

        slider.on_value_change(move)
        number.on_value_change(move)

    def _set(self, version: str, value: float) -> None:
        self._weights = balance(self._weights, version, value)
        for name, (slider, number) in self._sliders.items():
            slider.set_value(round(self._weights[name], 2))
            number.set_value(round(self._weights[name], 2))

    def _add_key(self, key: dict[str, str]) -> None:
        source = next((name for name in ("header", "cookie", "json") if key.get(name)), "")
        with ui.row().classes("items-end"):
            self._key_source = ui.select(_KEYS, value=source, label="Sticky key")
            self._key_name = ui.input("Name or path", value=key.get(source, ""))
        ui.label("Requests with the same key get the same version.").classes("muted")

    async def _apply(self) -> None:
        try:
            labels = _split(self._labels.value or "")
        except ValueError as error:
            ui.notify(str(error), type="warning")
            return
        policy: dict[str, Any] = {"versions": to_basis_points(self._weights)}
        for name in ("salt", "header"):
            if self._document.get(name):
                policy[name] = self._document[name]
        if self._key_source.value:
            policy["key"] = {self._key_source.value: self._key_name.value or ""}
        if labels:
            policy["labels"] = labels
        if self._shadow.value:
            before = self._document.get("shadow") or {}
            policy["shadow"] = {**before, "version": self._shadow.value, "percent": self._percent.value}
        done = await self._view.change(
            self._view.client.set_traffic(self._model, policy), "The policy is applied."
        )
        if done is not None:
            self._document = done
            await self.refresh()

    def _confirm_reset(self) -> None:
        async def run() -> None:
            await self._view.change(
                self._view.client.reset_traffic(self._model), "The default version gets every request."
            )
            self._built, self._sliders = False, {}
            await self.refresh()

        confirm(
            "Reset the policy?",
            "Requests without a version go to the default version; labels, key and shadow are deleted.",
            "Reset",
            run,
        )


def _join(labels: dict[str, str]) -> str:
    return ", ".join(f"{name}={version}" for name, version in labels.items())


def _split(text: str) -> dict[str, str]:
    """Return labels. Raises ValueError for a part that is no ``name=version``."""
    labels = {}
    for part in filter(None, map(str.strip, text.split(","))):
        name, equals, version = part.partition("=")
        if not (name.strip() and equals and version.strip()):
            raise ValueError(f"{part!r} is no label; write name=version.")
        labels[name.strip()] = version.strip()
    return labels
