"""Amazon SageMaker's requirements for a server besides its config.properties, from the platform's variables.

SAGEMAKER_BIND_TO_PORT is the only port that it connects to, and it sends no key. SAGEMAKER_SAFE_PORT_RANGE
are ports that nothing else in the container uses. SAGEMAKER_BASE_DIR, which the image's entry point sets for
the argument ``serve``, holds the model in ``model/``: archives, a Hugging Face folder, or a script in
``code/``. With SAGEMAKER_MULTI_MODEL=true SageMaker loads and unloads the models below ``models/`` with the
management API on that same port, and expects each loaded model to have a worker.

The other variables are those of its inference toolkits: the script's own are read by the handler
``sagemaker``, and SAGEMAKER_TS_… are the settings of the only model. CA_REPOSITORY_ARN is the repository of
AWS CodeArtifact that has the packages of a model's requirements.txt. MLFLOW_SCORING_SERVER_REQUEST_TIMEOUT
and MLSERVER_INFER_WORKERS are those of MLflow's own image, for a directory of MLflow. As in Hugging Face's
containers, HF_MODEL_ID is the model where the base directory has none, and HF_TASK the task of a folder.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from serve_app.cli import hf_endpoints
from serve_app.cli.container_model import (
    MODEL,
    Overrides,
    check_port,
    describe_model,
    limit_keys,
    merge,
    model_keys,
    owner_settings,
    read_number,
)
from serve_app.cli.errors import StartError
from serve_app.model_store.archive import (
    SCRIPT_MODE,
    SCRIPTS,
    has_scripts,
    is_mlflow_model,
)
from serve_app.runtime import codeartifact

PORT, RANGE, MULTI = "SAGEMAKER_BIND_TO_PORT", "SAGEMAKER_SAFE_PORT_RANGE", "SAGEMAKER_MULTI_MODEL"
BASE = "SAGEMAKER_BASE_DIR"
_DEFAULT_PORT = "8080"  # where SageMaker connects by default
_DEFAULT_BASE = "/opt/ml"
_TIMEOUT, _WORKERS = "SAGEMAKER_MODEL_SERVER_TIMEOUT", "SAGEMAKER_MODEL_SERVER_WORKERS"
_MLFLOW_TIMEOUT, _MLFLOW_WORKERS = "MLFLOW_SCORING_SERVER_REQUEST_TIMEOUT", "MLSERVER_INFER_WORKERS"
_RAY_SERVE_APP = "SM_RAYSERVE_APP"
_HANDLER, _LOG_LEVEL = "SAGEMAKER_HANDLER", "SAGEMAKER_CONTAINER_LOG_LEVEL"
_PACKAGES = "CA_REPOSITORY_ARN"  # of the packages in requirements.txt
_TOOLKIT = "sagemaker_pytorch_serving_container."  # whose handler is ours
# The variables of TorchServe's settings of the only model, with the toolkit's defaults.
_VERSION = {
    "minWorkers": ("SAGEMAKER_TS_MIN_WORKERS", 1),
    "maxWorkers": ("SAGEMAKER_TS_MAX_WORKERS", 1),
    "batchSize": ("SAGEMAKER_TS_BATCH_SIZE", 1),
    "maxBatchDelay": ("SAGEMAKER_TS_MAX_BATCH_DELAY", 100),
    "responseTimeout": ("SAGEMAKER_TS_RESPONSE_TIMEOUT", 60),
}
_LEVELS = ("DEBUG", "DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")  # by the tens of Python's numbers

VARIABLES = ("SAGEMAKER_", "TS_", _PACKAGES, _MLFLOW_TIMEOUT, _MLFLOW_WORKERS, "HF_")


def is_present(environment: Mapping[str, str]) -> bool:
    return is_multi_model(environment) or any(environment.get(name) for name in (BASE, PORT, RANGE))


def describe(environment: Mapping[str, str]) -> str:
    """Return the platform's name, and which models it serves."""
    if is_multi_model(environment):
        return "Amazon SageMaker, many models"
    folder = _base(environment) / "model"
    if url := _find_repository(environment):
        return f"Amazon SageMaker, the repository {url}"
    if has_scripts(folder / SCRIPTS):
        return f"Amazon SageMaker, {SCRIPTS}/inference.py"
    return f"Amazon SageMaker, {describe_model(folder, 'files for the default functions')}"


def paths(environment: Mapping[str, str]) -> tuple[str, str]:
    return "/ping", "/models/{model}/invoke" if is_multi_model(environment) else "/invocations"


def overrides(environment: Mapping[str, str], text: str, where: str) -> Overrides:
    """Return the keys that SageMaker sets, each with its value and origin.

    ``text`` is the config.properties, which takes precedence for keys that SageMaker does not require. Raises
    StartError.
    """
    multi, base = is_multi_model(environment), environment.get(BASE)
    port = environment.get(PORT) or (_DEFAULT_PORT if multi or base else None)
    required: Overrides = {}
    defaults: Overrides = {}
    if port:
        address = f"http://0.0.0.0:{int(check_port(PORT, port))}"
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
    return merge(defaults, required, text, where)


def settings(environment: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Return the settings without a key of TorchServe, by section.

    The models are code of the container's owner. Raises StartError.
    """
    multi = is_multi_model(environment)
    made: dict[str, dict[str, Any]] = {"inference": {"ping": "ready"}}
    if is_mlflow_model(_base(environment) / "model"):
        made["inference"]["aliases"] = {"/health": "/ping"}  # of MLflow's scoring server
    if multi:
        made["control"] = {"external_eviction": True}
    if multi or environment.get(BASE):
        made |= owner_settings(environment)
        if _find_repository(environment) and not hf_endpoints.trusts_code(environment):
            made["store"] = {}
        if task := environment.get(hf_endpoints.TASK):
            made["store"]["default_task"] = task
        if arn := environment.get(_PACKAGES):
            try:
                codeartifact.check_arn(arn)
            except codeartifact.CodeArtifactError as error:
                raise StartError(f"{_PACKAGES}: {error}") from None
            made["runtime"]["pip_index_url"] = arn
    if _LOG_LEVEL in environment:
        level = read_number(environment, _LOG_LEVEL, 20, low=0)
        made["telemetry"] = {"log_level": _LEVELS[min(level // 10, len(_LEVELS) - 1)]}
    return made


def _base(environment: Mapping[str, str]) -> Path:
    return Path(environment.get(BASE) or _DEFAULT_BASE)


def _find_repository(environment: Mapping[str, str]) -> str:
    """Return the URL of the model of Hugging Face; empty where the base directory has the model."""
    has_model = is_multi_model(environment) or hf_endpoints.has_files(_base(environment) / "model")
    return "" if has_model else hf_endpoints.repository_url(environment)


def is_multi_model(environment: Mapping[str, str]) -> bool:
    return environment.get(MULTI, "").lower() == "true"


def _model_defaults(environment: Mapping[str, str]) -> Overrides:
    """Return the keys for models of SageMaker, whose bodies reach a script as they came."""
    handler = environment.get(_HANDLER, "")
    if not handler or handler.startswith(_TOOLKIT):
        handler = SCRIPT_MODE
    file = Path(handler.partition(":")[0].removesuffix(".py") + ".py")
    if file.is_absolute() and not file.is_file():
        raise StartError(f"{_HANDLER}={handler}: there is no file {file}")
    timeout, workers = _TIMEOUT, _WORKERS
    if is_mlflow_model(_base(environment) / "model"):
        timeout = _MLFLOW_TIMEOUT if environment.get(_MLFLOW_TIMEOUT) else timeout
        workers = _MLFLOW_WORKERS if environment.get(_MLFLOW_WORKERS) else workers
    made = {
        **limit_keys(environment, BASE),
        "enable_envvars_config": ("true", BASE),
        "install_py_dep_per_model": ("true", BASE),
        "decode_input_request": ("false", BASE),
        "default_service_handler": (handler, _HANDLER),
        "default_response_timeout": (str(read_number(environment, timeout, 60)), timeout),
    }
    if environment.get(workers):
        made["default_workers_per_model"] = (str(read_number(environment, workers, 1)), workers)
    return made


def _only_model(environment: Mapping[str, str], base: Path) -> Overrides:
    """Return the keys that load the model of the base directory: its archives, or the whole folder."""
    folder = base / "model"
    if environment.get(_RAY_SERVE_APP) or _has_ray_serve_config(folder):
        raise StartError(
            f"{folder} is an application of AWS's Ray Serve container ({_RAY_SERVE_APP}, or applications in "
            f"config.yaml): serve its model by {SCRIPTS}/inference.py, or by an archive; "
            "docs/guides/coming-from.md has what replaces Ray Serve's classes"
        )
    if url := _find_repository(environment):
        made = {"model_store": (str(base), BASE), "load_models": (f"{MODEL}={url}", hf_endpoints.MODEL_ID)}
    else:
        made = model_keys(folder, base, BASE)
    if "decode_input_request" in made:  # archives, whose settings are their own
        return made
    if any(variable in environment for variable, _ in _VERSION.values()):
        version = {key: read_number(environment, *variable) for key, variable in _VERSION.items()}
        if _VERSION["minWorkers"][0] not in environment:
            version["minWorkers"] = read_number(environment, _WORKERS, 1)
        version["maxWorkers"] = max(version["minWorkers"], version["maxWorkers"])
        made["models"] = (json.dumps({MODEL: {"1.0": {"defaultVersion": True, **version}}}), "SAGEMAKER_TS_…")
    return made


def _has_ray_serve_config(folder: Path) -> bool:
    """Return whether a folder without a script has a configuration of Ray Serve."""
    if has_scripts(folder / SCRIPTS):
        return False
    try:
        text = (folder / "config.yaml").read_text(errors="replace")
    except OSError:
        return False
    return re.search(r"^applications\s*:", text, re.MULTILINE) is not None


def _first_port(value: str) -> int:
    """Return the first port of a range of at least four ports."""
    ports = re.fullmatch(r"(\d+)-(\d+)", value)
    if ports is None or not 0 < int(ports[1]) <= int(ports[2]) - 3 <= 65535 - 3:
        raise StartError(
            f"{RANGE}={value}: it is the first and the last of four ports or more, such as 21000-22000"
        )
    return int(ports[1])
