"""HTML reports: self-contained, well-formed, and safe for texts of any kind."""

from __future__ import annotations

import math
import subprocess
from pathlib import Path
from typing import Any

import pytest

from serve_app.load_test.bench_report import write_bench_report
from serve_app.load_test.html_report import ECHARTS, Report, ReportSection, ReportTable, write_report
from serve_app.load_test.plots import PlotSeries, bar_plot, line_plot
from serve_app.load_test.profile import LoadRequest, LoadResult
from tests.support.report_checks import ReportPage
from tests.support.requirements import needs_program

HOSTILE = '</script><script>alert("1")</script><img src=x onerror=alert(2)>&amp;'


def test_texts_are_escaped_everywhere(tmp_path: Path) -> None:
    table = ReportTable([HOSTILE], [[HOSTILE], [1234.5], [None], [0.123456]], frozenset({0}))
    plot = bar_plot([HOSTILE], {HOSTILE: [1.0]}, HOSTILE)
    section = ReportSection(HOSTILE, HOSTILE, table, plot)
    file = tmp_path / "report.html"
    write_report(Report(HOSTILE, HOSTILE, {HOSTILE: HOSTILE}, [section]), file)
    page = ReportPage(file)
    assert page.scripts == 3  # the data, ECharts, and the code that draws
    assert page.tables[HOSTILE] == [[HOSTILE], [HOSTILE], ["1,234"], ["–"], ["0.1235"]]
    assert page.plots[HOSTILE]["yAxis"]["data"] == [HOSTILE]
    assert page.text.count(HOSTILE) == 9
    assert list(tmp_path.iterdir()) == [file]


def test_plots_leave_out_what_cannot_be_drawn() -> None:
    points = [(1.0, 5.0), (2.0, None), (3.0, math.nan), (4.0, 0.0), (math.inf, 1.0)]
    plot = line_plot([PlotSeries("a", points)], "x", "y", limit=20, chosen=(1.0, 5.0), is_logarithmic=True)
    drawn = {line["name"]: line["data"] for line in plot["series"]}
    assert drawn == {"a": [[1.0, 5.0]], "limit": [], "chosen": [[1.0, 5.0]]}
    assert plot["series"][1]["markLine"]["data"][0]["yAxis"] == 20
    assert plot["yAxis"]["max"] == pytest.approx(22)
    bars = bar_plot(["a", "b"], {"x": [0.0, math.inf]}, "y", is_logarithmic=True)
    assert bars["series"][0]["data"] == [None, None]


def test_a_bench_report_has_each_run(tmp_path: Path) -> None:
    figures: dict[str, Any] = {
        "engine": "asyncio",
        "seconds": 2.0,
        "requests": 100,
        "limit": 0.02,
        "max": 0.05,
    }
    figures |= {"connections": 256, "p50": 0.001, "p90": 0.01}
    runs = [
        LoadResult(rate=rate, completed=2 * rate, within=2 * rate - 2, p99=rate / 5000, **figures)
        for rate in (50, 100)
    ]
    failed = LoadResult(
        "asyncio", 256, 2.0, 0, 0, math.nan, math.nan, math.nan, math.nan, {"connect": 3}, 200.0
    )
    file = tmp_path / "bench.html"
    write_bench_report(LoadRequest("http://user:secret@h/<b>"), [*runs, failed], file)
    page = ReportPage(file)
    assert "Load test of http://h/<b>" in page.text and "secret" not in page.text
    assert "The most responses within the limit are 99/s, with a p99 of 20.00 ms." in page.text
    latencies = page.plots["Throughput against latency"]["series"]
    assert [line["data"] for line in latencies if line["name"] == "p99"] == [[[50, 10], [100, 20]]]
    assert page.tables["Throughput against latency"][3][:4] == ["256", "200", "0", "–"]
    assert page.tables["Throughput by arrivals/s"][1] == ["50", "50", "49"]


def test_the_script_is_safe_inside_of_an_html_page() -> None:
    script = ECHARTS.read_text("utf-8")
    assert "</script" not in script and "<!--" not in script


@needs_program("node")
@pytest.mark.integration
def test_the_script_defines_echarts(tmp_path: Path) -> None:
    program = f"const module = undefined, exports = undefined;{ECHARTS.read_text('utf-8')}"
    (tmp_path / "check.js").write_text(f"{program}\nconsole.log(typeof echarts.init)")
    done = subprocess.run(["node", "check.js"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "function", done.stderr
