"""What the command line offers; each command is a few lines over the client or the process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Optional

import httpx
import typer
from rich.markup import escape
from rich.table import Table
from typer.core import TyperCommand

from serve_app import __version__
from serve_app.bench.command import bench
from serve_app.cli import progress, torchserve
from serve_app.cli.archive import archive
from serve_app.cli.experiment import experiment_app
from serve_app.cli.migrate import migrate
from serve_app.cli.optimize import optimize
from serve_app.cli.process import ServerProcess, StartError
from serve_app.cli.rollout import rollout_app
from serve_app.cli.shadow import shadow
from serve_app.cli.talk import (
    INFERENCE,
    MANAGEMENT,
    Inference,
    ManagementUrl,
    Talk,
    Token,
    console,
    errors,
    key_file,
    refused,
)
from serve_app.cli.traffic import traffic
from serve_app.cli.translation import Flags, serve_env, state_dir
from serve_app.cli.workflow import workflow_app
from serve_app.client import NEVER, Client, ServerError

app = typer.Typer(help="Serve PyTorch models from TorchServe archives on Ray Serve.", no_args_is_help=True)
models_app = typer.Typer(help="List, register, scale and remove models.", invoke_without_command=True)
app.add_typer(models_app, name="models")
app.add_typer(experiment_app, name="experiment")
app.add_typer(rollout_app, name="rollout")
app.add_typer(workflow_app, name="workflow")

EnvFile = Annotated[Path, typer.Option("--env", help="The environment that Ray Serve starts with.")]
_CONFIG = Path("configs/app.yaml")
_ENV = Path("configs/serve.env")


class _WithModels(TyperCommand):
    """A command whose ``--models`` takes all the words that follow it, as TorchServe's does."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:
        if "--models" in args:
            first = args.index("--models") + 1
            end = next((i for i in range(first, len(args)) if args[i].startswith("-")), len(args))
            args = [*args[:first], *([",".join(args[first:end])] if end > first else []), *args[end:]]
        return super().parse_args(ctx, args)


_THEIRS = "As the command torchserve"  # the panel of its flags


def _their(*names: str, **more: Any) -> Any:
    return typer.Option(*names, rich_help_panel=_THEIRS, **more)


@app.command(cls=_WithModels)
def start(
    config: Annotated[Optional[Path], typer.Argument(help="The application, as for `serve run`.")] = None,  # noqa: UP045
    env: Annotated[Optional[Path], typer.Option("--env", help="What Ray Serve starts with.")] = None,  # noqa: UP045
    detach: Annotated[bool, typer.Option("--detach", help="Return once ready, and leave the server running.")] = False,
    example: Annotated[
        Optional[str], typer.Option(help="MODEL=FILE: show a curl line that sends FILE to MODEL.")  # noqa: UP045
    ] = None,
    patience: Annotated[float, typer.Option(help="Seconds until the server must be ready.")] = 300.0,
    model_store: Annotated[Optional[str], _their(help="The folder of the archives.")] = None,  # noqa: UP045
    models: Annotated[Optional[str], _their(help="[NAME=]ARCHIVE …, or all: loaded at start-up.")] = None,  # noqa: UP045
    ts_config: Annotated[Optional[str], _their(help="A config.properties.")] = None,  # noqa: UP045
    no_config_snapshots: Annotated[
        bool, _their("--no-config-snapshots", "--ncs", help="Forget what the last start had.")
    ] = False,
    disable_token_auth: Annotated[
        bool, _their("--disable-token-auth", "--dt", help="Ask nobody for a token.")
    ] = False,
    enable_model_api: Annotated[bool, _their("--enable-model-api", help="Let models be registered.")] = False,
    workflow_store: Annotated[Optional[str], _their(help="The folder of the workflow archives.")] = None,  # noqa: UP045
    log_config: Annotated[Optional[str], _their(help="Taken, and not read.")] = None,  # noqa: UP045
    foreground: Annotated[bool, _their("--foreground", help="Always, without --detach.")] = False,
) -> None:
    """Start the server and wait until its models are ready; Ctrl-C ends it and everything it started.

    Without CONFIG it is configs/app.yaml. TorchServe's flags, or a config.properties where there is no
    configs/app.yaml, start a server as TorchServe's user asks for it.
    """
    flags = Flags(
        ts_config=ts_config,
        model_store=model_store,
        models=tuple(models.split(",")) if models else (),
        workflow_store=workflow_store,
        log_config=log_config,
        no_config_snapshots=no_config_snapshots,
        disable_token_auth=disable_token_auth,
        enable_model_api=enable_model_api,
    )
    try:
        server = _server(config, env, flags)
        server.start(detached=detach)
        progress.until_ready(server, console, patience)
    except StartError as error:
        errors.print("[red]Torchrelay did not start.[/red]", escape(str(error)), highlight=False)
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


def _server(config: Path | None, env: Path | None, flags: Flags) -> ServerProcess:
    """The server that `torchrelay start` is asked for. Raises StartError."""
    theirs = flags != Flags()
    if config is not None and theirs:
        raise StartError(f"{config} and TorchServe's flags say two things; name one of them")
    if config is None and not theirs and not _CONFIG.is_file():
        theirs = bool(os.environ.get("TS_CONFIG_FILE")) or Path("config.properties").is_file()
    if theirs:
        return torchserve.prepared(flags, env)
    return ServerProcess(config or _CONFIG, env or (_ENV if _ENV.is_file() else serve_env()))


@app.command()
def stop(
    config: Annotated[Optional[Path], typer.Argument(help="The application that was started.")] = None,  # noqa: UP045
    env: EnvFile = _ENV,
) -> None:
    """Stop the server that `torchrelay start` left running here."""
    if config is None:
        made = [state_dir(os.environ, Path.cwd(), fresh) / "app.yaml" for fresh in (False, True)]
        configs = [path for path in (_CONFIG, *made) if path.is_file()] or [_CONFIG]
    else:
        configs = [config]
    try:
        stopped = [ServerProcess(path, env).stop() for path in configs]
    except StartError as error:
        errors.print(escape(str(error)), style="red", highlight=False)
        raise typer.Exit(1) from None
    console.print("Torchrelay has stopped." if any(stopped) else "Torchrelay is not running here.")


@app.command()
def status(inference: Inference = INFERENCE, management: ManagementUrl = MANAGEMENT, token: Token = "") -> None:
    """Show whether the server is ready, and every version with its replicas."""
    keys = key_file(management)
    with Client(inference, management, timeout=10, token=token, key_file=keys, retries=NEVER) as client:
        try:
            ready = client.ready()
            table = progress.versions(client)
        except ServerError as error:
            refused(error)
        except httpx.HTTPError as error:
            errors.print(f"No server answers at {management}: {escape(str(error))}", highlight=False)
            raise typer.Exit(1) from None
    console.print("ready" if ready else "not ready yet", style="green" if ready else "yellow")
    console.print(table)
    if not ready:
        raise typer.Exit(2)


app.command("bench")(bench)
app.command("migrate")(migrate)
app.command("archive")(archive)
app.command("optimize")(optimize)
app.command("traffic")(traffic)
app.command("shadow")(shadow)


@app.command()
def version() -> None:
    """Show the version."""
    console.print(f"Torchrelay {__version__}")


@models_app.callback()
def models(context: typer.Context, management: ManagementUrl = MANAGEMENT, token: Token = "") -> None:
    """List the models; the subcommands change them."""
    context.obj = management, token
    if context.invoked_subcommand is None:
        with Talk(*context.obj) as client:
            table = Table("model", "archive of the default version")
            for model in client.models():
                table.add_row(model["modelName"], model["modelUrl"])
        console.print(table)


@models_app.command()
def register(
    context: typer.Context,
    url: Annotated[str, typer.Argument(help="A name in the model store, or a URL: file, http(s), s3, gs, hf.")],
    workers: Annotated[int, typer.Option(help="Replicas to start with.")] = 1,
    model_name: Annotated[Optional[str], typer.Option("--name")] = None,  # noqa: UP045
    batch_size: Annotated[Optional[int], typer.Option()] = None,  # noqa: UP045
    max_batch_delay: Annotated[Optional[int], typer.Option(help="Milliseconds.")] = None,  # noqa: UP045
    handler: Annotated[Optional[str], typer.Option()] = None,  # noqa: UP045
    task: Annotated[Optional[str], typer.Option(help="Of a Hugging Face folder: text-classification ...")] = None,  # noqa: UP045
) -> None:
    """Register an archive, or a model's folder, and wait for its replicas."""
    with Talk(*context.obj) as client:
        answer = progress.registered(
            client,
            console,
            url,
            initial_workers=workers,
            model_name=model_name,
            batch_size=batch_size,
            max_batch_delay=max_batch_delay,
            handler=handler,
            task=task,
            synchronous=True,
        )
    console.print(answer, highlight=False)


@models_app.command()
def scale(
    context: typer.Context,
    model: str,
    workers: int,
    version: Annotated[Optional[str], typer.Option()] = None,  # noqa: UP045
    most: Annotated[Optional[int], typer.Option("--max", help="From WORKERS to so many, as the load is.")] = None,  # noqa: UP045
    autoscaling_policy: Annotated[Optional[str], typer.Option("--policy", help="requests or latency.")] = None,  # noqa: UP045
    target_ongoing_requests: Annotated[Optional[float], typer.Option(help="Rows to do, a replica.")] = None,  # noqa: UP045
    target_p95_ms: Annotated[Optional[float], typer.Option(help="Of the policy latency.")] = None,  # noqa: UP045
    upscale_delay_s: Annotated[Optional[float], typer.Option()] = None,  # noqa: UP045
    downscale_delay_s: Annotated[Optional[float], typer.Option()] = None,  # noqa: UP045
    downscale_to_zero_delay_s: Annotated[Optional[float], typer.Option()] = None,  # noqa: UP045
) -> None:
    """Give a version that many replicas, or with --max that many and more as its load is, and wait for them."""
    with Talk(*context.obj) as client, console.status(f"Scaling {model} …"):
        answer = client.scale(
            model,
            version,
            min_worker=workers,
            max_worker=workers if most is None else most,
            autoscaling_policy=autoscaling_policy,
            target_ongoing_requests=target_ongoing_requests,
            target_p95_ms=target_p95_ms,
            upscale_delay_s=upscale_delay_s,
            downscale_delay_s=downscale_delay_s,
            downscale_to_zero_delay_s=downscale_to_zero_delay_s,
            synchronous=True,
        )
    console.print(answer, highlight=False)


@models_app.command("default")
def set_default(context: typer.Context, model: str, version: str) -> None:
    """Make a version the one that calls get which name none."""
    with Talk(*context.obj) as client:
        console.print(client.set_default(model, version), highlight=False)


@models_app.command()
def remove(
    context: typer.Context,
    model: str,
    version: Annotated[Optional[str], typer.Option()] = None,  # noqa: UP045
) -> None:
    """Unregister a version, or the model's last one."""
    with Talk(*context.obj) as client:
        console.print(client.unregister(model, version), highlight=False)


@models_app.command()
def describe(context: typer.Context, model: str) -> None:
    """Show every version of a model, as the management API has it."""
    with Talk(*context.obj) as client:
        console.print_json(data=client.describe(model))
