"""What KServe wants of its TorchServe runtime beside the config.properties that lies with the models.

KServe puts PROTOCOL_VERSION into the container, and reaches it at 8080, or at 8081 by gRPC. The files of its users say
another inference address, because a process of KServe's stood before TorchServe: it is not needed here.
"""

from __future__ import annotations

from collections.abc import Mapping

from serve_app import properties
from serve_app.cli.process import StartError

VARIABLE = "PROTOCOL_VERSION"
_ENVELOPES = {"v1": "kserve", "v2": "kservev2", "grpc-v2": "kservev2"}
_REST = "http://0.0.0.0:8080"
_GRPC = "8081"
_MANAGEMENT = "http://127.0.0.1:8085"  # whoever manages can run code: the pod alone
_METRICS = "http://0.0.0.0:8082"

Said = dict[str, tuple[str, str]]


def overrides(environment: Mapping[str, str], text: str, where: str) -> Said:
    """The keys that KServe says, each with its value and the place; none where the server is not KServe's.

    ``text`` is the config.properties, which goes before where KServe has no opinion; variables TS_… go before all.
    Raises StartError for a protocol that is none.
    """
    protocol = environment.get(VARIABLE)
    if not protocol:
        return {}
    if protocol not in _ENVELOPES:
        raise StartError(f"{VARIABLE}={protocol}: KServe's protocols are {', '.join(_ENVELOPES)}")
    place = f"{VARIABLE}={protocol}"
    said = {"inference_address": _REST, "management_address": _MANAGEMENT, "enable_envvars_config": "true"}
    if protocol == "grpc-v2":
        said |= {"grpc_inference_address": "0.0.0.0", "grpc_inference_port": _GRPC}
    unsaid = {"service_envelope": _ENVELOPES[protocol], "metrics_address": _METRICS}
    unsaid["disable_token_authorization"] = "true"  # KServe's own probes and clients show no key
    file = properties.parse(text, where)
    said |= {key: value for key, value in unsaid.items() if key not in file}
    return {key: (value, place) for key, value in said.items()}


def variables(environment: Mapping[str, str]) -> Mapping[str, str]:
    """The environment without TS_… variables that say nothing: KServe fills them in from labels, if there are any."""
    if not environment.get(VARIABLE):
        return environment
    return {name: value for name, value in environment.items() if value.strip() or not name.startswith("TS_")}
