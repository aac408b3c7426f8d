"""A self-contained HTML report of plots and tables: no file beside it, and no request to any host."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

# The file of the npm package echarts 6.1.0: its smallest build with SVG, scatter plots and lines of limits.
ECHARTS = resources.files(__package__) / "echarts" / "echarts.common.min.js"

Cell = str | int | float | None


@dataclass(frozen=True)
class ReportTable:
    """A table; ``marked`` are the indices of emphasized rows."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    marked: frozenset[int] = frozenset()


@dataclass(frozen=True)
class ReportSection:
    """A heading with text, an ECharts option, and the table with the same data as text."""

    heading: str
    text: str = ""
    table: ReportTable | None = None
    plot: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Report:
    """A title, facts as pairs of a name and a value, and sections."""

    title: str
    summary: str
    facts: Mapping[str, str] = field(default_factory=dict)
    sections: Sequence[ReportSection] = ()


def write_report(report: Report, file: Path) -> None:
    """Write the page, whole or not at all. Raises OSError."""
    text = render_report(report)
    partial = file.with_name(f".{file.name}.partial")
    partial.write_text(text, "utf-8")
    os.replace(partial, file)


def render_report(report: Report) -> str:
    """Return the page."""
    facts = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in report.facts.items())
    sections = "\n".join(_render_section(i, section) for i, section in enumerate(report.sections))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(report.title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<main>
<h1>{escape(report.title)}</h1>
<p class="summary">{escape(report.summary)}</p>
<dl>{facts}</dl>
<noscript><p>The plots need JavaScript; each table has the same data.</p></noscript>
{sections}
</main>
<!-- Apache ECharts, Copyright The Apache Software Foundation, Apache License 2.0 -->
<script>{ECHARTS.read_text("utf-8")}</script>
<script>{_SCRIPT}</script>
</body>
</html>
"""


def _render_section(index: int, section: ReportSection) -> str:
    parts = [f"<section><h2>{escape(section.heading)}</h2>"]
    if section.text:
        parts.append(f"<p>{escape(section.text)}</p>")
    if section.plot is not None:
        label = escape(f"{section.heading}. The table below has the data.")
        parts.append(f'<div class="plot" role="img" aria-label="{label}" data-option="option-{index}"></div>')
        parts.append(f'<script type="application/json" id="option-{index}">{_to_json(section.plot)}</script>')
    if section.table is not None:
        table = _render_table(section.table)
        is_alternative = section.plot is not None
        parts.append(f"<details><summary>Table</summary>{table}</details>" if is_alternative else table)
    return "\n".join([*parts, "</section>"])


def _render_table(table: ReportTable) -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in table.columns)
    rows = []
    for number, row in enumerate(table.rows):
        marked = ' class="marked"' if number in table.marked else ""
        rows.append(f"<tr{marked}>{''.join(map(_render_cell, row))}</tr>")
    body = "\n".join(rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>'


def _render_cell(value: Cell) -> str:
    if isinstance(value, (int, float)):
        return f'<td class="number">{format_number(value)}</td>'
    return f"<td>{escape(value)}</td>" if value is not None else '<td class="number">–</td>'


def format_number(value: float) -> str:
    """Return a number with four significant digits, or as a whole number from 1,000."""
    return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 1000 else f"{value:.4g}"


def _to_json(option: Mapping[str, Any]) -> str:
    """Return JSON that is safe inside of a ``<script>`` element."""
    text = json.dumps(option, allow_nan=False, ensure_ascii=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; "
    "base-uri 'none'; form-action 'none'"
)
_STYLE = """
:root { color-scheme: light dark; --text: #1b1f24; --muted: #59636e; --line: #d0d7de; --page: #fff;
  --mark: #ddf4ff; }
@media (prefers-color-scheme: dark) { :root { --text: #e6edf3; --muted: #9198a1; --line: #3d444d;
  --page: #0d1117; --mark: #12324f; } }
body { margin: 0; background: var(--page); color: var(--text); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 70rem; margin: 0 auto; padding: 1.5rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
.summary { font-size: 1.1rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1.2rem; margin: 1rem 0; }
dt { color: var(--muted); } dd { margin: 0; overflow-wrap: anywhere; }
.plot { height: 26rem; width: 100%; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .87rem; margin: .6rem 0; }
th, td { border-bottom: 1px solid var(--line); padding: .3rem .7rem .3rem 0; text-align: left; }
.number { text-align: right; font-variant-numeric: tabular-nums; }
.marked { background: var(--mark); font-weight: 600; }
summary { cursor: pointer; color: var(--muted); }
"""
_SCRIPT = """
(function () {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const charts = [];
  function draw() {
    charts.splice(0).forEach((chart) => chart.dispose());
    document.querySelectorAll(".plot").forEach((place) => {
      const option = JSON.parse(document.getElementById(place.dataset.option).textContent);
      const chart = echarts.init(place, dark.matches ? "dark" : null, { renderer: "svg" });
      chart.setOption({ backgroundColor: "transparent", animation: false, ...option });
      charts.push(chart);
    });
  }
  draw();
  dark.addEventListener("change", draw);
  addEventListener("resize", () => charts.forEach((chart) => chart.resize()));
})();
"""
