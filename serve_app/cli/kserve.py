"""KServe's requirements for its TorchServe runtime, besides the config.properties of the models.

KServe sets PROTOCOL_VERSION in the container and connects to port 8080, or to 8081 over gRPC. The files of
its users have another inference address, because KServe's own process ran in front of TorchServe. Here that
process is not needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from serve_app.cli.container_model import Overrides, merge
from serve_app.cli.errors import StartError

VARIABLE = "PROTOCOL_VERSION"
_ENVELOPES = {"v1": "kserve", "v2": "kservev2", "grpc-v2": "kservev2"}
_REST = "http://0.0.0.0:8080"
_GRPC = "8081"
_MANAGEMENT = "http://127.0.0.1:8085"  # management can run code, so only the pod may connect
_METRICS = "http://0.0.0.0:8082"

VARIABLES = (VARIABLE,)


def is_present(environment: Mapping[str, str]) -> bool:
    return bool(environment.get(VARIABLE))


def describe(environment: Mapping[str, str]) -> str:
    return f"KServe, protocol {environment[VARIABLE]}"


def paths(environment: Mapping[str, str]) -> tuple[str, str]:
    """Return the paths of the health probe and of predictions; over gRPC, the methods."""
    version = environment[VARIABLE]
    if version == "grpc-v2":
        return "GRPCInferenceService/ServerReady", "GRPCInferenceService/ModelInfer"
    return (
        ("/", "/v1/models/{model}:predict")
        if version == "v1"
        else ("/v2/health/ready", "/v2/models/{model}/infer")
    )


def settings(environment: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    return {}


def overrides(environment: Mapping[str, str], text: str, where: str) -> Overrides:
    """Return the keys that KServe sets, each with its value and origin.

    ``text`` is the config.properties, which takes precedence for keys that KServe does not require. Variables
    TS_… take precedence over all. Raises StartError for an unknown protocol.
    """
    protocol = environment[VARIABLE]
    if protocol not in _ENVELOPES:
        raise StartError(f"{VARIABLE}={protocol}: KServe's protocols are {', '.join(_ENVELOPES)}")
    place = f"{VARIABLE}={protocol}"
    required: Overrides = {
        "inference_address": (_REST, place),
        "management_address": (_MANAGEMENT, place),
        "enable_envvars_config": ("true", place),
    }
    if protocol == "grpc-v2":
        required |= {"grpc_inference_address": ("0.0.0.0", place), "grpc_inference_port": (_GRPC, place)}
    defaults: Overrides = {
        "service_envelope": (_ENVELOPES[protocol], place),
        "metrics_address": (_METRICS, place),
        "disable_token_authorization": ("true", place),  # KServe's own probes and clients send no key
    }
    return merge(defaults, required, text, where)


def without_empty_variables(environment: Mapping[str, str]) -> Mapping[str, str]:
    """Return the environment without empty TS_… variables: KServe fills them from labels that may be
    absent.
    """
    if not environment.get(VARIABLE):
        return environment
    return {name: value for name, value in environment.items() if value.strip() or not name.startswith("TS_")}
