"""Vertex AI's requirements for a custom container, from the platform's variables.

AIP_HTTP_PORT is the port that it connects to, without a key. AIP_HEALTH_ROUTE and AIP_PREDICT_ROUTE are the
paths that it requests. AIP_STORAGE_URI is the folder with the model's artifacts, in Cloud Storage: a folder
with one archive, or a model's directory. It is empty for a model without artifacts, whose image has them in
its model store. HF_MODEL_ID names a repository of Hugging Face in its place, as for Hugging Face's own
images. Requests over gRPC reach the port 7070.

Source: "Custom container requirements for inference" in Google Cloud's documentation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from serve_app.cli import hf_endpoints
from serve_app.cli.container_model import MODEL, Overrides, check_port, limit_keys, merge_private
from serve_app.cli.errors import StartError

PORT, STORAGE = "AIP_HTTP_PORT", "AIP_STORAGE_URI"
HEALTH, PREDICT = "AIP_HEALTH_ROUTE", "AIP_PREDICT_ROUTE"

VARIABLES = ("AIP_",)


def is_present(environment: Mapping[str, str]) -> bool:
    return bool(environment.get(PORT))


def describe(environment: Mapping[str, str]) -> str:
    return "Vertex AI"


def paths(environment: Mapping[str, str]) -> tuple[str, str]:
    return environment.get(HEALTH) or "/ping", environment.get(PREDICT) or "/invocations"


def overrides(environment: Mapping[str, str], text: str, where: str) -> Overrides:
    """Return the keys that Vertex AI sets, each with its value and origin.

    ``text`` is the config.properties, which takes precedence for keys that Vertex AI does not require. Raises
    StartError.
    """
    port = check_port(PORT, environment[PORT])
    required: Overrides = {"inference_address": (f"http://0.0.0.0:{port}", PORT)}
    defaults: Overrides = {
        "disable_token_authorization": ("true", PORT),
        "service_envelope": ("vertex", PORT),
        "install_py_dep_per_model": ("true", PORT),
        "default_workers_per_model": ("1", PORT),
        "load_models": (f"{MODEL}={url}" if (url := _find_model(environment)) else "all", STORAGE),
        "grpc_inference_address": ("0.0.0.0", PORT),
        **limit_keys(environment, PORT),
    }
    return merge_private(defaults, required, PORT, text, where)


def settings(environment: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Return the settings without a key of TorchServe, by section.

    The model is code of the container's owner. Raises StartError for a route that is no path.
    """
    routes = {}
    for variable, target in ((HEALTH, "/ping"), (PREDICT, "/invocations")):
        if route := environment.get(variable):
            if not route.startswith("/"):
                raise StartError(f"{variable}={route}: a route begins with a slash")
            routes[route] = target
    is_own = bool(environment.get(STORAGE)) or not environment.get(hf_endpoints.MODEL_ID)
    store: dict[str, Any] = {"trusted": ["*"]} if is_own or hf_endpoints.trusts_code(environment) else {}
    if task := environment.get(hf_endpoints.TASK):
        store["default_task"] = task
    return {"inference": {"ping": "ready", "aliases": routes}, "store": store}


def _find_model(environment: Mapping[str, str]) -> str:
    """Return the URL of the model; empty where the image has it."""
    return environment.get(STORAGE) or hf_endpoints.repository_url(environment)
