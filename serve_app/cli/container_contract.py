"""The platform that started a container, and what its argument ``serve`` serves there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from serve_app.cli import hf_endpoints, platforms, sagemaker
from serve_app.cli.errors import StartError
from serve_app.cli.torchserve_flags import TorchServeFlags, translate
from serve_app.domain.urls import redact_url
from serve_app.settings import load

# The folders of the image, and the variables that replace them.
_BASE = sagemaker.BASE, "opt/ml"
_MODEL_SERVER = "MODEL_SERVER_HOME", "home/model-server"  # as in the image pytorch/torchserve
_HOME = "TORCHRELAY_HOME", "srv/torchrelay"
_PREFIXES = tuple(
    prefix for platform in (*platforms.PLATFORMS, *platforms.OF_SERVE) for prefix in platform.VARIABLES
)
_SECRETS = ("TOKEN", "KEY", "SECRET", "PASSWORD", "CREDENTIAL", "SAS")


@dataclass(frozen=True)
class ContainerContract:
    """A platform's contract as the environment and the files state it."""

    platform: str
    variables: Mapping[str, str]  # of the platform, without secrets
    address: str  # host:port of requests; empty where no server starts
    health: str  # the path of its probe
    predictions: str
    models: str  # what is loaded at the start
    problem: str  # why no server starts; empty where one does


def read_start(
    environment: Mapping[str, str], root: Path = Path("/")
) -> tuple[TorchServeFlags, dict[str, str], Path]:
    """Return the flags, the environment and the working directory of the image's argument ``serve``.

    That is the model of the platform, else a server of the config.properties in /home/model-server. ``root``
    has the image's folders.
    """
    env, flags = dict(environment), TorchServeFlags(container=True)
    places = _BASE, _MODEL_SERVER, _HOME
    base, model_server, home = (Path(env.get(name) or root / path) for name, path in places)
    platform = platforms.recognise(env, container=True)
    env = hf_endpoints.complete(env)
    if platform is hf_endpoints and hf_endpoints.repository_url(env) == str(base / "model"):
        platform = sagemaker
    if platform in platforms.OF_SERVE:
        return flags, env, home
    has_model = (base / "model").is_dir() or (platform is sagemaker and hf_endpoints.repository_url(env))
    if platform in (None, sagemaker) and (sagemaker.is_multi_model(env) or has_model):
        return flags, {**env, sagemaker.BASE: str(base)}, home
    return replace(flags, ts_config=str(model_server / "config.properties")), env, Path.cwd()


def inspect(environment: Mapping[str, str], root: Path = Path("/")) -> ContainerContract:
    """Return the contract that the image's argument ``serve`` would serve with this environment."""
    flags, env, folder = read_start(environment, root)
    platform = platforms.recognise(env, flags.container)
    name = "TorchServe's image" if platform is None else platform.describe(env)
    shown = {
        name: redact_url(value) if "://" in value else value
        for name, value in sorted(environment.items())
        if name.startswith(_PREFIXES) and not any(secret in name for secret in _SECRETS)
    }
    try:
        document = translate(flags, env, folder).document
        settings = load(document["applications"][0]["args"])
    except StartError as error:
        return ContainerContract(name, shown, "", "", "", "", str(error))
    http = document["http_options"]
    health, predictions = ("/ping", "/predictions/{model}") if platform is None else platform.paths(env)
    models = settings.control.load_models
    if platform is sagemaker and sagemaker.is_multi_model(env):
        models = "those that the platform loads"
    return ContainerContract(name, shown, f"{http['host']}:{http['port']}", health, predictions, models, "")
