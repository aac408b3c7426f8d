"""What a person sees while the server starts, and once it is ready."""

from __future__ import annotations

import contextlib
import re
import threading
import time
import uuid
from typing import Any

import httpx
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from serve_app.cli.process import ServerProcess, StartError
from serve_app.client import Client, ServerError


def versions(client: Client) -> Table:
    """Every version of every model, with its replicas."""
    table = Table("model", "version", "replicas", "state", "archive")
    for model in client.models():
        for version in client.describe(model["modelName"]):
            running = sum(worker["status"] == "READY" for worker in version["workers"])
            wanted, most = version["minWorkers"], version["maxWorkers"]
            failed = version.get("lastError")
            if wanted == most == 0:
                state = "no workers"
            elif failed and not running:
                state = "[red]failed"
            elif not wanted and not running:
                state = "[green]idle"
            else:
                state = "[green]ready" if running >= wanted else "[yellow]loading"
            count = f"{running} of {wanted}" + (f" to {most}" if most > wanted else "")
            table.add_row(model["modelName"], version["modelVersion"], count, state, version["modelUrl"])
            if failed and running < wanted:
                table.add_row("", "", "", Text(failed.strip().splitlines()[-1], style="red"), "")
    return table


def until_ready(server: ServerProcess, console: Console, patience: float) -> None:
    """Show how the models come up, until all of them are ready or have failed. Raises StartError."""
    deadline = time.monotonic() + patience
    spinner = Spinner("dots", "Starting Ray …")
    with server.client(timeout=2) as client, Live(
        spinner, console=console, transient=True, refresh_per_second=8
    ) as live:
        while not client.ready():
            if server.ended() is not None:
                raise StartError(f"`serve run` ended with code {server.ended()}:\n{server.last_lines()}")
            if time.monotonic() > deadline:
                server.stop()
                raise StartError(f"It was not ready within {patience:.0f} s:\n{server.last_lines()}")
            try:
                spinner.update(text="Loading models …")
                live.update(Group(spinner, versions(client)))
            except (httpx.HTTPError, ServerError):
                spinner.update(text="Starting Ray …")
                live.update(spinner)
            time.sleep(0.1)
        try:
            console.print(versions(client))
        except ServerError as error:  # it wants a key that we do not know
            console.print(f"Its models are not shown here: {error}", highlight=False)


def registered(client: Client, console: Console, url: str, **parameters: Any) -> str:
    """Register an archive, and show how far it has come; what the server answers. Raises what the client does."""
    mine = uuid.uuid4().hex
    path = url.partition("?")[0].rstrip("/").rpartition("/")[2]
    name = parameters.get("model_name") or re.sub(r"\.(mar|zip|tar\.gz|tgz)$", "", path, flags=re.IGNORECASE)
    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(20), TaskProgressColumn()
    with Progress(*columns, console=console, transient=True) as bars:
        bar = bars.add_task(f"Registering {url}", total=None)

        def listen() -> None:
            # A server that tells nothing still answers the registration, and says there what is wrong.
            with contextlib.suppress(httpx.HTTPError, httpx.StreamError, ServerError, RuntimeError):
                for stage, said in client.events(name, registration=mine):
                    bars.update(bar, description=_step(stage, said), total=said.get("total"))
                    bars.update(bar, completed=said.get("bytes", 0))

        listener = threading.Thread(target=listen, daemon=True)
        listener.start()
        answer = client.register(url, registration=mine, **parameters)
        listener.join(1)
    return answer


def _step(stage: str, said: dict[str, Any]) -> str:
    """A stage of a model's events in words."""
    if stage == "installing":
        return f"Installing: {said.get('line', '')[:60]}"
    if stage == "starting" and "waiting_for" in said:
        return f"Waiting for {', '.join(_lacking(kind, one) for kind, one in said['waiting_for'].items())}"
    words = {"accepted": "Registering", "starting": "Starting workers", "warming": "Warming up"}
    return words.get(stage, stage.capitalize())


def _lacking(kind: str, one: dict[str, Any]) -> str:
    if one.get("placement") != "STRICT_PACK":
        return f"{one['wanted']:g} {kind} ({one['free']:g} free)"
    machines = ", ".join(f"{address} {free:g}" for address, free in one["machines"].items())
    return f"{one['wanted']:g} {kind} on one machine (free: {machines})"


def welcome(server: ServerProcess, console: Console, example: str | None) -> None:
    """Say where it listens, and what to paste."""
    console.print("\n[bold green]Torchrelay is ready.[/bold green]")
    rows = {
        "inference": server.inference,
        "management": server.management,
        "metrics": server.metrics,
        **({"gRPC": ", ".join(f"{name} {where}" for name, where in server.grpc.items())} if server.grpc else {}),
        "dashboard": "http://127.0.0.1:8265  (`ray get-auth-token` shows the token that it asks for)",
        "log": str(server.log),
        **({"keys": str(server.settings.key_file)} if server.makes_keys else {}),
    }
    for name, value in rows.items():
        console.print(f"  {name:<11} {value}", highlight=False, soft_wrap=True)
    model, _, file = (example or "MODEL=FILE").partition("=")
    console.print("\nTry it:")
    key = ' -H "Authorization: Bearer KEY"' if server.makes_keys else ""
    console.print(f"  curl {server.inference}/predictions/{model} -T {file}{key}\n", highlight=False, soft_wrap=True)

