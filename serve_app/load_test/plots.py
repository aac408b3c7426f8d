"""ECharts options of the plots of load tests. Values that are not finite are left out of the plots."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# renderMode: the text of a tooltip is never parsed as HTML.
_TOOLTIP = {"trigger": "item", "renderMode": "richText", "confine": True}
_LEGEND = {"type": "scroll", "top": 0}
_GRID = {"left": 72, "right": 40, "top": 48, "bottom": 56}
_CHOSEN = "#2da44e"
_LIMIT = "#d1242f"


@dataclass(frozen=True)
class PlotSeries:
    """The points (x, y) of one line; a ``faint`` line is in the background."""

    name: str
    points: Sequence[tuple[float, float | None]]
    faint: bool = False


def line_plot(
    series: Sequence[PlotSeries],
    x: str,
    y: str,
    *,
    limit: float | None = None,
    chosen: tuple[float, float] | None = None,
    is_logarithmic: bool = False,
) -> dict[str, Any]:
    """Return lines over a value axis, with a horizontal line at ``limit`` and a mark at ``chosen``."""
    lines: list[dict[str, Any]] = []
    for one in series:
        points = [list(p) for p in one.points if _is_drawn(p, is_logarithmic)]
        line: dict[str, Any] = {"name": one.name, "type": "line", "data": points, "symbolSize": 7}
        if one.faint:
            line |= {"lineStyle": {"opacity": 0.35, "width": 1}, "itemStyle": {"opacity": 0.45}}
        lines.append(line)
    if limit is not None:
        mark = {"symbol": "none", "lineStyle": {"color": _LIMIT, "type": "dashed"}, "silent": True}
        label = {"formatter": f"limit {limit:g}", "color": _LIMIT, "position": "insideEndTop"}
        data = [{"yAxis": limit, "label": label}]
        lines.append({"name": "limit", "type": "line", "data": [], "markLine": {**mark, "data": data}})
    if chosen is not None:
        lines.append(
            {
                "name": "chosen",
                "type": "scatter",
                "symbol": "diamond",
                "symbolSize": 20,
                "itemStyle": {"color": _CHOSEN, "borderColor": "#fff", "borderWidth": 1},
                "label": {"show": True, "formatter": "chosen", "position": "right", "color": _CHOSEN},
                "data": [list(chosen)],
                "z": 5,
            }
        )
    vertical: dict[str, Any] = {"type": "log" if is_logarithmic else "value", "name": y}
    highest = max((p[1] for line in lines for p in line["data"]), default=0.0)
    if limit is not None and limit > highest:
        vertical["max"] = limit * 1.1
    return {
        "tooltip": _TOOLTIP,
        "legend": {**_LEGEND, "data": [one.name for one in series]},
        "grid": _GRID,
        "xAxis": {"type": "value", "name": x, "nameLocation": "middle", "nameGap": 32},
        "yAxis": {**vertical, "nameLocation": "end"},
        "series": lines,
    }


def bar_plot(
    names: Sequence[str],
    values: Mapping[str, Sequence[float | None]],
    x: str,
    *,
    is_logarithmic: bool = False,
) -> dict[str, Any]:
    """Return horizontal bars: for each name of ``values`` one bar at each of ``names``.

    On a logarithmic axis, where a bar has no origin, they are points.
    """
    kind: dict[str, Any] = {"type": "bar", "barMaxWidth": 28}
    if is_logarithmic:
        kind = {"type": "scatter", "symbolSize": 14}

    def drawn(value: float | None) -> float | None:
        return value if value is not None and _is_drawn((0.0, value), is_logarithmic) else None

    return {
        "tooltip": _TOOLTIP,
        "legend": {**_LEGEND, "data": list(values)},
        "grid": {**_GRID, "left": 300},
        "xAxis": {
            "type": "log" if is_logarithmic else "value",
            "name": x,
            "nameLocation": "middle",
            "nameGap": 32,
        },
        "yAxis": {
            "type": "category",
            "data": list(names),
            "inverse": True,
            "axisLabel": {"width": 270, "overflow": "truncate", "interval": 0},
        },
        "series": [{**kind, "name": name, "data": [drawn(v) for v in data]} for name, data in values.items()],
    }


def _is_drawn(point: tuple[float, float | None], is_logarithmic: bool) -> bool:
    x, y = point
    return y is not None and math.isfinite(x) and math.isfinite(y) and (y > 0 or not is_logarithmic)
