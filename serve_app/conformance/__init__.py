"""Checks of any server against the documented contracts of platforms and protocols, over HTTP and gRPC.

Nothing here depends on Torchrelay: a server is an address, the name of a model and a valid input.
"""

from serve_app.conformance.check import CheckOutcome, ContractCheck, ContractViolation, ServerUnderTest
from serve_app.conformance.contracts import CONTRACTS, GRPC_CONTRACTS, NAMES, find_checks, run

__all__ = [
    "CONTRACTS",
    "GRPC_CONTRACTS",
    "NAMES",
    "CheckOutcome",
    "ContractCheck",
    "ContractViolation",
    "ServerUnderTest",
    "find_checks",
    "run",
]
