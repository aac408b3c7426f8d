"""The contracts by name."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Any

from serve_app.conformance import containers, protocols
from serve_app.conformance.check import CheckOutcome, ContractCheck, apply

CONTRACTS: Mapping[str, tuple[ContractCheck, ...]] = {
    "kserve-v1": protocols.KSERVE_V1,
    "kserve-v2": protocols.KSERVE_V2,
    "openai": protocols.OPENAI,
    "sagemaker": containers.SAGEMAKER,
    "sagemaker-multi-model": containers.SAGEMAKER_MULTI_MODEL,
    "vertex": containers.VERTEX,
    "mlflow": containers.MLFLOW,
    "azureml": containers.AZUREML,
    "hf-endpoint": containers.HF_ENDPOINT,
}
# The checks of gRPC and the default port of each; their module needs gRPC, which the client does not.
GRPC_CONTRACTS: Mapping[str, tuple[str, int]] = {
    "kserve-v2-grpc": ("KSERVE_V2_GRPC", 7070),
    "torchserve-grpc": ("TORCHSERVE_GRPC", 7070),
    "torchserve-management-grpc": ("TORCHSERVE_MANAGEMENT_GRPC", 7071),
}
NAMES = (*CONTRACTS, *GRPC_CONTRACTS)


def find_checks(contract: str) -> tuple[ContractCheck, ...]:
    """Return the checks of a contract. Raises ImportError where one of gRPC has no gRPC."""
    if contract in CONTRACTS:
        return CONTRACTS[contract]
    module = importlib.import_module("serve_app.conformance.grpc_protocols")
    checks: tuple[ContractCheck, ...] = getattr(module, GRPC_CONTRACTS[contract][0])
    return checks


def run(contract: str, server: Any) -> Iterator[CheckOutcome]:
    """Yield the outcome of each check of a contract.

    ``server`` is a ServerUnderTest, of contracts of gRPC a GrpcServerUnderTest.
    """
    for check in find_checks(contract):
        yield apply(check, server)
