"""The command ``torchserve``: TorchServe's flags, messages and exit codes for a Torchrelay server."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import psutil
import yaml

from serve_app import __version__
from serve_app.cli import container_contract, torchserve_flags
from serve_app.cli.errors import StartError
from serve_app.cli.server_process import ServerProcess
from serve_app.client import Client, ServerError, TransportError

TORCHSERVE = "0.12.0"  # the release whose command line this is
_JAVA = "org.pytorch.serve.ModelServer"
# The first process of a Torchrelay server, while it starts and then.
_MODULES = {"serve_app.deployments.ray_internals.head_node", "serve_app.cli.supervisor"}
_START_TIMEOUT = 300.0  # seconds until requests must be accepted


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command and exit with TorchServe's exit code."""
    args = _parser().parse_args(arguments)
    if args.version:
        print(f"TorchServe Version is {TORCHSERVE} (Torchrelay {__version__})")
        return
    try:
        sys.exit(_stop() if args.stop else _start(args))
    except StartError as error:
        print(error, flush=True)
        sys.exit(1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="torchserve", description="TorchServe's command line, served by Torchrelay"
    )
    action = parser.add_mutually_exclusive_group()
    action.add_argument("-v", "--version", action="store_true", help="show the version")
    action.add_argument("--start", action="store_true", help="start the server; the default")
    action.add_argument("--stop", action="store_true", help="stop the server")
    parser.add_argument(
        "--ts-config",
        metavar="FILE",
        help="a config.properties; the variable TS_CONFIG_FILE takes precedence",
    )
    parser.add_argument("--model-store", metavar="DIR", help="the folder of the archives")
    parser.add_argument("--workflow-store", metavar="DIR", help="the folder of the workflow archives")
    parser.add_argument(
        "--models", nargs="+", metavar="[NAME=]ARCHIVE", help="the models to load at start-up, or all"
    )
    parser.add_argument("--log-config", metavar="FILE", help="accepted and ignored: Log4j's")
    parser.add_argument(
        "--cpp-log-config", metavar="FILE", help="accepted and ignored: there is no C++ backend"
    )
    parser.add_argument("--foreground", action="store_true", help="stay, and show the log")
    parser.add_argument(
        "--no-config-snapshots", "--ncs", action="store_true", help="discard the state of earlier starts"
    )
    parser.add_argument(
        "--plugins-path", "--ppath", metavar="DIR", help="accepted and ignored: Java archives"
    )
    parser.add_argument("--disable-token-auth", "--dt", action="store_true", help="require no token")
    parser.add_argument(
        "--enable-model-api", action="store_true", help="allow models to be registered and removed"
    )
    # The image's argument `serve`.
    parser.add_argument("--container", action="store_true", help=argparse.SUPPRESS)
    return parser


def _start(args: argparse.Namespace) -> int:
    if _running(_pid_file()) is not None:
        raise StartError("TorchServe is already running, please use torchserve --stop to stop TorchServe.")
    given = {
        key: value
        for key, value in vars(args).items()
        if key not in ("version", "start", "stop", "foreground")
    }
    flags = torchserve_flags.TorchServeFlags(**{**given, "models": tuple(args.models or ())})
    if flags.container:
        flags, environment, folder = container_contract.read_start(os.environ)
        os.environ.update(environment)
        os.chdir(folder)
    server = create_server(flags)
    server.interrupt_on_signals()
    try:
        server.start(detached=not args.foreground)
        _pid_file().write_text(f"{server.pid}\n{server.config}\n")
        _wait_until_accepting(server)
        print("Model server started.", flush=True)
    except KeyboardInterrupt:
        server.stop()
        return 130
    if not args.foreground:
        return 0
    server.show_log()
    return max(0, server.wait())  # a signal is `torchserve --stop`, from elsewhere


def create_server(flags: torchserve_flags.TorchServeFlags, env: Path | None = None) -> ServerProcess:
    """Return the server of these flags, not yet started; its app.yaml is written to its state directory.

    ``env`` is Ray Serve's environment file, by default the installed one. Warnings are written to stderr.
    Raises StartError.
    """
    folder = Path.cwd()
    translated = torchserve_flags.translate(flags, os.environ, folder)
    for warning in translated.warnings:
        print(f"WARNING - {warning}", file=sys.stderr)
    config = torchserve_flags.state_dir(os.environ, folder, flags.no_config_snapshots) / "app.yaml"
    try:
        config.parent.mkdir(parents=True, exist_ok=True)
        config.write_text(yaml.safe_dump(dict(translated.document), sort_keys=False))
    except OSError as error:
        raise StartError(
            f"{error.filename}: {error.strerror}; name a folder for it with LOG_LOCATION"
        ) from None
    server = ServerProcess(
        config, env or torchserve_flags.default_config("serve.env"), translated.setting_names
    )
    if flags.no_config_snapshots and not server.processes():
        for path in config.parent.iterdir():
            if path != config:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    return server


def _stop() -> int:
    pid_file = _pid_file()
    pid = _running(pid_file)
    if pid is None:
        print("TorchServe is not currently running.")
        return 0
    try:
        config = Path(pid_file.read_text().splitlines()[1])
    except IndexError:  # TorchServe's own
        config = None
    key_file = Path("key_file.json")
    try:
        if config is None:
            process = psutil.Process(pid)
            process.terminate()
            process.wait(timeout=60)
        else:
            server = ServerProcess(config, torchserve_flags.default_config("serve.env"))
            key_file = server.settings.root / server.settings.auth.key_file
            server.stop()
        key_file.unlink(missing_ok=True)
        print("TorchServe has stopped.")
    except psutil.TimeoutExpired:
        print("Stopping TorchServe took too long.")
    except (OSError, psutil.Error):
        print("TorchServe already stopped.")
    pid_file.unlink(missing_ok=True)
    return 0


def _pid_file() -> Path:
    folder = Path(os.environ.get("TEMP") or tempfile.gettempdir())
    if not folder.is_dir():
        raise StartError(f"Invalid temp directory: {folder}, please check TEMP environment variable.")
    return folder / ".model_server.pid"


def _running(pid_file: Path) -> int | None:
    """Return the process id in the file, if it is a Torchrelay or TorchServe server; else remove the file."""
    try:
        pid = int(pid_file.read_text().split()[0])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, IndexError):
        pid = 0
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        arguments = process.cmdline() if process.status() != psutil.STATUS_ZOMBIE else []
        is_serve_run = "run" in arguments and any(Path(argument).name == "serve" for argument in arguments)
        if _JAVA in arguments or _MODULES.intersection(arguments) or is_serve_run:
            return pid
    print("Removing orphan pid file.")
    pid_file.unlink(missing_ok=True)
    return None


def _wait_until_accepting(server: ServerProcess) -> None:
    """Wait until both APIs respond. Raises StartError."""
    with server.client(timeout=2) as client:
        for _ in server.poll(_START_TIMEOUT, "No request was accepted"):
            if _serves_management(client) and client.live():
                return


def _serves_management(client: Client) -> bool:
    try:
        client.models()
    except TransportError:
        return False
    except ServerError:  # such as a missing key
        pass
    return True


if __name__ == "__main__":
    main()
