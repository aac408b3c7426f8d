"""What the command line offers; each command is a few lines over the client or the process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Optional

import httpx
import typer
from rich.console import Console
from rich.table import Table

from serve_app import __version__
from serve_app.bench.command import bench
from serve_app.cli import progress
from serve_app.cli.process import ServerProcess, StartError
from serve_app.client import Client, ServerError

app = typer.Typer(help="Serve PyTorch models from TorchServe archives on Ray Serve.", no_args_is_help=True)
models_app = typer.Typer(help="List, register, scale and remove models.", invoke_without_command=True)
app.add_typer(models_app, name="models")

console = Console()
errors = Console(stderr=True)

Config = Annotated[Path, typer.Argument(help="The application, as for `serve run`.")]
EnvFile = Annotated[Path, typer.Option("--env", help="The environment that Ray Serve starts with.")]
Inference = Annotated[str, typer.Option(envvar="TORCHRELAY_INFERENCE", help="The inference address.")]
ManagementUrl = Annotated[str, typer.Option(envvar="TORCHRELAY_MANAGEMENT", help="The management address.")]

_CONFIG = Path("configs/app.yaml")
_ENV = Path("configs/serve.env")
_INFERENCE = "http://127.0.0.1:8080"
_MANAGEMENT = "http://127.0.0.1:8081"


@app.command()
def start(
    config: Config = _CONFIG,
    env: EnvFile = _ENV,
    detach: Annotated[bool, typer.Option("--detach", help="Return once ready, and leave the server running.")] = False,
    example: Annotated[
        Optional[str], typer.Option(help="MODEL=FILE: show a curl line that sends FILE to MODEL.")  # noqa: UP045
    ] = None,
    patience: Annotated[float, typer.Option(help="Seconds until the server must be ready.")] = 300.0,
) -> None:
    """Start the server and wait until its models are ready; Ctrl-C ends it and everything it started."""
    try:
        server = ServerProcess(config, env)
        server.start(detached=detach)
        progress.until_ready(server, console, patience)
    except StartError as error:
        errors.print(f"[red]Torchrelay did not start.[/red] {error}", highlight=False)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        console.print("Stopping …")
        server.stop()
        raise typer.Exit(130) from None
    progress.welcome(server, console, example)
    if detach:
        return
    code = server.wait()
    if code:
        errors.print(f"[red]The server ended with code {code}.[/red] Its log: {server.log}", highlight=False)
    else:
        console.print("Torchrelay has stopped.")
    raise typer.Exit(code)


@app.command()
def stop(config: Config = _CONFIG, env: EnvFile = _ENV) -> None:
    """Stop the server that `torchrelay start` left running here."""
    try:
        stopped = ServerProcess(config, env).stop()
    except StartError as error:
        errors.print(str(error), style="red", highlight=False)
        raise typer.Exit(1) from None
    console.print("Torchrelay has stopped." if stopped else "Torchrelay is not running here.")


@app.command()
def status(inference: Inference = _INFERENCE, management: ManagementUrl = _MANAGEMENT) -> None:
    """Show whether the server is ready, and every version with its replicas."""
    with Client(inference, management, timeout=10) as client:
        try:
            ready = client.ready()
            table = progress.versions(client)
        except httpx.HTTPError as error:
            errors.print(f"No server answers at {management}: {error}", highlight=False)
            raise typer.Exit(1) from None
    console.print("ready" if ready else "not ready yet", style="green" if ready else "yellow")
    console.print(table)
    if not ready:
        raise typer.Exit(2)


app.command("bench")(bench)


@app.command()
def version() -> None:
    """Show the version."""
    console.print(f"Torchrelay {__version__}")


@models_app.callback()
def models(context: typer.Context, management: ManagementUrl = _MANAGEMENT) -> None:
    """List the models; the subcommands change them."""
    context.obj = management
    if context.invoked_subcommand is None:
        with _talk(context) as client:
            table = Table("model", "archive of the default version")
            for model in client.models():
                table.add_row(model["modelName"], model["modelUrl"])
        console.print(table)


@models_app.command()
def register(
    context: typer.Context,
    url: Annotated[str, typer.Argument(help="A name in the model store, or a file:// or http(s):// address.")],
    workers: Annotated[int, typer.Option(help="Replicas to start with.")] = 1,
    model_name: Annotated[Optional[str], typer.Option("--name")] = None,  # noqa: UP045
    batch_size: Annotated[Optional[int], typer.Option()] = None,  # noqa: UP045
    max_batch_delay: Annotated[Optional[int], typer.Option(help="Milliseconds.")] = None,  # noqa: UP045
    handler: Annotated[Optional[str], typer.Option()] = None,  # noqa: UP045
) -> None:
    """Register an archive and wait for its replicas."""
    with _talk(context) as client, console.status(f"Registering {url} …"):
        answer = client.register(
            url,
            initial_workers=workers,
            model_name=model_name,
            batch_size=batch_size,
            max_batch_delay=max_batch_delay,
            handler=handler,
            synchronous=True,
        )
    console.print(answer, highlight=False)


@models_app.command()
def scale(
    context: typer.Context,
    model: str,
    workers: int,
    version: Annotated[Optional[str], typer.Option()] = None,  # noqa: UP045
) -> None:
    """Give a version that many replicas, and wait for them."""
    with _talk(context) as client, console.status(f"Scaling {model} …"):
        answer = client.scale(model, version, min_worker=workers, max_worker=workers, synchronous=True)
    console.print(answer, highlight=False)


@models_app.command("default")
def set_default(context: typer.Context, model: str, version: str) -> None:
    """Make a version the one that calls get which name none."""
    with _talk(context) as client:
        console.print(client.set_default(model, version), highlight=False)


@models_app.command()
def remove(
    context: typer.Context,
    model: str,
    version: Annotated[Optional[str], typer.Option()] = None,  # noqa: UP045
) -> None:
    """Unregister a version, or the model's last one."""
    with _talk(context) as client:
        console.print(client.unregister(model, version), highlight=False)


@models_app.command()
def describe(context: typer.Context, model: str) -> None:
    """Show every version of a model, as the management API has it."""
    with _talk(context) as client:
        console.print_json(data=client.describe(model))


class _talk(Client):
    """A client whose errors end the command in the server's words."""

    def __init__(self, context: typer.Context) -> None:
        super().__init__(os.environ.get("TORCHRELAY_INFERENCE", _INFERENCE), context.obj)
        self._address = context.obj

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        super().__exit__(kind, error, trace)
        if isinstance(error, ServerError):
            errors.print(str(error), style="red", highlight=False)
            raise typer.Exit(1) from None
        if isinstance(error, httpx.TransportError):
            errors.print(f"No server answers at {self._address}: {error}", highlight=False)
            raise typer.Exit(1) from None
