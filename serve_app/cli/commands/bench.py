"""``torchrelay bench``: load on one URL, and a table of what came of it."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from serve_app.load_test import Engine, EngineMissing, LoadProfile, LoadRequest, LoadResult, send
from serve_app.load_test.bench_report import write_bench_report
from serve_app.load_test.wrk import WrkError

_OPEN_CONNECTIONS = 256  # of an open loop, by default


def bench(  # options of the command
    url: Annotated[
        str, typer.Argument(help="Where to send, such as http://127.0.0.1:8080/predictions/digits.")
    ],
    data: Annotated[
        str, typer.Option("--data", "-d", help="The body: text, or @FILE for a file's bytes.")
    ] = "",
    method: Annotated[
        str, typer.Option("--method", "-X", help="By default POST with a body, else GET.")
    ] = "",
    content_type: Annotated[
        str, typer.Option("--content-type", "-t", help="Of the body.")
    ] = "application/json",
    header: Annotated[
        list[str] | None, typer.Option("--header", "-H", help="'Name: value', repeatable.")
    ] = None,
    connections: Annotated[
        str, typer.Option("--connections", "-c", help="One run each, such as 1,8,32.")
    ] = "",
    duration: Annotated[float, typer.Option(help="Seconds of each run.")] = 10.0,
    requests: Annotated[int | None, typer.Option(help="End a run after so many, if that is sooner.")] = None,
    rate: Annotated[
        str, typer.Option(help="Arrivals a second: an open loop. One run each, such as 100,200,400.")
    ] = "",
    limit: Annotated[
        float | None, typer.Option(help="Milliseconds; answers within it are the goodput.")
    ] = None,
    warmup: Annotated[float, typer.Option(help="Seconds before each run that are not counted.")] = 1.0,
    timeout: Annotated[float, typer.Option(help="Seconds for one request.")] = 10.0,
    same: Annotated[bool, typer.Option("--same", help="Every answer must equal the first.")] = False,
    engine: Annotated[
        str, typer.Option(help="auto (wrk where it is installed and can), asyncio or wrk.")
    ] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a report with plots, too.")] = None,
) -> None:
    """Send load to a URL and show throughput, latencies and errors."""
    if engine not in ("auto", "asyncio", "wrk"):
        raise typer.BadParameter(f"{engine!r} is none of auto, asyncio, wrk", param_hint="--engine")
    progress = Console(stderr=True)
    results = []
    try:
        request = LoadRequest(
            url,
            method or ("POST" if data else "GET"),
            _body(data),
            content_type,
            dict(_header(line) for line in header or []),
            _SameBodyCheck() if same else None,
        )
        if html is not None:
            _check_report(html)
        for count, arrivals in _runs(connections, rate):
            load = LoadProfile(
                connections=count,
                rate=arrivals,
                seconds=duration,
                requests=requests,
                warmup=warmup,
                timeout=timeout,
                limit=limit / 1000 if limit is not None else None,
            )
            with progress.status(f"{count} connections" + (f", {arrivals:g} arrivals/s" if arrivals else "")):
                results.append(send(request, load, cast("Engine", engine)))
    except (ValueError, WrkError, EngineMissing) as error:
        progress.print(str(error), style="red", highlight=False, markup=False, soft_wrap=True)
        raise typer.Exit(2) from None
    if as_json:
        json.dump([as_dict(result) for result in results], sys.stdout, indent=2)
        print()
    else:
        Console().print(table(results))
    if html is not None:
        write_bench_report(request, results, html)
        progress.print(f"Report: {html}", highlight=False, markup=False, soft_wrap=True)
    if not any(result.requests for result in results):
        raise typer.Exit(1)


def table(results: list[LoadResult]) -> Table:
    """Return the results as a table, latencies in milliseconds, with a caption on the method."""
    limit = any(result.limit is not None for result in results)
    is_open = any(result.rate is not None for result in results)
    rows = Table(box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), caption=_caption(results), caption_justify="left")
    numbers = [
        "conn.",
        *(["arrivals/s"] if is_open else []),
        "requests/s",
        *(["goodput/s"] if limit else []),
        *("p50", "p90", "p99", "max"),
    ]
    for column in numbers:
        rows.add_column(column, justify="right", no_wrap=True)
    rows.add_column("errors", overflow="fold")  # a name of several words takes lines of its own
    for r in results:
        latencies = ["-" if math.isnan(v) else f"{v * 1000:.2f}" for v in (r.p50, r.p90, r.p99, r.max)]
        good = [f"{r.goodput:,.0f}" if r.goodput is not None else "-"] if limit else []
        errors = "\n".join(f"{count:,} × {kind}" for kind, count in sorted(r.errors.items())) or "none"
        offered = [f"{r.rate:g}" if r.rate else "-"] if is_open else []
        rows.add_row(str(r.connections), *offered, f"{r.throughput:,.0f}", *good, *latencies, errors)
    return rows


def _caption(results: list[LoadResult]) -> str:
    engines = " and ".join(sorted({result.engine for result in results}))
    rates = sorted({result.rate for result in results if result.rate})
    if not rates:
        return f"latencies in ms; closed loop, sent by {engines}"
    lag = max(result.lag for result in results) * 1000
    offered = ", ".join(f"{rate:g}" for rate in rates)
    return f"latencies in ms; open loop of {offered} requests/s; the generator was late by {lag:.2f} ms (p99)"


def as_dict(result: LoadResult) -> dict[str, Any]:
    """Return a result for JSON, in seconds; a percentile without values is null."""
    fields = {**asdict(result), "throughput": result.throughput, "goodput": result.goodput}
    return {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in fields.items()}


class _SameBodyCheck:
    """A check that a response equals the first one."""

    def __init__(self) -> None:
        self.first: bytes | None = None

    def __call__(self, body: bytes) -> bool:
        if self.first is None:
            self.first = body
        return body == self.first


def _body(data: str) -> bytes:
    if not data.startswith("@"):
        return data.encode()
    try:
        return Path(data[1:]).read_bytes()
    except OSError as error:
        raise typer.BadParameter(f"{data[1:]}: {error.strerror}", param_hint="--data") from None


def _header(line: str) -> tuple[str, str]:
    name, colon, value = line.partition(":")
    if not colon or not name.strip():
        raise typer.BadParameter(f"{line!r} is not 'Name: value'", param_hint="--header")
    return name.strip(), value.strip()


def _runs(connections: str, rate: str) -> list[tuple[int, float | None]]:
    """Return the connections and the rate of each run; a closed loop has no rate."""
    rates = _numbers(rate, float, "--rate", "100,200,400") if rate else [None]
    counts = _numbers(connections, int, "--connections", "1,8,32") if connections else []
    counts = counts or ([_OPEN_CONNECTIONS] if rate else [1, 8, 32])
    return [(count, arrivals) for count in counts for arrivals in rates]


def _numbers(text: str, kind: Callable[[str], Any], option: str, example: str) -> list[Any]:
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        message = f"{text!r} is not a list of numbers such as {example}"
        raise typer.BadParameter(message, param_hint=option) from None


def _check_report(file: Path) -> None:
    """Check before the load that the report can be written."""
    if not file.parent.is_dir() or file.is_dir():
        raise typer.BadParameter(f"{file} is not a file in an existing folder", param_hint="--html")
