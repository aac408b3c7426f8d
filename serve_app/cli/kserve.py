"""KServe's requirements for its TorchServe runtime, besides the config.properties of the models.

KServe sets PROTOCOL_VERSION in the container and connects to port 8080, or to 8081 over gRPC. The files of
its users have another inference address, because KServe's own process ran in front of TorchServe. Here that
process is not needed.
"""

from __future__ import annotations

from collections.abc import Mapping

from serve_app import torchserve_config
from serve_app.cli.errors import StartError

VARIABLE = "PROTOCOL_VERSION"
_ENVELOPES = {"v1": "kserve", "v2": "kservev2", "grpc-v2": "kservev2"}
_REST = "http://0.0.0.0:8080"
_GRPC = "8081"
_MANAGEMENT = "http://127.0.0.1:8085"  # management can run code, so only the pod may connect
_METRICS = "http://0.0.0.0:8082"

Overrides = dict[str, tuple[str, str]]


def overrides(environment: Mapping[str, str], text: str, where: str) -> Overrides:
    """Return the keys that KServe sets, each with its value and origin; none outside KServe.

    ``text`` is the config.properties, which takes precedence for keys that KServe does not require. Variables
    TS_… take precedence over all. Raises StartError for an unknown protocol.
    """
    protocol = environment.get(VARIABLE)
    if not protocol:
        return {}
    if protocol not in _ENVELOPES:
        raise StartError(f"{VARIABLE}={protocol}: KServe's protocols are {', '.join(_ENVELOPES)}")
    place = f"{VARIABLE}={protocol}"
    required = {
        "inference_address": _REST,
        "management_address": _MANAGEMENT,
        "enable_envvars_config": "true",
    }
    if protocol == "grpc-v2":
        required |= {"grpc_inference_address": "0.0.0.0", "grpc_inference_port": _GRPC}
    defaults = {"service_envelope": _ENVELOPES[protocol], "metrics_address": _METRICS}
    defaults["disable_token_authorization"] = "true"  # KServe's own probes and clients send no key
    in_file = torchserve_config.parse(text, where)
    required |= {key: value for key, value in defaults.items() if key not in in_file}
    return {key: (value, place) for key, value in required.items()}


def without_empty_variables(environment: Mapping[str, str]) -> Mapping[str, str]:
    """Return the environment without empty TS_… variables: KServe fills them from labels that may be
    absent.
    """
    if not environment.get(VARIABLE):
        return environment
    return {name: value for name, value in environment.items() if value.strip() or not name.startswith("TS_")}
