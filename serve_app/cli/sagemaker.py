"""What Amazon SageMaker wants of a server beside its config.properties, as the platform's variables say it.

SAGEMAKER_BIND_TO_PORT is the one port that it reaches. With SAGEMAKER_MULTI_MODE=true it loads and unloads models by
the management API on that same port, expects each to have a worker when it is loaded, and shows no key.
SAGEMAKER_SAFE_PORT_RANGE are ports that nothing else in the container has.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from serve_app import properties
from serve_app.cli.process import StartError

PORT, RANGE, MULTI = "SAGEMAKER_BIND_TO_PORT", "SAGEMAKER_SAFE_PORT_RANGE", "SAGEMAKER_MULTI_MODE"
_ELSE = "8080"  # what SageMaker asks where it says nothing

Said = dict[str, tuple[str, str]]


def overrides(environment: Mapping[str, str], text: str, where: str) -> Said:
    """The keys that SageMaker says, each with its value and the place; none where the server is not SageMaker's.

    ``text`` is the config.properties, which goes before where SageMaker has no opinion. Raises StartError.
    """
    port, multi = environment.get(PORT), environment.get(MULTI, "").lower() == "true"
    said: Said = {}
    if port or multi:
        address = f"http://0.0.0.0:{_port(port or _ELSE)}"
        said["inference_address"] = (address, PORT)
        if multi:
            said["management_address"] = (address, PORT)
            said["enable_model_api"] = ("true", MULTI)
    unsaid: Said = {}
    if multi:
        unsaid = {"default_workers_per_model": ("1", MULTI), "disable_token_authorization": ("true", MULTI)}
    if safe := environment.get(RANGE):
        first = _first(safe)
        unsaid["metrics_address"] = (f"http://127.0.0.1:{first}", RANGE)
        unsaid |= {f"grpc_{which}_port": (str(first + i), RANGE) for i, which in ((1, "inference"), (2, "management"))}
        if not multi:
            unsaid["management_address"] = (f"http://127.0.0.1:{first + 3}", RANGE)
    file = properties.parse(text, where)
    return {**{key: value for key, value in unsaid.items() if key not in file}, **said}


def _port(said: str) -> int:
    if not said.isdecimal() or not 0 < int(said) < 65536:
        raise StartError(f"{PORT}={said}: it is a port from 1 to 65535")
    return int(said)


def _first(said: str) -> int:
    """The first port of a range that has room for ours."""
    ports = re.fullmatch(r"(\d+)-(\d+)", said)
    if ports is None or not 0 < int(ports[1]) <= int(ports[2]) - 3 <= 65535 - 3:
        raise StartError(f"{RANGE}={said}: it is the first and the last of four ports or more, such as 21000-22000")
    return int(ports[1])
