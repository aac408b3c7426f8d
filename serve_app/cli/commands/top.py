"""`torchrelay top`: the load, latency and memory of every version, shown continuously."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import typer
from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from serve_app.cli import progress
from serve_app.cli.api_client import MANAGEMENT, CliClient, ManagementUrl, Token, sibling_address
from serve_app.cli.terminal import console, fail
from serve_app.client import AuthenticationError, Client, NotFoundError, ServerError, TransportError, formats
from serve_app.client.live_metrics import METRIC_NAMES, MetricsWindow, VersionFigures
from serve_app.client.prometheus_text import parse

_DESCRIBE_INTERVAL_S = 5.0  # between reads of the descriptions, one request a model
_FRAME_LINES = 8  # of the screen, besides the rows of the versions and the hosts
_MIN_ROWS = 3
_MIN_FILE_WIDTH = 200  # columns where the output is no terminal
_MIB = 1 << 20
_HOST_GAUGES = "CPUUtilization", "MemoryUsed", "MemoryUtilization", "GPUUtilization", "GPUMemoryUsed"


class MetricsUnreadable(Exception):
    """An error of an address that has no metrics page."""


@dataclass(frozen=True)
class _VersionRow:
    """A version with its figures, and its description where it was read."""

    model: str
    version: str
    figures: VersionFigures
    description: dict[str, Any] | None
    is_default: bool = False

    @property
    def memory(self) -> int:
        """The bytes of memory of all replicas."""
        return sum(worker["memoryUsage"] for worker in self._workers)

    @property
    def gpus(self) -> list[str]:
        """The GPUs of the replicas, each once."""
        used = (worker["gpuUsage"].removeprefix("gpuId::") for worker in self._workers if worker["gpu"])
        return list(dict.fromkeys(used))

    @property
    def _workers(self) -> list[dict[str, Any]]:
        return self.description["workers"] if self.description else []


class _Order(NamedTuple):
    """An order of the rows, which is descending except by name, and the key that selects it."""

    key: str
    value: Callable[[_VersionRow], Any]


_ORDERS = {
    "rate": _Order("r", lambda row: -row.figures.rate),
    "errors": _Order("e", lambda row: -row.figures.error_rate),
    "p50": _Order("5", lambda row: -(row.figures.p50 or 0.0)),
    "p99": _Order("9", lambda row: -(row.figures.p99 or 0.0)),
    "queue": _Order("w", lambda row: -row.figures.queue),
    "replicas": _Order("c", lambda row: -row.figures.replicas),
    "memory": _Order("m", lambda row: -row.memory),
    "name": _Order("n", lambda row: ""),
}
_QUIT = "q"


def _parse_order(text: str) -> str:
    if text not in _ORDERS:
        raise typer.BadParameter(f"{text!r} is none of {', '.join(_ORDERS)}.")
    return text


def top(
    sort: Annotated[
        str, typer.Option(parser=_parse_order, metavar="|".join(_ORDERS), help="The order of the versions.")
    ] = "rate",
    interval: Annotated[float, typer.Option(min=0.2, help="Seconds between two refreshes.")] = 2.0,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Versions to show; by default those that fit the terminal.")
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", help="Print one table, of the requests during an interval.")
    ] = False,
    management: ManagementUrl = MANAGEMENT,
    metrics: Annotated[
        str,
        typer.Option(
            envvar="TORCHRELAY_METRICS",
            help="The metrics address; by default port 8082 of the management address's host.",
        ),
    ] = "",
    token: Token = "",
) -> None:
    """Show the load, latency, errors, queues and memory of every version; q or Ctrl-C ends it.

    Without a terminal one table is printed, as with --once.
    """
    address = metrics or sibling_address(management, "metrics")
    with CliClient(management, token, metrics=address) as client:
        view = _TopView(client, address, sort)
        try:
            view.refresh(limit)
            if once or not console.is_terminal:
                time.sleep(interval)
                view.refresh(limit)
                output = (
                    console if console.is_terminal else Console(width=max(console.width, _MIN_FILE_WIDTH))
                )
                output.print(view.render())
            else:
                _watch(view, interval, limit)
        except MetricsUnreadable as error:
            fail(str(error))
        except KeyboardInterrupt:
            pass


def _watch(view: _TopView, interval: float, limit: int | None) -> None:
    """Show the view until a key or an interrupt ends it; a server that does not respond may return."""
    orders = {order.key: name for name, order in _ORDERS.items()}
    with _read_keys() as read_key, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            shown = max(_MIN_ROWS, console.height - _FRAME_LINES - view.hosts) if limit is None else limit
            try:
                view.refresh(shown)
            except AuthenticationError:
                raise
            except (ServerError, TransportError, MetricsUnreadable) as error:
                view.problem = f"The server does not respond; the figures are old. {error}".strip()
            live.update(view.render(), refresh=True)
            end = time.monotonic() + interval
            while (remaining := end - time.monotonic()) > 0:
                key = read_key(remaining)
                if key == _QUIT:
                    return
                if key in orders:
                    view.sort = orders[key]
                    break


@contextlib.contextmanager
def _read_keys() -> Iterator[Callable[[float], str]]:
    """Provide a function that returns the key that is pressed within some seconds, or an empty text."""
    if not sys.stdin.isatty():
        yield _sleep
        return
    import termios  # late: Windows has none
    import tty

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def read_key(seconds: float) -> str:
        if not select.select([descriptor], [], [], seconds)[0]:
            return ""
        return os.read(descriptor, 1).decode("ascii", "replace") or _QUIT  # a closed terminal ends it

    tty.setcbreak(descriptor)
    try:
        yield read_key
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _sleep(seconds: float) -> str:
    time.sleep(seconds)
    return ""


class _TopView:
    """The figures of a server, and how they are shown."""

    def __init__(self, client: Client, metrics: str, sort: str) -> None:
        self.sort = sort
        self.problem = ""
        self._client = client
        self._metrics = metrics
        self._window = MetricsWindow()
        self._models: list[str] = []
        self._described: dict[str, list[dict[str, Any]]] = {}
        self._described_at = float("-inf")
        self._rows: list[_VersionRow] = []
        self._hidden = 0

    @property
    def hosts(self) -> int:
        """The number of hosts, each of which takes a line."""
        return len(self._window.gauges.get("CPUUtilization", ()))

    def refresh(self, limit: int | None) -> None:
        """Read the metrics, and in longer intervals the models; keep the first ``limit`` versions.

        Raises the client's errors, and MetricsUnreadable.
        """
        due = time.monotonic() - self._described_at >= _DESCRIBE_INTERVAL_S
        if due:
            self._models = [model["modelName"] for model in self._client.models()]
        self._window.add(parse(self._read_metrics()))
        shown = self._models if self.sort == "memory" else [row.model for row in self._sort(limit)]
        self._describe(model for model in dict.fromkeys(shown) if due or model not in self._described)
        if due:
            self._described_at = time.monotonic()
        self._rows = self._sort(limit)
        self.problem = ""

    def _read_metrics(self) -> str:
        try:
            return self._client.metrics(*METRIC_NAMES)
        except AuthenticationError:
            raise
        except (ServerError, TransportError) as error:
            raise MetricsUnreadable(
                f"The metrics page {self._metrics}/metrics cannot be read: {error}\n"
                "Set --metrics to the server's metrics address (management.metrics_port in its settings)."
            ) from None

    def _describe(self, models: Iterable[str]) -> None:
        """Read the descriptions of models, and forget those of removed ones."""
        for model in models:
            try:
                self._described[model] = self._client.describe(model)
            except NotFoundError:  # removed meanwhile
                self._described.pop(model, None)
        for removed in self._described.keys() - set(self._models):
            del self._described[removed]

    def _sort(self, limit: int | None) -> list[_VersionRow]:
        """Return the first ``limit`` versions in the order."""
        versions: dict[str, set[str]] = {model: set() for model in self._models}
        for model, version in self._window.versions:
            if model in versions and version:
                versions[model].add(version)
        rows = []
        for model in self._models:
            described = self._described.get(model, [])
            by_version = {each["modelVersion"]: each for each in described}
            for version in sorted(versions[model] | by_version.keys()) or ["–"]:
                figures = self._window.versions.get((model, version), VersionFigures())
                is_default = bool(described) and version == described[0]["modelVersion"]
                rows.append(_VersionRow(model, version, figures, by_version.get(version), is_default))
        rows.sort(key=lambda row: (_ORDERS[self.sort].value(row), row.model, row.version))
        self._hidden = 0 if limit is None else max(0, len(rows) - limit)
        return rows[:limit]

    def render(self) -> RenderableType:
        """Return the totals, the hosts, and the table of the versions."""
        lines: list[RenderableType] = [self._render_total()]
        lines += [Text(text) for text in self._describe_hosts()]
        lines.append(self._render_versions())
        for row in self._rows:
            if row.description and (problem := progress.find_problem(row.description)):
                lines.append(Text(f"{row.model} {row.version}: {problem}", style="red"))
        if self._hidden:
            lines.append(Text(f"and {self._hidden:,} more; --limit shows another number", style="dim"))
        if self.problem:
            lines.append(Text(self.problem, style="red"))
        if console.is_terminal:
            keys = "  ".join(f"{order.key} {name}" for name, order in _ORDERS.items())
            lines.append(Text(f"sorted by {self.sort}; {keys}  {_QUIT} quit", style="dim"))
        return Group(*lines)

    def _render_total(self) -> Text:
        total = self._window.total
        text = (
            f"{time.strftime('%H:%M:%S')}  {formats.number(total.rate)} requests/s, "
            f"{formats.number(total.error_rate)} errors/s, p50 {formats.milliseconds(total.p50)}, "
            f"p99 {formats.milliseconds(total.p99)}, {total.queue:,.0f} queued, "
            f"{total.replicas:,.0f} of {total.desired:,.0f} replicas"
        )
        return Text(text, style="bold")

    def _describe_hosts(self) -> list[str]:
        """Return a line for each host that measures itself."""
        gauges = {
            name: {
                (sample.labels.get("Hostname", ""), sample.labels.get("DeviceId", "")): sample.value
                for sample in self._window.gauges.get(name, ())
            }
            for name in _HOST_GAUGES
        }
        lines = []
        for host, _ in sorted(gauges["CPUUtilization"]):
            used = gauges["MemoryUsed"].get((host, ""), 0.0) * _MIB
            share = gauges["MemoryUtilization"].get((host, ""), 0.0)
            cpu = gauges["CPUUtilization"][host, ""]
            line = f"{host}  CPU {cpu:.0f} %  memory {formats.size(used)} ({share:.0f} %)"
            for device in sorted(device for name, device in gauges["GPUUtilization"] if name == host):
                busy = gauges["GPUUtilization"][host, device]
                memory = gauges["GPUMemoryUsed"].get((host, device), 0.0) * _MIB
                line += f"  GPU {device} {busy:.0f} %, {formats.size(memory)}"
            lines.append(line)
        return lines

    def _render_versions(self) -> Table:
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for name in ("model", "version"):
            table.add_column(name, overflow="fold")
        table.add_column("replicas", justify="right")
        for name in ("requests/s", "errors/s", "p50", "p99", "queued", "memory"):
            table.add_column(name, justify="right", no_wrap=True)
        has_gpus = any(row.gpus for row in self._rows)
        if has_gpus:
            table.add_column("GPU")
        table.add_column("state")
        for row in self._rows:
            gpus = [", ".join(row.gpus)] if has_gpus else []
            state = progress.describe_state(row.description) if row.description else "–"
            table.add_row(*_cells(row), *gpus, state)
        return table


def _cells(row: _VersionRow) -> list[RenderableType]:
    """Return the cells of a version's figures."""
    figures = row.figures
    return [
        Text(row.model),
        Text(row.version + (" *" if row.is_default else "")),
        f"{figures.replicas:.0f} of {figures.desired:.0f}",
        formats.number(figures.rate),
        Text(formats.number(figures.error_rate), style="red" if figures.error_rate else ""),
        formats.milliseconds(figures.p50),
        formats.milliseconds(figures.p99),
        f"{figures.queue:,.0f}",
        formats.size(row.memory),
    ]
