"""The keys and settings of a server whose only model is in a folder of the container."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from serve_app import torchserve_config
from serve_app.cli.errors import StartError
from serve_app.model_store.archive import is_mlflow_model, is_model_folder
from serve_app.settings import MIB

MODEL = "model"  # the name of the only model
# The variables of pip, which reads none of them here, and the settings in their place.
_PIP = {"PIP_EXTRA_INDEX_URL": "pip_extra_index_urls", "PIP_FIND_LINKS": "pip_find_links"}

_PRIVATE = {"management_address": 8081, "metrics_address": 8082}

Overrides = dict[str, tuple[str, str]]

# TorchServe's limit of 6.5 MB is below those of the platforms: 10 MB of Vertex AI and Azure ML, 25 MB of
# SageMaker, and more of its batches. A load takes minutes where the weights are large, and it is the platform
# that ends a container without a model.
_LIMITS = {
    "max_request_size": 64 * MIB,
    "max_response_size": 64 * MIB,
    "default_startup_timeout": 3600,
}


def model_keys(folder: Path, store: Path, origin: str) -> Overrides:
    """Return the keys that load a folder's archives, or else the whole folder as the model."""
    if any(folder.glob("*.mar")):  # handlers of TorchServe, which get JSON decoded
        return {
            "model_store": (str(folder), origin),
            "load_models": ("all", origin),
            "decode_input_request": ("true", origin),
        }
    return {"model_store": (str(store), origin), "load_models": (f"{MODEL}={folder}", origin)}


def limit_keys(environment: Mapping[str, str], origin: str) -> Overrides:
    """Return the limits of requests, responses and loads, unless a variable of TorchServe has one."""
    return {
        key: (str(limit), origin)
        for key, limit in _LIMITS.items()
        if not environment.get(f"TS_{key.upper()}")
    }


def merge(defaults: Overrides, required: Overrides, text: str, where: str) -> Overrides:
    """Return both, without the defaults that the config.properties ``text`` has."""
    in_file = torchserve_config.parse(text, where)
    return {**{key: value for key, value in defaults.items() if key not in in_file}, **required}


def merge_private(defaults: Overrides, required: Overrides, origin: str, text: str, where: str) -> Overrides:
    """Return both, and addresses within the container: management can run code, and needs no key here.

    Their ports are the file's where it has some beside that of requests.
    """
    merged, in_file = merge(defaults, required, text, where), torchserve_config.parse(text, where)
    served = (
        merged["inference_address"][0]
        if "inference_address" in merged
        else in_file["inference_address"].value
    )
    for key, port in _PRIVATE.items():
        own = _find_port(in_file[key].value) if key in in_file else None
        free = next(number for number in (own, port, port + 2) if number not in (None, _find_port(served)))
        merged[key] = f"http://127.0.0.1:{free}", origin
    return {**merged, "grpc_management_address": ("127.0.0.1", origin)}


def _find_port(address: str) -> int | None:
    found = re.search(r":(\d+)/?$", address.strip())
    return int(found[1]) if found else None


def owner_settings(environment: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Return the settings of models that are code of the container's owner.

    Models may run code, install any package and read every variable.
    """
    runtime: dict[str, Any] = {
        "handler_env_vars": ["*"],
        "pip_allow_options": True,
        "pip_allow_source_builds": True,
        **{key: environment[name].split() for name, key in _PIP.items() if environment.get(name)},
    }
    if index := environment.get("PIP_INDEX_URL"):
        runtime["pip_index_url"] = index
    return {"store": {"trusted": ["*"]}, "runtime": runtime}


def check_folder(folder: Path, variable: str) -> Path:
    """Return a variable's folder. Raises StartError where it has no files."""
    if not folder.is_dir() or not any(folder.iterdir()):
        raise StartError(f"{variable}={folder}: there is no such folder, or it has no files")
    return folder


def describe_model(folder: Path, other: str) -> str:
    """Return what a folder has; ``other`` is the name of files that are none of the known kinds."""
    if is_mlflow_model(folder):
        return "a model of MLflow"
    if any(folder.glob("*.mar")):
        return "archives"
    return "a Hugging Face folder" if is_model_folder(folder) else other


def check_port(variable: str, value: str) -> str:
    """Return a variable's port. Raises StartError."""
    if not value.isdecimal() or not 0 < int(value) < 65536:
        raise StartError(f"{variable}={value}: it is a port from 1 to 65535")
    return value


def read_number(environment: Mapping[str, str], variable: str, default: int, low: int = 1) -> int:
    """Return a variable's whole number; the default where it is not set or empty. Raises StartError."""
    value = environment.get(variable) or str(default)
    if not value.isdecimal() or int(value) < low:
        raise StartError(f"{variable}={value}: it is a whole number from {low}")
    return int(value)
