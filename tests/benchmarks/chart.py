"""A bar chart of the comparison with other servers, as SVG in a light and a dark form."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from tests.benchmarks import report
from tests.benchmarks.report import Case, Figures

PANELS = {
    "Echo, 32 connections": (
        Case("echo", 32),
        {report.RELAY_BATCHED: "Torchrelay", report.SERVE_BATCHED: "TorchServe", report.FASTAPI: "FastAPI"},
    ),
    "Perceptron, 32 connections": (
        Case("mlp", 32),
        {report.RELAY1: "Torchrelay", report.SERVE1: "TorchServe", report.FASTAPI: "FastAPI"},
    ),
}
_OTHERS = ("LitServe", "MLServer", "BentoML", "Ray Serve")
_THEMES = {"light": ("#1f2328", "#bc4c00", "#8c959f"), "dark": ("#f0f6fc", "#f0883e", "#656d76")}


def draw(figures: Figures, folder: Path) -> list[Path]:
    """Write ``benchmark-light.svg`` and ``benchmark-dark.svg``; panels without figures are left out."""
    panels = {title: shown for title, panel in PANELS.items() if (shown := _rows(figures, *panel))}
    if not panels:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    return [_draw(panels, theme, folder / f"benchmark-{theme}.svg") for theme in _THEMES]


def _rows(figures: Figures, case: Case, names: Mapping[str, str]) -> list[tuple[str, float, float]]:
    """Return name, requests/s and p99 in milliseconds of each server, the fastest last."""
    shown = {**names, **{name: name for name in _OTHERS}}
    rows = []
    for contender, results in figures.get(case, {}).items():
        throughput = report.median(results, "throughput")
        if contender in shown and throughput > 0:
            rows.append((shown[contender], throughput, 1000 * report.median(results, "p99")))
    return sorted(rows, key=lambda row: row[1])


def _draw(panels: Mapping[str, list[tuple[str, float, float]]], theme: str, path: Path) -> Path:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    text, ours, theirs = _THEMES[theme]
    style = {
        "svg.fonttype": "none",  # text stays text
        "svg.hashsalt": "torchrelay",  # the same figures give the same file
        "font.family": "sans-serif",
        "text.color": text,
        "axes.labelcolor": text,
        "ytick.color": text,
        "axes.titlesize": 11,
    }
    with mpl.rc_context(style):
        figure, grid = plt.subplots(len(panels), 2, figsize=(9.2, 2.9 * len(panels)), squeeze=False)
        for row, (title, shown) in zip(grid, panels.items(), strict=True):
            for axis, column, label, form in (
                (row[0], 1, "requests/s", "{:,.0f}"),
                (row[1], 2, "p99, ms", "{:.1f}"),
            ):
                values = [each[column] for each in shown]
                colors = [ours if each[0] == "Torchrelay" else theirs for each in shown]
                bars = axis.barh([each[0] for each in shown], values, color=colors, height=0.7)
                axis.bar_label(
                    bars, [form.format(value) for value in values], padding=4, color=text, fontsize=9
                )
                axis.set_xlim(0, 1.2 * max(filter(math.isfinite, values)))
                axis.set_title(f"{title}: {label}" if column == 1 else label, loc="left")
                axis.spines[:].set_visible(False)
                axis.tick_params(length=0, labelsize=9)
                axis.xaxis.set_visible(False)
        figure.tight_layout()
        figure.savefig(path, transparent=True, metadata={"Date": None})
        plt.close(figure)
    return path
