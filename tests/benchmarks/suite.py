"""The comparison: Torchrelay, TorchServe and other servers, one after another, round after round.

``python -m tests.benchmarks.suite`` prints its report as Markdown. All servers stay up meanwhile; what each
costs idle is measured and shown.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import shlex
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from serve_app.load_test import wrk
from tests.benchmarks import (
    servers as peers,
)
from tests.benchmarks.archives import ArchiveFailed, build
from tests.benchmarks.chart import draw
from tests.benchmarks.comparison import Comparison
from tests.benchmarks.frameworks import FRAMEWORKS, Framework
from tests.benchmarks.report import Report
from tests.benchmarks.servers import Peer, PeerFailed

GROUPS = ("echo", "mlp", "bare-parser", "encoder", "images", "gateway", "oip", "grpc", "traffic", "shadow")
GROUPS += ("lengths", "runtimes", "variants", "generation", "prefix", "sharding", "pool")
GROUPS += ("middleware", "costs", "memory")
_ALONE = {
    "variants",
    "generation",
    "prefix",
    "sharding",
    "pool",
    "middleware",
    "costs",
}  # without the servers that others share
# HAProxy compares paths as they are written, so an escaped letter goes to the gateway.
_GATEWAY = "/%70redictions/{model}"


def machine() -> Mapping[str, str]:
    """Return what the figures depend on."""
    facts = {"machine": f"{os.cpu_count()} cores, {_memory()}, {platform.system()}"}
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        facts["processor"] = next(line.split(": ", 1)[1] for line in lines if line.startswith("model name"))
    versions = [f"Python {platform.python_version()}"]
    for package in ("torch", "ray", "fastapi", "uvicorn"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{package} {importlib.metadata.version(package)}")
    with contextlib.suppress(PeerFailed):
        versions.append(f"Java {peers.java_version()}")
    facts["versions"] = ", ".join(versions)
    facts["generator"] = (
        "wrk, on the same machine" if wrk.installed() else "the asyncio client, on the same machine"
    )
    return facts


def _memory() -> str:
    return f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB"


def main(
    only: Annotated[str, typer.Option(help=f"Some of {','.join(GROUPS)}; all where nothing is said.")] = "",
    rounds: Annotated[int, typer.Option(help="How often each contender is measured.")] = 5,
    seconds: Annotated[float, typer.Option(help="Of each measurement.")] = 5.0,
    skip_torchserve: Annotated[bool, typer.Option("--skip-torchserve", help="Leave TorchServe out.")] = False,
    skip_torchrelay: Annotated[
        bool, typer.Option("--skip-torchrelay", help="Measure the others alone.")
    ] = False,
    others: Annotated[str, typer.Option(help="The other servers of echo and mlp.")] = ",".join(FRAMEWORKS),
    configs: Annotated[Path, typer.Option(help="The folder of app.yaml and serve.env.")] = Path("configs"),
    inference: Annotated[
        str, typer.Option(help="A running Torchrelay, in place of one that is started.")
    ] = "",
    management: Annotated[str, typer.Option(help="Its management address.")] = "http://127.0.0.1:8081",
    gateway: Annotated[str, typer.Option(help="A path to a model by way of the gateway.")] = _GATEWAY,
    folder: Annotated[
        Path | None, typer.Option(help="For archives and logs; a temporary one unless said.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Also write the report to this file.")] = None,
    chart: Annotated[
        Path | None,
        typer.Option(help="Also draw echo and mlp: benchmark-light.svg and -dark.svg in this folder."),
    ] = None,
) -> None:
    """Compare Torchrelay with TorchServe 0.12 and other servers on this machine."""
    groups = _names(only, GROUPS, "--only") or GROUPS
    servers = Servers(
        skip_torchserve=skip_torchserve,
        skip_torchrelay=skip_torchrelay,
        others=_names(others, tuple(FRAMEWORKS), "--others"),
        configs=configs.resolve(),
        inference=inference,
        management=management,
        gateway=gateway,
    )
    console = Console(stderr=True)
    text = TextColumn("{task.description}")
    columns = (SpinnerColumn(), text, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with contextlib.ExitStack() as stack:
        place = folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="torchrelay-bench-")))
        progress = stack.enter_context(Progress(*columns, console=console))
        run = Comparison(place.resolve(), rounds, seconds, progress)
        try:
            run.archives = build(run.folder / "archives")
        except ArchiveFailed as error:
            raise typer.Exit(_complain(console, error)) from None
        if "variants" in groups:
            run.variants()
        if "generation" in groups:
            run.generation()
        if "prefix" in groups:
            run.prefix()
        if "sharding" in groups:
            run.sharding()
        if "pool" in groups:
            run.pool(console)
        if set(groups) - _ALONE:
            _together(run, groups, servers)
        if "middleware" in groups and not skip_torchrelay and not inference:
            run.middleware(configs.resolve())
        if "costs" in groups and not skip_torchrelay and not inference:
            run.costs(configs.resolve())
    command = shlex.join(["python", "-m", "tests.benchmarks.suite", *sys.argv[1:]])
    page = Report(
        machine(), command, run.figures, run.footprints, run.notes, run.cpu, sections=run.sections
    ).markdown()
    if output:
        output.write_text(page)
    if chart:
        draw(run.figures, chart)
    print(page)


def _names(text: str, known: Sequence[str], option: str) -> tuple[str, ...]:
    """Return the names in an option's value. Raises BadParameter with those that do not exist."""
    names = tuple(filter(None, text.split(",")))
    if unknown := set(names) - set(known):
        raise typer.BadParameter(
            f"{', '.join(sorted(unknown))} is none of {', '.join(known)}", param_hint=option
        )
    return names


@dataclass(frozen=True)
class Servers:
    """The options that name what is compared."""

    skip_torchserve: bool
    skip_torchrelay: bool
    others: Sequence[str]
    configs: Path
    inference: str
    management: str
    gateway: str


def _together(run: Comparison, groups: Sequence[str], servers: Servers) -> None:
    """Start what is compared, and measure the groups for which all of it is up at once."""
    with contextlib.ExitStack() as stack:

        def enter(manager: contextlib.AbstractContextManager[Peer], *, models: bool = True) -> Peer | None:
            with run.going_on():
                peer = stack.enter_context(manager)
                if "memory" in groups and peer.began:
                    run.footprint(peer, models=models)
                return peer
            return None

        relay = None
        if servers.inference:
            relay = enter(peers.attached("Torchrelay", servers.inference, servers.management))
        elif not servers.skip_torchrelay:
            # Ray gives up after 30 s, which a busy machine exceeds: it starts first, and again if needed.
            relay = enter(peers.torchrelay(run.folder, servers.configs)) or enter(
                peers.torchrelay(run.folder, servers.configs)
            )
        others: list[tuple[Framework, Peer]] = []
        for framework in map(FRAMEWORKS.__getitem__, servers.others):
            if {"echo", "mlp", "memory"} & set(groups) and (
                peer := enter(framework.start(run.folder), models=False)
            ):
                others.append((framework, peer))
        serve = None
        if not servers.skip_torchserve and set(groups) != {"bare-parser"}:
            serve = enter(peers.torchserve(run.folder, run.folder / "archives"))
        measurements: dict[str, Callable[[], None]] = {
            "echo": lambda: run.echo(relay, serve, others),
            "mlp": lambda: run.mlp(relay, serve, others),
            "bare-parser": lambda: run.bare_parser(relay, servers.configs),
            "encoder": lambda: run.encoder(relay, serve),
            "images": lambda: run.images(relay, serve),
            "gateway": lambda: _gateway(run, relay, servers.gateway),
            "grpc": lambda: run.grpc(relay, serve),
        }
        if relay:
            measurements |= {
                "oip": lambda: run.oip(relay),
                "traffic": lambda: run.traffic(relay, serve),
                "shadow": lambda: run.shadow(relay),
                "lengths": lambda: run.lengths(relay),
                "runtimes": lambda: run.runtimes(relay),
            }
        for group, measure in measurements.items():
            if group in groups:
                measure()


def _gateway(run: Comparison, relay: Peer | None, path: str) -> None:
    if relay and path:
        run.gateway(relay, path)
    else:
        run.note("The gateway was not measured: it needs Torchrelay, and --gateway with a path.")


def _complain(console: Console, error: Exception) -> int:
    console.print(f"[red]{error}[/red]", highlight=False)
    return 1


if __name__ == "__main__":
    typer.run(main)
