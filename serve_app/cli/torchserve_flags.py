"""Translation of TorchServe's command line and config.properties to an app.yaml."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from serve_app import torchserve_config
from serve_app.cli import kserve, platforms
from serve_app.cli.errors import StartError
from serve_app.errors import ConfigurationError

_FILE = "config.properties"
DEV_CONFIG = ".torchrelay/app.yaml"  # of `torchrelay serve`, in the working directory


@dataclass(frozen=True)
class TorchServeFlags:
    """The flags of TorchServe's command line; None and empty where they are not given."""

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
    container: bool = False  # of the image's argument `serve`: the platform has the model


class MissingModelStore(StartError):
    """An error: neither the command nor the file names a model store."""


@dataclass(frozen=True)
class ServerDocument:
    """A server that TorchServe's flags describe: the document for `serve run`, and warnings."""

    document: Mapping[str, Any]
    source: Path | None  # the configuration file
    translated: torchserve_config.TranslatedConfig
    warnings: tuple[str, ...]

    @property
    def setting_names(self) -> dict[str, str]:
        """The keys of TorchServe by which the operator sets the ports."""
        file = self.source or _FILE
        return {
            "http_options.port": f"inference_address in {file}",
            "management.port": f"management_address in {file}",
            "management.metrics_port": f"metrics_address in {file}",
            "grpc.port": f"grpc_inference_port in {file}",
            "grpc.management_port": f"grpc_management_port in {file}",
        }


def log_dir(environment: Mapping[str, str], folder: Path) -> Path:
    return folder / (environment.get("LOG_LOCATION") or "logs")


def state_dir(environment: Mapping[str, str], folder: Path, fresh: bool = False) -> Path:
    """Return the folder of the server's registry: that of TorchServe's snapshots, which it replaces."""
    return log_dir(environment, folder) / "config" / ("torchrelay-ncs" if fresh else "torchrelay")


def find_config(flags: TorchServeFlags, environment: Mapping[str, str], folder: Path) -> Path | None:
    """Return the configuration file, searched in TorchServe's order. Raises StartError."""
    named = environment.get("TS_CONFIG_FILE") or flags.ts_config
    if named:
        if not (folder / named).is_file():
            raise StartError(f"--ts-config file not found: {named}")
        return folder / named
    if not flags.no_config_snapshots:
        snapshots = (log_dir(environment, folder) / "config").glob("*.cfg")
        if last := max(snapshots, key=lambda path: path.stat().st_mtime, default=None):
            return last
    return folder / _FILE if (folder / _FILE).is_file() else None


def translate(flags: TorchServeFlags, environment: Mapping[str, str], folder: Path) -> ServerDocument:
    """Translate these flags, in this environment and working directory. Raises StartError."""
    source = find_config(flags, environment, folder)
    command = _command_keys(flags)
    platform = platforms.recognise(environment, flags.container)
    try:
        text = torchserve_config.decode(source.read_bytes()) if source is not None else ""
        where = str(source) if source is not None else "TorchServe's settings"
        if platform is not None:
            command = {**platform.overrides(environment, text, where), **command}
        translated = torchserve_config.read(
            text, where, kserve.without_empty_variables(environment), command, count_gpus(environment)
        )
        settings = translated.settings
    except OSError as error:
        raise StartError(f"{source}: {error.strerror}") from None
    except ConfigurationError as error:
        raise StartError(str(error)) from None
    if all(note.key != "model_store" for note in translated.notes):
        raise MissingModelStore("Missing mandatory parameter --model-store")
    _check_paths(flags, settings.store.model_store, folder)
    warnings = list(translated.warnings)
    if flags.log_config:
        warnings.append(
            f"--log-config {flags.log_config}: Log4j's files are not read; set telemetry.log_level and "
            ".log_format in an app.yaml instead"
        )
    state = state_dir(environment, folder, flags.no_config_snapshots)
    extra_args: dict[str, Any] = {} if platform is None else dict(platform.settings(environment))
    extra_args["control"] = {**extra_args.get("control", {}), "state_dir": str(state)}
    document = app_document(translated, folder, {"home": str(folder), **extra_args})
    return ServerDocument(document, source, translated, tuple(warnings))


def _command_keys(flags: TorchServeFlags) -> dict[str, tuple[str, str]]:
    """Return the keys that the flags set, each with its value and the flag's name."""
    given = {
        "model_store": (flags.model_store, "--model-store"),
        "load_models": (",".join(flags.models), "--models"),
        "workflow_store": (flags.workflow_store, "--workflow-store"),
        "plugins_path": (flags.plugins_path, "--plugins-path"),
        "cpp_log_config": (flags.cpp_log_config, "--cpp-log-config"),
        "disable_token_authorization": ("true" if flags.disable_token_auth else "", "--disable-token-auth"),
        "enable_model_api": ("true" if flags.enable_model_api else "", "--enable-model-api"),
    }
    return {key: (value, flag) for key, (value, flag) in given.items() if value}


def _check_paths(flags: TorchServeFlags, model_store: str | None, folder: Path) -> None:
    """Raise StartError, with TorchServe's messages, for folders and files that do not exist."""
    for option, path in (("model-store", model_store), ("workflow-store", flags.workflow_store)):
        if path and not (folder / path).is_dir():
            raise StartError(f"--{option} directory not found: {path}")
    for option, path in (("log-config", flags.log_config), ("cpp-log-config", flags.cpp_log_config)):
        if path and not (folder / path).is_file():
            raise StartError(f"--{option} file not found: {os.path.realpath(folder / path)}")


def app_document(
    translated: torchserve_config.TranslatedConfig, folder: Path, extra_args: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the configuration of `serve run` for a translated config, with ``extra_args`` in its args.

    Paths of certificates are relative to ``folder``.
    """
    http: dict[str, Any] = {
        "host": translated.inference.host,
        "port": translated.inference.port,
        "keep_alive_timeout_s": 75,
    }
    if translated.certificate_file:
        http["ssl_certfile"] = str(folder / translated.certificate_file)
        http["ssl_keyfile"] = str(folder / translated.private_key_file)
    args: dict[str, Any] = {section: dict(values) for section, values in translated.args.items()}
    for name, value in (extra_args or {}).items():
        args[name] = {**args.get(name, {}), **value} if isinstance(value, dict) else value
    return {
        "proxy_location": "EveryNode",
        "http_options": http,
        "logging_config": {"enable_access_log": False},
        "applications": [
            {"name": "torchrelay", "route_prefix": "/", "import_path": "serve_app.main:build", "args": args}
        ],
    }


def app_yaml(translated: torchserve_config.TranslatedConfig, source: str, folder: Path) -> str:
    """Return the app.yaml that replaces a config.properties, each value with the key that it comes from."""
    keys = {key.becomes.strip("`"): key for key in torchserve_config.KEYS if key.fate == "setting"}
    given = {note.key for note in translated.notes}

    def comment(section: str, name: str) -> str:
        key = keys.get(f"{section}.{name}")
        if key is None:
            return ""
        origin = key.name if key.name in given else f"{key.name}, TorchServe's default"
        return f"   # {origin}"

    document = app_document(translated, folder)
    http = document["http_options"]
    lines = [
        f"# The settings of {source}, for `torchrelay start`. Other keys have Torchrelay's defaults;",
        f"# {default_config('settings.yaml')} lists every key.",
        "",
        "proxy_location: EveryNode",
        "",
        "http_options:",
        *(f"  {name}: {json.dumps(value)}" for name, value in http.items()),
        "",
        "logging_config:",
        "  enable_access_log: false   # Torchrelay writes its own access log",
        "",
        "applications:",
        "  - name: torchrelay",
        "    route_prefix: /",
        "    import_path: serve_app.main:build",
        "    args:",
    ]
    for section, values in document["applications"][0]["args"].items():
        lines.append(f"      {section}:")
        for name, value in values.items():
            if isinstance(value, dict):
                block = yaml.safe_dump({name: value}, sort_keys=False, default_flow_style=False)
                lines += [f"        {line}" for line in block.splitlines()]
            else:
                lines.append(f"        {name}: {json.dumps(value)}{comment(section, name)}")
    return "\n".join(lines) + "\n"


def count_gpus(environment: Mapping[str, str]) -> int:
    """Return the number of this machine's NVIDIA GPUs that are visible to this process."""
    installed = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return installed
    return min(installed, len([name for name in visible.split(",") if name.strip() not in ("", "-1")]))


def default_config(name: str) -> Path:
    """Return a file of ``configs`` in the checkout that this package runs from, else the installed one."""
    checkout = Path(__file__).parents[2] / "configs" / name
    return checkout if checkout.is_file() else Path(__file__).parent / name
