"""The commands of ``torchrelay``, over the client and the server process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from typer.core import TyperCommand

from serve_app import __version__
from serve_app.cli import health as health_check
from serve_app.cli import progress
from serve_app.cli.api_client import INFERENCE, MANAGEMENT, CliClient, Inference, ManagementUrl, Token
from serve_app.cli.commands.adapters import adapters_app
from serve_app.cli.commands.apply import apply
from serve_app.cli.commands.archive import archive
from serve_app.cli.commands.audit import audit
from serve_app.cli.commands.batch import batch
from serve_app.cli.commands.bench import bench
from serve_app.cli.commands.conformance import conformance
from serve_app.cli.commands.console import console as console_command
from serve_app.cli.commands.doctor import doctor
from serve_app.cli.commands.drift import drift
from serve_app.cli.commands.experiment import experiment_app
from serve_app.cli.commands.keys import keys_app
from serve_app.cli.commands.llm_launcher import llm_launcher
from serve_app.cli.commands.migrate import migrate
from serve_app.cli.commands.models import models_app
from serve_app.cli.commands.new import new
from serve_app.cli.commands.optimize import optimize
from serve_app.cli.commands.rollout import rollout_app
from serve_app.cli.commands.serve import serve
from serve_app.cli.commands.shadow import shadow
from serve_app.cli.commands.top import top
from serve_app.cli.commands.traffic import traffic
from serve_app.cli.commands.tune import tune
from serve_app.cli.commands.workflow import workflow_app
from serve_app.cli.errors import StartError, require_server
from serve_app.cli.terminal import console, errors, fail
from serve_app.cli.torchserve_flags import DEV_CONFIG, TorchServeFlags, default_config, state_dir

if TYPE_CHECKING:
    from serve_app.cli.server_process import ServerProcess

app = typer.Typer(help="Serve PyTorch models from TorchServe archives on Ray Serve.", no_args_is_help=True)
app.add_typer(models_app, name="models")
app.add_typer(experiment_app, name="experiment")
app.add_typer(rollout_app, name="rollout")
app.add_typer(workflow_app, name="workflow")
app.add_typer(keys_app, name="keys")
app.add_typer(adapters_app, name="adapters")

EnvFile = Annotated[Path, typer.Option("--env", help="The environment that Ray Serve starts with.")]
_CONFIG = Path("configs/app.yaml")
_ENV = Path("configs/serve.env")


class _ModelCommands(TyperCommand):
    """A command whose ``--models`` takes all following arguments, as TorchServe's does."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--models" in args:
            first = args.index("--models") + 1
            end = next((i for i in range(first, len(args)) if args[i].startswith("-")), len(args))
            args = [*args[:first], *([",".join(args[first:end])] if end > first else []), *args[end:]]
        return super().parse_args(ctx, args)


_TORCHSERVE_PANEL = "As the command torchserve"  # the heading of its flags


def _torchserve_option(*names: str, **options: Any) -> Any:
    return typer.Option(*names, rich_help_panel=_TORCHSERVE_PANEL, **options)


@app.command(cls=_ModelCommands)
def start(
    config: Annotated[Path | None, typer.Argument(help="The application, as for `serve run`.")] = None,
    env: Annotated[
        Path | None, typer.Option("--env", help="The environment that Ray Serve starts with.")
    ] = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="Return once ready, and leave the server running.")
    ] = False,
    example: Annotated[
        str | None, typer.Option(help="MODEL=FILE: show a curl line that sends FILE to MODEL.")
    ] = None,
    dashboard: Annotated[
        bool, typer.Option("--dashboard", help="Start Ray's dashboard, too, which takes 380 MiB.")
    ] = False,
    timeout: Annotated[
        float, typer.Option("--timeout", help="Seconds until the server must be ready.")
    ] = 300.0,
    model_store: Annotated[str | None, _torchserve_option(help="The folder of the archives.")] = None,
    models: Annotated[
        str | None, _torchserve_option(help="[NAME=]ARCHIVE …, or all: models to load at start-up.")
    ] = None,
    ts_config: Annotated[str | None, _torchserve_option(help="A config.properties.")] = None,
    no_config_snapshots: Annotated[
        bool,
        _torchserve_option("--no-config-snapshots", "--ncs", help="Discard the state of earlier starts."),
    ] = False,
    disable_token_auth: Annotated[
        bool, _torchserve_option("--disable-token-auth", "--dt", help="Require no token.")
    ] = False,
    enable_model_api: Annotated[
        bool, _torchserve_option("--enable-model-api", help="Allow models to be registered.")
    ] = False,
    workflow_store: Annotated[
        str | None, _torchserve_option(help="The folder of the workflow archives.")
    ] = None,
    log_config: Annotated[str | None, _torchserve_option(help="Accepted and ignored.")] = None,
    foreground: Annotated[
        bool, _torchserve_option("--foreground", help="Stay in the foreground, and show the log.")
    ] = False,
) -> None:
    """Start the server and wait until its models are ready; Ctrl-C ends it and everything it started.

    CONFIG is configs/app.yaml by default, or the installed app.yaml where there is none. TorchServe's flags,
    or a config.properties where there is no configs/app.yaml, start a server as the command torchserve does.
    """
    flags = TorchServeFlags(
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
        server.interrupt_on_signals()
        server.start(detached=detach, dashboard=dashboard)
        if foreground:
            server.show_log()
        progress.wait_until_ready(server, console, timeout)
        progress.print_addresses(server, console, example, dashboard)
    except StartError as error:
        message = f"[red]Torchrelay did not start.[/red] {escape(str(error))}"
        errors.print(message, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        console.print("Stopping …")
        server.stop()
        raise typer.Exit(130) from None
    if detach:
        return
    code = server.wait()
    if code:
        cause = f" {escape(server.cause)}" if server.cause else ""
        errors.print(
            f"[red]The server ended with code {code}.[/red]{cause} Its log: {server.log}", highlight=False
        )
    else:
        console.print("Torchrelay has stopped.")
    raise typer.Exit(code)


def _server(config: Path | None, env: Path | None, flags: TorchServeFlags) -> ServerProcess:
    """Return the server that the arguments of `torchrelay start` describe. Raises StartError."""
    require_server()
    from serve_app.cli import torchserve  # late: these need the extra `server`
    from serve_app.cli.server_process import ServerProcess

    like_torchserve = flags != TorchServeFlags()
    if config is not None and like_torchserve:
        raise StartError(f"{config} and TorchServe's flags cannot be combined; use one of them")
    if config is None and not like_torchserve and not _CONFIG.is_file():
        like_torchserve = bool(os.environ.get("TS_CONFIG_FILE")) or Path("config.properties").is_file()
    if like_torchserve:
        return torchserve.create_server(flags, env)
    return ServerProcess(
        config or (_CONFIG if _CONFIG.is_file() else default_config(_CONFIG.name)),
        env or (_ENV if _ENV.is_file() else default_config(_ENV.name)),
    )


@app.command()
def stop(
    config: Annotated[Path | None, typer.Argument(help="The application that was started.")] = None,
    env: EnvFile = _ENV,
) -> None:
    """Stop the server that `torchrelay start` left running here."""
    if config is None:
        started = _CONFIG if _CONFIG.is_file() else default_config(_CONFIG.name)
        generated = [state_dir(os.environ, Path.cwd(), fresh) / "app.yaml" for fresh in (False, True)]
        generated.append(Path(DEV_CONFIG))
        configs = [path for path in (started, *generated) if path.is_file()]
    else:
        configs = [config]
    try:
        require_server()
        from serve_app.cli.server_process import ServerProcess  # late: it needs the extra `server`

        stopped = [ServerProcess(path, env).stop() for path in configs]
    except StartError as error:
        fail(str(error))
    console.print("Torchrelay has stopped." if any(stopped) else "Torchrelay is not running here.")


@app.command()
def status(
    inference: Inference = INFERENCE, management: ManagementUrl = MANAGEMENT, token: Token = ""
) -> None:
    """Show whether the server is ready, and every version with its replicas."""
    with CliClient(management, token, inference, timeout=10) as client:
        ready = client.ready()
        table = progress.version_table(client)
    console.print("ready" if ready else "not ready yet", style="green" if ready else "yellow")
    console.print(table)
    if not ready:
        raise typer.Exit(2)


@app.command()
def health(
    address: Annotated[
        str, typer.Argument(help="The inference address; by default of the server that was started here.")
    ] = "",
) -> None:
    """Check that a server is live, as the image's HEALTHCHECK does; the exit code is 1 where it is not.

    Without an address this follows the configuration of the server that runs in the container.
    """
    raise typer.Exit(health_check.run(address))


app.command("serve")(serve)
app.command("new")(new)
app.command("bench")(bench)
app.command("migrate")(migrate)
app.command("archive")(archive)
app.command("llm-launcher", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(
    llm_launcher
)
app.command("optimize")(optimize)
app.command("tune")(tune)
app.command("traffic")(traffic)
app.command("shadow")(shadow)
app.command("drift")(drift)
app.command("audit")(audit)
app.command("console")(console_command)
app.command("doctor")(doctor)
app.command("conformance")(conformance)
app.command("batch")(batch)
app.command("top")(top)
app.command("apply")(apply)


@app.command()
def version() -> None:
    """Show the version."""
    console.print(f"Torchrelay {__version__}")
