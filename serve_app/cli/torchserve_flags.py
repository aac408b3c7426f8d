"""TorchServe's command line and config.properties as an app.yaml of ours."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from serve_app import properties
from serve_app.cli import kserve, sagemaker
from serve_app.cli.process import StartError
from serve_app.errors import ConfigurationError

_FILE = "config.properties"


@dataclass(frozen=True)
class Flags:
    """What TorchServe's command line can say of a server; None and empty where it does not."""

    ts_config: str | None = None
    model_store: str | None = None
    models: tuple[str, ...] = ()
    workflow_store: str | None = None
    log_config: str | None = None
    cpp_log_config: str | None = None
    plugins_path: str | None = None
    no_config_snapshots: bool = False
    disable_token_auth: bool = False
    enable_model_api: bool = False


class MissingModelStore(StartError):
    """Neither the command nor the file names a model store."""


@dataclass(frozen=True)
class Translation:
    """A server as TorchServe's user asked for it: the document for `serve run`, and what there is to say."""

    document: Mapping[str, Any]
    source: Path | None  # the file that it was read from
    reading: properties.Reading
    warnings: tuple[str, ...]

    @property
    def names(self) -> dict[str, str]:
        """Where the operator changes a port: in TorchServe's words."""
        where = self.source or _FILE
        return {
            "http_options.port": f"inference_address in {where}",
            "management.port": f"management_address in {where}",
            "management.metrics_port": f"metrics_address in {where}",
            "grpc.port": f"grpc_inference_port in {where}",
            "grpc.management_port": f"grpc_management_port in {where}",
        }


def logs(environment: Mapping[str, str], folder: Path) -> Path:
    return folder / (environment.get("LOG_LOCATION") or "logs")


def state_dir(environment: Mapping[str, str], folder: Path, fresh: bool = False) -> Path:
    """Where such a server's registry lives: beside TorchServe's snapshots, whose place it takes."""
    return logs(environment, folder) / "config" / ("torchrelay-ncs" if fresh else "torchrelay")


def find(flags: Flags, environment: Mapping[str, str], folder: Path) -> Path | None:
    """The configuration file, where TorchServe looks and in its order. Raises StartError."""
    named = environment.get("TS_CONFIG_FILE") or flags.ts_config
    if named:
        if not (folder / named).is_file():
            raise StartError(f"--ts-config file not found: {named}")
        return folder / named
    if not flags.no_config_snapshots:
        snapshots = (logs(environment, folder) / "config").glob("*.cfg")
        if last := max(snapshots, key=lambda path: path.stat().st_mtime, default=None):
            return last
    return folder / _FILE if (folder / _FILE).is_file() else None


def translate(flags: Flags, environment: Mapping[str, str], folder: Path) -> Translation:
    """The server that these flags ask for, in this environment and working directory. Raises StartError."""
    source = find(flags, environment, folder)
    command = {}
    if flags.model_store:
        command["model_store"] = (flags.model_store, "--model-store")
    if flags.models:
        command["load_models"] = (",".join(flags.models), "--models")
    if flags.workflow_store:
        command["workflow_store"] = (flags.workflow_store, "--workflow-store")
    if flags.plugins_path:
        command["plugins_path"] = (flags.plugins_path, "--plugins-path")
    if flags.cpp_log_config:
        command["cpp_log_config"] = (flags.cpp_log_config, "--cpp-log-config")
    if flags.disable_token_auth:
        command["disable_token_authorization"] = ("true", "--disable-token-auth")
    if flags.enable_model_api:
        command["enable_model_api"] = ("true", "--enable-model-api")
    try:
        text = properties.decode(source.read_bytes()) if source is not None else ""
        where = str(source) if source is not None else "TorchServe's settings"
        for platform in (kserve, sagemaker):
            command = {**platform.overrides(environment, text, where), **command}
        reading = properties.read(text, where, kserve.variables(environment), command, gpus(environment))
        settings = reading.settings
    except OSError as error:
        raise StartError(f"{source}: {error.strerror}") from None
    except ConfigurationError as error:
        raise StartError(str(error)) from None
    if all(note.key != "model_store" for note in reading.notes):
        raise MissingModelStore("Missing mandatory parameter --model-store")
    for option, path in (("model-store", settings.store.model_store), ("workflow-store", flags.workflow_store)):
        if path and not (folder / path).is_dir():
            raise StartError(f"--{option} directory not found: {path}")
    warnings = list(reading.warnings)
    for option, path in (("log-config", flags.log_config), ("cpp-log-config", flags.cpp_log_config)):
        if path and not (folder / path).is_file():
            raise StartError(f"--{option} file not found: {os.path.realpath(folder / path)}")
    if flags.log_config:
        warnings.append(
            f"--log-config {flags.log_config}: Log4j's files are not read; telemetry.log_level and .log_format of an "
            "app.yaml say how much is written and how"
        )
    state = state_dir(environment, folder, flags.no_config_snapshots)
    document = app_document(reading, folder, {"home": str(folder), "control": {"state_dir": str(state)}})
    return Translation(document, source, reading, tuple(warnings))


def app_document(reading: properties.Reading, folder: Path, more: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The configuration of `serve run` that says what ``reading`` says, with ``more`` among its args.

    Certificates are found from ``folder``.
    """
    http: dict[str, Any] = {"host": reading.inference.host, "port": reading.inference.port, "keep_alive_timeout_s": 75}
    if reading.certificate_file:
        http["ssl_certfile"] = str(folder / reading.certificate_file)
        http["ssl_keyfile"] = str(folder / reading.private_key_file)
    args: dict[str, Any] = {room: dict(values) for room, values in reading.args.items()}
    for name, value in (more or {}).items():
        args[name] = {**args.get(name, {}), **value} if isinstance(value, dict) else value
    return {
        "proxy_location": "EveryNode",
        "http_options": http,
        "logging_config": {"enable_access_log": False},
        "applications": [
            {"name": "torchrelay", "route_prefix": "/", "import_path": "serve_app.main:build", "args": args}
        ],
    }


def app_yaml(reading: properties.Reading, source: str, folder: Path) -> str:
    """The app.yaml that takes the place of a config.properties, each value with the key that it comes from."""
    keys = {key.becomes.strip("`"): key for key in properties.KEYS if key.fate == "setting"}
    said = {note.key for note in reading.notes}

    def comment(room: str, name: str) -> str:
        key = keys.get(f"{room}.{name}")
        if key is None:
            return ""
        whose = key.name if key.name in said else f"{key.name}, TorchServe's default"
        return f"   # {whose}"

    document = app_document(reading, folder)
    http = document["http_options"]
    lines = [
        f"# What {source} says, for `torchrelay start`. Values that are not here have Torchrelay's defaults:",
        "# every key is in configs/README.md.",
        "",
        "proxy_location: EveryNode",
        "",
        "http_options:",
        *(f"  {name}: {json.dumps(value)}" for name, value in http.items()),
        "",
        "logging_config:",
        "  enable_access_log: false   # the doors write the access log themselves",
        "",
        "applications:",
        "  - name: torchrelay",
        "    route_prefix: /",
        "    import_path: serve_app.main:build",
        "    args:",
    ]
    for room, values in document["applications"][0]["args"].items():
        lines.append(f"      {room}:")
        for name, value in values.items():
            if isinstance(value, dict):
                block = yaml.safe_dump({name: value}, sort_keys=False, default_flow_style=False)
                lines += [f"        {line}" for line in block.splitlines()]
            else:
                lines.append(f"        {name}: {json.dumps(value)}{comment(room, name)}")
    return "\n".join(lines) + "\n"


def gpus(environment: Mapping[str, str]) -> int:
    """The NVIDIA GPUs that this machine has, and that this process may see."""
    there = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return there
    return min(there, len([name for name in visible.split(",") if name.strip() not in ("", "-1")]))


def serve_env() -> Path:
    """The environment file that is installed with this package, or lies in the checkout that it runs from."""
    checkout = Path(__file__).parents[2] / "configs/serve.env"
    return checkout if checkout.is_file() else Path(__file__).with_name("serve.env")
