"""Options of Apache ECharts for the console's plots; each plot has a text alternative."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nicegui import ui

Points = Sequence[tuple[float, float | None]]
_TEXT = "#7f8a96"  # legible on white and on black
_MIN_SPAN_S = 60.0  # of a time axis
_TITLE = {"fontSize": 14, "color": _TEXT, "fontWeight": "normal"}
COLORS = ("#3b82c4", "#d9822b", "#2f9e6e", "#b5495b", "#7d5fb2", "#8a7a3c", "#3aa3a0", "#c06fa3")


def time_series(
    title: str, unit: str, series: Mapping[str, Points], *, bands: Mapping[str, Sequence[Any]] | None = None
) -> dict[str, Any]:
    """Return a line plot over time; times are Unix times.

    ``bands`` are intervals (time, low, high) that are drawn behind the line of the same name.
    """
    drawn: list[dict[str, Any]] = []
    for color, (name, points) in zip(_cycle(), series.items()):
        for part in _band(name, (bands or {}).get(name, ()), color):
            drawn.append(part)
        drawn.append(
            {
                "name": name,
                "type": "line",
                "showSymbol": len(points) < 3,
                "data": [[1000 * moment, value] for moment, value in points],
                "lineStyle": {"width": 2, "color": color},
                "itemStyle": {"color": color},
            }
        )
    return {
        **_base(title, unit),
        "xAxis": {
            "type": "time",
            "axisLabel": {"color": _TEXT, "hideOverlap": True},
            **_time_span(series.values()),
        },
        "yAxis": _value_axis(),
        "legend": {"show": len(series) > 1, "bottom": 0, "textStyle": {"color": _TEXT}, "data": list(series)},
        "series": drawn,
    }


def bars(
    title: str, unit: str, names: Sequence[str], series: Mapping[str, Sequence[float]]
) -> dict[str, Any]:
    """Return a bar plot of each series over ``names``."""
    return {
        **_base(title, unit),
        "xAxis": {
            "type": "category",
            "data": list(names),
            "axisLabel": {"color": _TEXT, "hideOverlap": True},
        },
        "yAxis": _value_axis(),
        "legend": {"show": len(series) > 1, "bottom": 0, "textStyle": {"color": _TEXT}},
        "series": [
            {"name": name, "type": "bar", "data": list(values), "itemStyle": {"color": color}}
            for color, (name, values) in zip(_cycle(), series.items())
        ],
    }


def graph(title: str, nodes: Iterable[dict[str, Any]], edges: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """Return a directed graph; a node has ``name``, ``x``, ``y`` and ``label``."""
    label = {"show": True, "color": "#fff", "formatter": "{b}", "fontSize": 12, "lineHeight": 16}
    return {
        **_base(title),
        "tooltip": {},
        "series": [
            {
                "type": "graph",
                "layout": "none",
                "roam": False,
                "edgeSymbol": ["none", "arrow"],
                "edgeSymbolSize": 9,
                "symbol": "roundRect",
                "symbolSize": [150, 52],
                "itemStyle": {"color": COLORS[0]},
                "label": label,
                "lineStyle": {"color": _TEXT, "width": 2, "opacity": 1},
                "data": [
                    {"name": n["label"], "id": n["name"], "x": n["x"], "y": n["y"], "value": n["label"]}
                    for n in nodes
                ],
                "links": [{"source": source, "target": target} for source, target in edges],
            }
        ],
    }


def zero_line() -> dict[str, Any]:
    """Return a series that marks zero."""
    mark = {"silent": True, "symbol": "none", "label": {"show": False}, "data": [{"yAxis": 0}]}
    mark["lineStyle"] = {"color": _TEXT, "type": "dashed"}
    return {"type": "line", "data": [], "markLine": mark, "tooltip": {"show": False}}


def show(options: dict[str, Any], alternative: str, height: str = "16rem") -> ui.echart:
    """Add a plot with its text alternative to the page."""
    chart = ui.echart(options).classes("w-full").style(f"height: {height}")
    chart.props(f'role="img" aria-label="{_attribute(alternative)}"')
    return chart


def update(chart: ui.echart, options: dict[str, Any]) -> None:
    """Replace the data of a plot."""
    chart.options.clear()
    chart.options.update(options)
    chart.update()


def _base(title: str, unit: str = "") -> dict[str, Any]:
    text = ", ".join(filter(None, (title, unit)))
    return {
        "animation": False,
        "title": {"text": text, "left": 0, "textStyle": _TITLE},
        "grid": {"left": 8, "right": 16, "top": 40, "bottom": 32, "containLabel": True},
        "tooltip": {"trigger": "axis", "confine": True},
    }


def _time_span(series: Iterable[Points]) -> dict[str, float]:
    """Return the limits of an axis that spans the points, and a minute at least.

    The axis of a single point would span two days.
    """
    moments = [moment for points in series for moment, _ in points]
    if not moments:
        return {}
    last = max(moments)
    return {"min": 1000 * min(*moments, last - _MIN_SPAN_S), "max": 1000 * last}


def _value_axis() -> dict[str, Any]:
    return {
        "type": "value",
        "scale": False,
        "axisLabel": {"color": _TEXT},
        "splitLine": {"lineStyle": {"color": "#8884"}},
    }


def _band(name: str, points: Sequence[Any], color: str) -> list[dict[str, Any]]:
    """Return two stacked lines, the upper one with a filled area down to the lower one."""
    known = [(moment, low, high) for moment, low, high in points if low is not None and high is not None]
    shared = {"type": "line", "stack": f"band {name}", "stackStrategy": "all", "showSymbol": False}
    shared |= {"lineStyle": {"opacity": 0}, "silent": True, "tooltip": {"show": False}}
    return [
        {**shared, "name": f"{name}, lower bound", "data": [[1000 * t, low] for t, low, _ in known]},
        {
            **shared,
            "name": f"{name}, upper bound",
            "data": [[1000 * t, high - low] for t, low, high in known],
            "areaStyle": {"color": color, "opacity": 0.2},
        },
    ]


def _cycle() -> Iterable[str]:
    while True:
        yield from COLORS


def _attribute(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
