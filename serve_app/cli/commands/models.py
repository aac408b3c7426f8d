"""`torchrelay models`: list, register, scale and remove models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from serve_app.cli import bulk_registration, progress
from serve_app.cli.api_client import MANAGEMENT, CliClient, ManagementUrl, Token, use_server
from serve_app.cli.store_copy import stored_copy
from serve_app.cli.terminal import console, fail

models_app = typer.Typer(help="List, register, scale and remove models.", invoke_without_command=True)


@models_app.callback()
def models(context: typer.Context, management: ManagementUrl = MANAGEMENT, token: Token = "") -> None:
    """List the models; the subcommands change them."""
    use_server(context, management, token)
    if context.invoked_subcommand is None:
        list_models(context)


@models_app.command("list")
def list_models(context: typer.Context) -> None:
    """List the models, as without a subcommand."""
    with CliClient(*context.obj) as client:
        table = Table("model", "archive of the default version")
        for model in client.models():
            table.add_row(model["modelName"], model["modelUrl"])
    console.print(table)


@models_app.command()
def register(
    context: typer.Context,
    url: Annotated[
        str,
        typer.Argument(
            help="A name in the model store, a path as ./model.mar, or a URL: http(s), s3, gs, az, hf, oci."
        ),
    ],
    workers: Annotated[int, typer.Option(help="Replicas to start with.")] = 1,
    model_name: Annotated[
        str | None, typer.Option("--name", help="The model's name; by default that of the manifest.")
    ] = None,
    batch_size: Annotated[int | None, typer.Option(help="Maximum number of requests in a batch.")] = None,
    max_batch_delay: Annotated[
        int | None, typer.Option(help="Milliseconds that an idle model waits for a fuller batch.")
    ] = None,
    handler: Annotated[
        str | None, typer.Option(help="A built-in handler; by default that of the manifest.")
    ] = None,
    task: Annotated[
        str | None, typer.Option(help="The task of a Hugging Face folder: text-classification ...")
    ] = None,
    sha256: Annotated[str | None, typer.Option(help="The expected digest of the archive.")] = None,
    trusted: Annotated[
        bool, typer.Option("--trusted", help="Weights and a folder's own code may run as they load.")
    ] = False,
    model_store: Annotated[
        Path, typer.Option(help="The server's model store, into which a local path is copied.")
    ] = Path("model_store"),
) -> None:
    """Register an archive, or a model's folder, and wait for its replicas."""
    with CliClient(*context.obj) as client, stored_copy(url, model_store) as stored:
        message = progress.register(
            client,
            console,
            stored,
            initial_workers=workers,
            model_name=model_name,
            batch_size=batch_size,
            max_batch_delay=max_batch_delay,
            handler=handler,
            task=task,
            sha256=sha256,
            trusted=trusted or None,
            synchronous=True,
        )
    console.print(message, highlight=False)


@models_app.command("register-all")
def register_all(
    context: typer.Context,
    sources: Annotated[list[str], typer.Argument(help="Folders of archives, archives, or URLs.")],
    workers: Annotated[int, typer.Option(help="Replicas to start with.")] = 0,
    concurrency: Annotated[int, typer.Option(min=1, help="Registrations at a time.")] = 8,
    trusted: Annotated[
        bool, typer.Option("--trusted", help="Weights and a folder's own code may run as they load.")
    ] = False,
    model_store: Annotated[
        Path, typer.Option(help="The server's model store, into which local paths are copied.")
    ] = Path("model_store"),
) -> None:
    """Register many archives; versions that are registered already are skipped."""
    if not (urls := bulk_registration.find_archives(sources)):
        fail(f"No archive was found in {', '.join(sources)}.")
    parameters = {"initial_workers": workers, "trusted": trusted or None, "synchronous": True}
    with CliClient(*context.obj) as client:
        registration = bulk_registration.BulkRegistration(client, model_store, concurrency, **parameters)
        raise typer.Exit(bulk_registration.show(registration, urls, console))


@models_app.command()
def scale(
    context: typer.Context,
    model: str,
    workers: Annotated[int, typer.Argument(help="The number of replicas, or the minimum with --max.")],
    version: Annotated[str | None, typer.Option(help="By default the default version.")] = None,
    max_workers: Annotated[
        int | None, typer.Option("--max", help="Scale between WORKERS and this number with the load.")
    ] = None,
    autoscaling_policy: Annotated[
        str | None, typer.Option("--policy", help="requests, latency, prometheus or external.")
    ] = None,
    target_ongoing_requests: Annotated[
        float | None, typer.Option(help="Target of pending rows per replica.")
    ] = None,
    target_p95_ms: Annotated[float | None, typer.Option(help="Target of the policy latency.")] = None,
    autoscaling_query: Annotated[
        str | None, typer.Option("--query", help="PromQL of the policy prometheus.")
    ] = None,
    target_value: Annotated[float | None, typer.Option(help="Value of the query per replica.")] = None,
    upscale_delay_s: Annotated[
        float | None, typer.Option(help="Seconds of higher load before replicas start.")
    ] = None,
    downscale_delay_s: Annotated[
        float | None, typer.Option(help="Seconds of lower load before replicas end.")
    ] = None,
    downscale_to_zero_delay_s: Annotated[
        float | None, typer.Option(help="The same for the last replica, with 0 WORKERS.")
    ] = None,
) -> None:
    """Set the number of a version's replicas and wait for them; with --max it scales with the load."""
    with CliClient(*context.obj) as client, console.status(f"Scaling {model} …"):
        message = client.scale(
            model,
            version,
            min_worker=workers,
            max_worker=workers if max_workers is None else max_workers,
            autoscaling_policy=autoscaling_policy,
            target_ongoing_requests=target_ongoing_requests,
            target_p95_ms=target_p95_ms,
            autoscaling_query=autoscaling_query,
            target_value=target_value,
            upscale_delay_s=upscale_delay_s,
            downscale_delay_s=downscale_delay_s,
            downscale_to_zero_delay_s=downscale_to_zero_delay_s,
            synchronous=True,
        )
    console.print(message, highlight=False)


@models_app.command("default")
def set_default(context: typer.Context, model: str, version: str) -> None:
    """Make a version the default one, for requests that name no version."""
    with CliClient(*context.obj) as client:
        console.print(client.set_default(model, version), highlight=False)


@models_app.command()
def remove(
    context: typer.Context,
    model: str,
    version: Annotated[str | None, typer.Option(help="By default the model's only version.")] = None,
) -> None:
    """Unregister a version, or the model's last one."""
    with CliClient(*context.obj) as client:
        console.print(client.unregister(model, version), highlight=False)


@models_app.command()
def describe(context: typer.Context, model: str) -> None:
    """Show the management API's description of every version of a model."""
    with CliClient(*context.obj) as client:
        console.print_json(data=client.describe(model))
