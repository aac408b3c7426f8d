"""Azure Machine Learning's requirements for a container of an online endpoint, from its variables.

AZUREML_ENTRY_SCRIPT is the scoring script, below AML_APP_ROOT: its folder is the model, and the script itself
reads AZUREML_MODEL_DIR. Its container is that of Azure ML's own inference server: port 5001, ``/`` for the
probes and ``/score``. Without a script the model is in AZUREML_MODEL_DIR, or in the only folder there:
archives, a Hugging Face folder or a directory of MLflow. It is served on port 8080, and the environment's
``inference_config`` names port and routes.

Source: "Deploy a custom container to an online endpoint" in Microsoft's documentation, and the package
azureml-inference-server-http 1.5.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from handlers.azureml import APP_ROOT, DEFAULT_ROOT, ENTRY_SCRIPT
from serve_app.cli.container_model import (
    Overrides,
    check_folder,
    describe_model,
    limit_keys,
    merge_private,
    model_keys,
    owner_settings,
    read_number,
)
from serve_app.cli.errors import StartError
from serve_app.model_store.archive import AZUREML

MODEL_DIR = "AZUREML_MODEL_DIR"
VARIABLES = ("AZUREML_", "AML_", "WORKER_COUNT", "SCORING_TIMEOUT_MS")
_WORKERS, _TIMEOUT, _ORIGINS = "WORKER_COUNT", "SCORING_TIMEOUT_MS", "AML_CORS_ORIGINS"
_LOG_LEVEL = "AZUREML_LOG_LEVEL"
_SCRIPT_PORT, _PORT = 5001, 8080
_DEFAULT_TIMEOUT_MS = 3_600_000
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def is_present(environment: Mapping[str, str]) -> bool:
    return bool(environment.get(ENTRY_SCRIPT) or environment.get(MODEL_DIR))


def describe(environment: Mapping[str, str]) -> str:
    script = environment.get(ENTRY_SCRIPT)
    kind = script or describe_model(_model_folder(environment), "files of no known kind")
    return f"Azure Machine Learning, {kind}"


def paths(environment: Mapping[str, str]) -> tuple[str, str]:
    return "/", "/score"


def overrides(environment: Mapping[str, str], text: str, where: str) -> Overrides:
    """Return the keys that Azure ML sets, each with its value and origin.

    ``text`` is the config.properties, which takes precedence for keys that it does not require. Raises
    StartError.
    """
    is_script = bool(environment.get(ENTRY_SCRIPT))
    origin = ENTRY_SCRIPT if is_script else MODEL_DIR
    if not is_script:
        check_folder(Path(environment[MODEL_DIR]), MODEL_DIR)
    folder = _script_folder(environment) if is_script else _model_folder(environment)
    timeout = max(1, read_number(environment, _TIMEOUT, _DEFAULT_TIMEOUT_MS) // 1000)
    defaults: Overrides = {
        "inference_address": (f"http://0.0.0.0:{_SCRIPT_PORT if is_script else _PORT}", origin),
        **limit_keys(environment, origin),
        "disable_token_authorization": ("true", origin),
        "install_py_dep_per_model": ("true", origin),
        "default_workers_per_model": (str(read_number(environment, _WORKERS, 1)), _WORKERS),
        "default_response_timeout": (str(timeout), _TIMEOUT),
        **model_keys(folder, folder.parent, origin),
    }
    if is_script:
        defaults |= {"default_service_handler": (AZUREML, origin), "decode_input_request": ("false", origin)}
    if origins := environment.get(_ORIGINS):
        defaults["cors_allowed_origin"] = (origins, _ORIGINS)
    return merge_private(defaults, {}, origin, text, where)


def settings(environment: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Return the settings without a key of TorchServe, by section. Raises StartError."""
    made = owner_settings(environment)
    made["inference"] = {"ping": "ready", "aliases": {"GET /": "/ping", "/score": "/invocations"}}
    if level := environment.get(_LOG_LEVEL, "").upper():
        if level not in _LEVELS:
            raise StartError(f"{_LOG_LEVEL}={level}: it is one of {', '.join(_LEVELS)}")
        made["telemetry"] = {"log_level": level}
    return made


def _script_folder(environment: Mapping[str, str]) -> Path:
    """Return the folder of the script. Raises StartError where it is missing."""
    file = Path(environment.get(APP_ROOT) or DEFAULT_ROOT, environment[ENTRY_SCRIPT])
    if not file.is_file():
        raise StartError(
            f"{ENTRY_SCRIPT}={environment[ENTRY_SCRIPT]}: there is no file {file}: set {APP_ROOT}"
        )
    return file.resolve().parent


def _model_folder(environment: Mapping[str, str]) -> Path:
    """Return the folder of the model's files: a registered folder is mounted within AZUREML_MODEL_DIR."""
    folder = Path(environment[MODEL_DIR])
    entries = [entry for entry in folder.glob("*") if entry.name[0] != "."]
    return entries[0] if len(entries) == 1 and entries[0].is_dir() else folder
