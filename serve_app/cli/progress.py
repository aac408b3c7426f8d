"""The terminal output while the server starts and models load, and once it is ready."""

from __future__ import annotations

import contextlib
import re
import threading
import time
import uuid
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from serve_app.client import Client, ServerError, TransportError
from serve_app.domain.resources import format_amount

if TYPE_CHECKING:
    from serve_app.cli.server_process import ServerProcess

_LAST_EVENTS_TIMEOUT_S = 1.0  # for the events that were sent before the response
_DASHBOARD = "http://127.0.0.1:8265  (`ray get-auth-token` shows the token that it requires)"


def version_table(client: Client) -> Table:
    """Return a table of every version of every model, with its replicas."""
    table = Table("model", "version", "replicas", "state", "archive")
    models = client.models()
    for model in models:
        for version in client.describe(model["modelName"]):
            running = sum(worker["status"] == "READY" for worker in version["workers"])
            min_workers, max_workers = version["minWorkers"], version["maxWorkers"]
            state = describe_state(version)
            count = f"{running} of {min_workers}" + (
                f" to {max_workers}" if max_workers > min_workers else ""
            )
            table.add_row(model["modelName"], version["modelVersion"], count, state, version["modelUrl"])
            if problem := find_problem(version):
                table.add_row("", "", "", Text(problem, style="red"), "")
    for event in list_failed_loads(client, {model["modelName"] for model in models}):
        details = event["details"]
        when = time.strftime("%H:%M:%S", time.localtime(event["time"]))
        state = f"[red]not loaded {when}"
        table.add_row(event["model"], event["version"], "", state, details.get("url", ""))
        table.add_row("", "", "", Text(details["message"], style="red"), "")
    return table


def list_failed_loads(client: Client, registered: Collection[str]) -> list[dict[str, Any]]:
    """Return the last event of each model whose registration has failed and that does not exist.

    The server keeps events for an hour, and shows those of the models that the key may see.
    """
    try:
        events = client.all_events(stage="failed", limit=1000)
    except ServerError:  # the key has no such right
        return []
    failed: dict[str, dict[str, Any]] = {}
    for event in events:
        if event["model"] not in registered and event["details"].get("reason") != "removed":
            failed.setdefault(event["model"], event)
    return sorted(failed.values(), key=lambda event: str(event["model"]))


def find_problem(version: dict[str, Any]) -> str:
    """Return why a described version has fewer workers than it should have; empty where it has them."""
    running = sum(worker["status"] == "READY" for worker in version["workers"])
    if running >= max(version["minWorkers"], 1):
        return ""
    lines: list[str] = version.get("lastError", "").strip().splitlines()
    return version.get("waitingFor") or (lines[-1] if lines else "")


def describe_state(version: dict[str, Any]) -> str:
    """Return the state of a described version, with rich's markup."""
    running = sum(worker["status"] == "READY" for worker in version["workers"])
    min_workers = version["minWorkers"]
    if min_workers == version["maxWorkers"] == 0 and not version.get("pool"):
        return "no workers"
    if version.get("waitingFor") and running < min_workers:
        return "[yellow]waiting"
    if version.get("lastError") and not running:
        return "[red]failed"
    if not min_workers and not running:
        return "[green]idle"
    return "[green]ready" if running >= min_workers else "[yellow]loading"


def wait_until_ready(
    server: ServerProcess, console: Console, timeout: float, show_models: bool = True
) -> None:
    """Show how the models load, until all of them are ready or have failed. Raises StartError.

    ``show_models``: print the table of the models at the end.
    """
    spinner = Spinner("dots", "Starting Ray …")
    with (
        server.client(timeout=2) as client,
        Live(spinner, console=console, transient=True, refresh_per_second=8) as live,
    ):
        reported = ""
        for _ in server.poll(timeout, "It was not ready"):
            if client.ready():
                break
            if (failure := server.find_start_failure()) and failure != reported:
                reported = failure
                console.print(
                    f"{failure}\nRay Serve tries again.", style="red", markup=False, highlight=False
                )
            try:
                spinner.update(text="Loading models …")
                live.update(Group(spinner, version_table(client)))
            except (TransportError, ServerError):
                spinner.update(text="Starting Ray …")
                live.update(spinner)
        try:
            if show_models:
                console.print(version_table(client))
        except ServerError as error:  # it requires a key that is not known here
            console.print(f"Its models are not shown here: {error}", highlight=False)


def register(client: Client, console: Console, url: str, **parameters: Any) -> str:
    """Register an archive and show its progress; return the server's message.

    Raises the client's errors.
    """
    registration_id = uuid.uuid4().hex
    path = re.split("[?#]", url)[0].rstrip("/").rpartition("/")[2]
    name = parameters.get("model_name") or re.sub(r"\.(mar|zip|tar\.gz|tgz)$", "", path, flags=re.IGNORECASE)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(20),
        TaskProgressColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bars:
        bar = bars.add_task(f"Registering {url}", total=None)

        def show_events() -> None:
            # The response to the registration itself reports any error, so these can be ignored.
            with contextlib.suppress(TransportError, ServerError, RuntimeError):
                for stage, details in client.events(name, registration=registration_id):
                    for warning in details.get("warnings", ()):
                        console.print(f"Warning: {warning}", style="yellow", markup=False, soft_wrap=True)
                    bars.update(bar, description=_describe_stage(stage, details), total=details.get("total"))
                    bars.update(bar, completed=details.get("bytes", 0))

        listener = threading.Thread(target=show_events, daemon=True)
        listener.start()
        message = client.register(url, registration=registration_id, **parameters)
        listener.join(_LAST_EVENTS_TIMEOUT_S)
    return message


def _describe_stage(stage: str, details: dict[str, Any]) -> str:
    """Return a line of text for a stage of a model's events."""
    if stage == "installing":
        return f"Installing: {details.get('line', '')[:60]}"
    if stage == "starting" and "waiting_for" in details:
        shortages = [_describe_shortage(name, value) for name, value in details["waiting_for"].items()]
        waiting = f"Waiting for {', '.join(shortages)}"
        node_type = details.get("node_type")
        return f"{waiting}; the node autoscaler adds a node of type {node_type}" if node_type else waiting
    texts = {"accepted": "Registering", "starting": "Starting workers", "warming": "Warming up"}
    return texts.get(stage, stage.capitalize())


def _describe_shortage(resource: str, shortage: dict[str, Any]) -> str:
    required = f"{format_amount(resource, shortage['wanted'])} {resource}"
    if shortage.get("placement") != "STRICT_PACK":
        return f"{required} ({format_amount(resource, shortage['free'])} free)"
    machines = ", ".join(
        f"{address} {format_amount(resource, free)}" for address, free in shortage["machines"].items()
    )
    return f"{required} on one machine (free: {machines})"


def print_addresses(
    server: ServerProcess, console: Console, example: str | None, dashboard: bool = False
) -> None:
    """Print the addresses of the server, and a command to try."""
    console.print("\n[bold green]Torchrelay is ready.[/bold green]")
    rows = {
        "inference": server.inference,
        "management": server.management,
        **({"console": f"{server.management}/ui"} if server.settings.console.enabled else {}),
        "metrics": server.metrics,
        **(
            {"gRPC": ", ".join(f"{name} {address}" for name, address in server.grpc.items())}
            if server.grpc
            else {}
        ),
        **({"dashboard": _DASHBOARD} if dashboard else {}),
        "log": str(server.log),
        **({"keys": str(server.settings.key_file)} if server.creates_key_file else {}),
    }
    for name, value in rows.items():
        console.print(f"  {name:<11} {value}", highlight=False, soft_wrap=True)
    model, _, file = (example or "MODEL=FILE").partition("=")
    console.print("\nTry it:")
    key = ' -H "Authorization: Bearer KEY"' if server.creates_key_file else ""
    console.print(
        f"  curl {server.inference}/predictions/{model} -T {file}{key}\n", highlight=False, soft_wrap=True
    )
