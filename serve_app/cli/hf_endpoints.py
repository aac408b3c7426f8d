"""The contract of containers of Hugging Face's Inference Endpoints, from its toolkit's variables.

HF_MODEL_DIR is the folder of the model's repository. Without files in it, HF_MODEL_ID and HF_REVISION name
the repository, which is fetched with HF_TOKEN, or with an older variable of it. HF_MODEL_ID may also be the
path of a folder, or a URL, as for other containers of Hugging Face. ``handler.py`` in it, or the file that
HF_DEFAULT_PIPELINE_NAME names, is a custom handler; any other folder is served by transformers for the task
HF_TASK, or for its own. A repository's own code needs HF_TRUST_REMOTE_CODE, except a custom handler in
HF_MODEL_DIR. The routes are ``/`` and ``/predict``, and ``/health``.

Source: huggingface-inference-toolkit, the image's own server.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from handlers import endpoint_script
from serve_app.cli.container_model import (
    MODEL,
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
from serve_app.model_store.archive import HF_ENDPOINT

MODEL_DIR, MODEL_ID, REVISION, TASK = "HF_MODEL_DIR", "HF_MODEL_ID", "HF_REVISION", "HF_TASK"
VARIABLES = ("HF_",)
_WORKERS = "WORKERS"
TOKEN, _TRUST = "HF_TOKEN", "HF_TRUST_REMOTE_CODE"
_OLD_TOKENS = ("HF_HUB_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_API_TOKEN")
_TRUE = ("1", "on", "true", "y", "yes")


def is_present(environment: Mapping[str, str]) -> bool:
    return bool(environment.get(MODEL_DIR) or environment.get(MODEL_ID))


def describe(environment: Mapping[str, str]) -> str:
    folder = _folder(environment)
    if folder is None:
        kind = f"the repository {environment.get(MODEL_ID)}"
    elif (folder / endpoint_script.file_name(environment)).is_file():
        kind = endpoint_script.file_name(environment)
    else:
        kind = describe_model(folder, "files of no known kind")
    return f"Hugging Face Inference Endpoints, {kind}"


def paths(environment: Mapping[str, str]) -> tuple[str, str]:
    return "/health", "/"


def complete(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment with the token's current name, by which the repository is fetched."""
    token = next(filter(None, map(environment.get, (TOKEN, *_OLD_TOKENS))), None)
    return {**environment, TOKEN: token} if token else dict(environment)


def overrides(environment: Mapping[str, str], text: str, where: str) -> Overrides:
    """Return the keys that the platform sets, each with its value and origin.

    ``text`` is the config.properties, which takes precedence for keys that it does not require. Raises
    StartError.
    """
    folder = _folder(environment)
    defaults: Overrides = {
        "inference_address": ("http://0.0.0.0:8080", MODEL_DIR),
        **limit_keys(environment, MODEL_DIR),
        "disable_token_authorization": ("true", MODEL_DIR),
        "install_py_dep_per_model": ("true", MODEL_DIR),
        "default_workers_per_model": (str(read_number(environment, _WORKERS, 1)), _WORKERS),
        "default_service_handler": (HF_ENDPOINT, MODEL_DIR),
    }
    if folder is not None:
        variable = MODEL_ID if str(folder) == environment.get(MODEL_ID) else MODEL_DIR
        defaults |= model_keys(check_folder(folder, variable), folder.parent, variable)
    elif environment.get(MODEL_ID):
        defaults["model_store"] = ("model_store", MODEL_ID)
        defaults["load_models"] = (f"{MODEL}={repository_url(environment)}", MODEL_ID)
    return merge_private(defaults, {}, MODEL_DIR, text, where)


def settings(environment: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Return the settings without a key of TorchServe, by section. Raises StartError."""
    routes = {"GET /": "/ping", "/health": "/ping", "POST /": "/invocations", "/predict": "/invocations"}
    made = {**owner_settings(environment), "inference": {"ping": "ready", "aliases": routes}}
    folder, script = _folder(environment), endpoint_script.file_name(environment)
    if not re.fullmatch(r"[\w.-]+\.py", script):
        raise StartError(f"{endpoint_script.FILE}={script}: it is the name of a file such as handler.py")
    if not trusts_code(environment) and not (folder and (folder / script).is_file()):
        made["store"] = {}
    if task := environment.get(TASK):
        made["store"]["default_task"] = task
    return made


def repository_url(environment: Mapping[str, str]) -> str:
    """Return the URL of the repository that HF_MODEL_ID names; empty where it names none."""
    name = environment.get(MODEL_ID, "")
    if not name or "://" in name or Path(name).is_absolute():
        return name
    revision = f"@{environment[REVISION]}" if environment.get(REVISION) else ""
    return f"hf://{name}{revision}"


def trusts_code(environment: Mapping[str, str]) -> bool:
    """Return whether the code of a repository may run."""
    return environment.get(_TRUST, "").lower() in _TRUE


def _folder(environment: Mapping[str, str]) -> Path | None:
    """Return the folder of the repository; None where there are no files, and HF_MODEL_ID names it."""
    folder = Path(environment.get(MODEL_DIR) or "/opt/huggingface/model")
    if has_files(folder) or not (name := environment.get(MODEL_ID)):
        return folder
    return Path(name) if Path(name).is_absolute() else None


def has_files(folder: Path) -> bool:
    return folder.is_dir() and any(folder.iterdir())
