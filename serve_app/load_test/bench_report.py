"""The HTML report of ``torchrelay bench``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from serve_app.load_test.html_report import Cell, Report, ReportSection, ReportTable, write_report
from serve_app.load_test.plots import PlotSeries, line_plot
from serve_app.load_test.profile import LoadRequest, LoadResult

_PERCENTILES = ("p50", "p90", "p99")


def write_bench_report(request: LoadRequest, results: Sequence[LoadResult], file: Path) -> None:
    """Write the results of runs over connections or rates. Raises OSError."""
    limit = next((r.limit * 1000 for r in results if r.limit is not None), None)
    is_open = any(r.rate is not None for r in results)
    load = "open loop, Poisson arrivals" if is_open else "closed loop"
    parts = urlsplit(request.url)
    url = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()  # without a password
    facts = {"URL": url, "method": request.method, "load": load}
    facts["engine"] = ", ".join(sorted({r.engine for r in results}))
    facts["duration of a run"] = ", ".join(sorted({f"{r.seconds:.3g} s" for r in results}))
    if limit is not None:
        facts["limit"] = f"{limit:g} ms"
    table = result_table(results)
    best = max(results, key=lambda r: r.throughput if r.goodput is None else r.goodput, default=None)
    summary = "No request succeeded."
    if best is not None and best.requests:
        measure = "responses within the limit" if best.goodput is not None else "responses"
        figure = best.throughput if best.goodput is None else best.goodput
        summary = f"The most {measure} are {figure:,.0f}/s, with a p99 of {_ms(best.p99):.2f} ms."
    latencies = [
        PlotSeries(name, [(r.throughput, _ms(getattr(r, name))) for r in results]) for name in _PERCENTILES
    ]
    step = "arrivals/s" if is_open else "connections"
    over = [PlotSeries("requests/s", [(r.rate or r.connections, r.throughput) for r in results])]
    if limit is not None:
        over.append(PlotSeries("goodput/s", [(r.rate or r.connections, r.goodput) for r in results]))
    sections = [
        ReportSection(
            "Throughput against latency",
            "Each point is a run.",
            table,
            line_plot(latencies, "responses/s", "latency, ms", limit=limit, is_logarithmic=True),
        ),
        ReportSection(
            f"Throughput by {step}",
            "",
            ReportTable(
                [step, "requests/s", "goodput/s"],
                [[r.rate or r.connections, r.throughput, r.goodput] for r in results],
            ),
            line_plot(over, step, "responses/s"),
        ),
    ]
    write_report(Report(f"Load test of {url}", summary, facts, sections), file)


def result_table(results: Sequence[LoadResult]) -> ReportTable:
    """Return the figures of each run; latencies are in milliseconds."""
    columns = [
        "connections", "arrivals/s", "requests/s", "goodput/s",
        "p50 ms", "p90 ms", "p99 ms", "max ms", "errors",
    ]  # fmt: skip
    rows: list[list[Cell]] = []
    for r in results:
        latencies: list[Cell] = [None if math.isnan(v) else _ms(v) for v in (r.p50, r.p90, r.p99, r.max)]
        errors = ", ".join(f"{count:,} × {kind}" for kind, count in sorted(r.errors.items())) or "none"
        rows.append([r.connections, r.rate, r.throughput, r.goodput, *latencies, errors])
    return ReportTable(columns, rows)


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
