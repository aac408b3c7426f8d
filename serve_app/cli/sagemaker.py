"""Amazon SageMaker's requirements for a server besides its config.properties, from the platform's variables.

SAGEMAKER_BIND_TO_PORT is the only port that it connects to. With SAGEMAKER_MULTI_MODE=true it loads and
unloads models with the management API on that same port, expects each loaded model to have a worker, and
sends no key. SAGEMAKER_SAFE_PORT_RANGE are ports that nothing else in the container uses.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from serve_app import torchserve_config
from serve_app.cli.errors import StartError

PORT, RANGE, MULTI = "SAGEMAKER_BIND_TO_PORT", "SAGEMAKER_SAFE_PORT_RANGE", "SAGEMAKER_MULTI_MODE"
_DEFAULT_PORT = "8080"  # where SageMaker connects by default
_MODELS = "file:///opt/ml/models/.*"  # where SageMaker unpacks the models that it loads by path

Overrides = dict[str, tuple[str, str]]


def overrides(environment: Mapping[str, str], text: str, where: str) -> Overrides:
    """Return the keys that SageMaker sets, each with its value and origin; none outside SageMaker.

    ``text`` is the config.properties, which takes precedence for keys that SageMaker does not require. Raises
    StartError.
    """
    port, multi = environment.get(PORT), environment.get(MULTI, "").lower() == "true"
    required: Overrides = {}
    if port or multi:
        address = f"http://0.0.0.0:{_port(port or _DEFAULT_PORT)}"
        required["inference_address"] = (address, PORT)
        if multi:
            required["management_address"] = (address, PORT)
            required["enable_model_api"] = ("true", MULTI)
    defaults: Overrides = {}
    if multi:
        defaults = {
            "default_workers_per_model": ("1", MULTI),
            "disable_token_authorization": ("true", MULTI),
            "allowed_urls": (_MODELS, MULTI),
        }
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
