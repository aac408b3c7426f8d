"""Amazon SageMaker's requirements for a server besides its config.properties, from the platform's variables.

SAGEMAKER_BIND_TO_PORT is the only port that it connects to, and it sends no key. SAGEMAKER_SAFE_PORT_RANGE
are ports that nothing else in the container uses. SAGEMAKER_BASE_DIR, which the image's entry point sets for
the argument ``serve``, holds the model in ``model/``: archives, a Hugging Face folder, or a script in
``code/``. With SAGEMAKER_MULTI_MODEL=true SageMaker loads and unloads the models below ``models/`` with the
management API on that same port, and expects each loaded model to have a worker.

The other variables are those of its inference toolkits: the script's own are read by the handler
``sagemaker``, and SAGEMAKER_TS_… are the settings of the only model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from serve_app import torchserve_config
from serve_app.cli.errors import StartError
from serve_app.model_store.archive import SCRIPT_MODE

PORT, RANGE, MULTI = "SAGEMAKER_BIND_TO_PORT", "SAGEMAKER_SAFE_PORT_RANGE", "SAGEMAKER_MULTI_MODEL"
BASE = "SAGEMAKER_BASE_DIR"
MODEL = "model"  # the name of the only model
_DEFAULT_PORT = "8080"  # where SageMaker connects by default
_DEFAULT_BASE = "/opt/ml"
_TIMEOUT, _WORKERS = "SAGEMAKER_MODEL_SERVER_TIMEOUT", "SAGEMAKER_MODEL_SERVER_WORKERS"
_HANDLER, _LOG_LEVEL = "SAGEMAKER_HANDLER", "SAGEMAKER_CONTAINER_LOG_LEVEL"
_TOOLKIT = "sagemaker_pytorch_serving_container."  # whose handler is ours
# The variables of TorchServe's settings of the only model, with the toolkit's defaults.
_VERSION = {
    "minWorkers": ("SAGEMAKER_TS_MIN_WORKERS", 1),
    "maxWorkers": ("SAGEMAKER_TS_MAX_WORKERS", 1),
    "batchSize": ("SAGEMAKER_TS_BATCH_SIZE", 1),
    "maxBatchDelay": ("SAGEMAKER_TS_MAX_BATCH_DELAY", 100),
    "responseTimeout": ("SAGEMAKER_TS_RESPONSE_TIMEOUT", 60),
}
# The variables of pip, which reads none of them here, and the settings in their place.
_PIP = {"PIP_EXTRA_INDEX_URL": "pip_extra_index_urls", "PIP_FIND_LINKS": "pip_find_links"}
_LEVELS = ("DEBUG", "DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")  # by the tens of Python's numbers

Overrides = dict[str, tuple[str, str]]


def overrides(environment: Mapping[str, str], text: str, where: str) -> Overrides:
    """Return the keys that SageMaker sets, each with its value and origin; none outside SageMaker.

    ``text`` is the config.properties, which takes precedence for keys that SageMaker does not require. Raises
    StartError.
    """
    multi, base = _is_multi_model(environment), environment.get(BASE)
    port = environment.get(PORT) or (_DEFAULT_PORT if multi or base else None)
    required: Overrides = {}
    defaults: Overrides = {}
    if port:
        address = f"http://0.0.0.0:{_port(port)}"
        required["inference_address"] = (address, PORT)
        if multi:
            required["management_address"] = (address, PORT)
            required["enable_model_api"] = ("true", MULTI)
        defaults["disable_token_authorization"] = ("true", MULTI if multi else PORT)
    if multi:
        defaults["default_workers_per_model"] = ("1", MULTI)
        defaults["allowed_urls"] = (f"file://{re.escape(base or _DEFAULT_BASE)}/models/.*", MULTI)
    if multi or base:
        defaults |= _model_defaults(environment)
    if base and not multi:
        defaults |= _only_model(environment, Path(base))
    elif base:
        defaults["model_store"] = (base, BASE)
    if safe_range := environment.get(RANGE):
        first = _first_port(safe_range)
        defaults["metrics_address"] = (f"http://127.0.0.1:{first}", RANGE)
        defaults |= {
            f"grpc_{service}_port": (str(first + i), RANGE)
            for i, service in ((1, "inference"), (2, "management"))
        }
        if not multi:
            defaults["management_address"] = (f"http://127.0.0.1:{first + 3}", RANGE)
    in_file = torchserve_config.parse(text, where)
    return {**{key: value for key, value in defaults.items() if key not in in_file}, **required}


def settings(environment: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Return the settings without a key of TorchServe, by section; none outside SageMaker.

    The models are code of the container's owner: they may run it, install any package and see every variable.
    Raises StartError.
    """
    multi = _is_multi_model(environment)
    if not (multi or environment.get(BASE) or environment.get(PORT)):
        return {}
    made: dict[str, dict[str, Any]] = {"inference": {"ping": "ready"}}
    if multi:
        made["control"] = {"external_eviction": True}
    if multi or environment.get(BASE):
        made["store"] = {"trusted": ["*"]}
        made["runtime"] = {
            "handler_env_vars": ["*"],
            "pip_allow_options": True,
            "pip_allow_source_builds": True,
            **{key: environment[name].split() for name, key in _PIP.items() if environment.get(name)},
        }
        if index := environment.get("PIP_INDEX_URL"):
            made["runtime"]["pip_index_url"] = index
    if _LOG_LEVEL in environment:
        level = _number(environment, _LOG_LEVEL, 20, low=0)
        made["telemetry"] = {"log_level": _LEVELS[min(level // 10, len(_LEVELS) - 1)]}
    return made


def _is_multi_model(environment: Mapping[str, str]) -> bool:
    return environment.get(MULTI, "").lower() == "true"


def _model_defaults(environment: Mapping[str, str]) -> Overrides:
    """Return the keys for models of SageMaker, whose bodies reach a script as they came."""
    handler = environment.get(_HANDLER, "")
    if not handler or handler.startswith(_TOOLKIT):
        handler = SCRIPT_MODE
    made = {
        "enable_envvars_config": ("true", BASE),
        "install_py_dep_per_model": ("true", BASE),
        "decode_input_request": ("false", BASE),
        "default_service_handler": (handler, _HANDLER),
        "default_response_timeout": (str(_number(environment, _TIMEOUT, 60)), _TIMEOUT),
    }
    if environment.get(_WORKERS):
        made["default_workers_per_model"] = (str(_number(environment, _WORKERS, 1)), _WORKERS)
    return made


def _only_model(environment: Mapping[str, str], base: Path) -> Overrides:
    """Return the keys that load the model of the base directory: its archives, or the whole folder."""
    folder = base / "model"
    if any(folder.glob("*.mar")):  # handlers of TorchServe, which get JSON decoded
        return {
            "model_store": (str(folder), BASE),
            "load_models": ("all", BASE),
            "decode_input_request": ("true", BASE),
        }
    made = {"model_store": (str(base), BASE), "load_models": (f"{MODEL}={folder}", BASE)}
    if any(variable in environment for variable, _ in _VERSION.values()):
        version = {key: _number(environment, *variable) for key, variable in _VERSION.items()}
        if _VERSION["minWorkers"][0] not in environment:
            version["minWorkers"] = _number(environment, _WORKERS, 1)
        version["maxWorkers"] = max(version["minWorkers"], version["maxWorkers"])
        made["models"] = (json.dumps({MODEL: {"1.0": {"defaultVersion": True, **version}}}), "SAGEMAKER_TS_…")
    return made


def _number(environment: Mapping[str, str], variable: str, default: int, low: int = 1) -> int:
    """Return a variable's whole number; the default where it is not set or empty."""
    value = environment.get(variable) or str(default)
    if not value.isdecimal() or int(value) < low:
        raise StartError(f"{variable}={value}: it is a whole number from {low}")
    return int(value)


def _port(value: str) -> int:
    if not value.isdecimal() or not 0 < int(value) < 65536:
        raise StartError(f"{PORT}={value}: it is a port from 1 to 65535")
    return int(value)


def _first_port(value: str) -> int:
    """Return the first port of a range of at least four ports."""
    ports = re.fullmatch(r"(\d+)-(\d+)", value)
    if ports is None or not 0 < int(ports[1]) <= int(ports[2]) - 3 <= 65535 - 3:
        raise StartError(
            f"{RANGE}={value}: it is the first and the last of four ports or more, such as 21000-22000"
        )
    return int(ports[1])
