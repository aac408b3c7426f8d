"""Connections to replicas on other hosts, which break off when that host is lost.

Ray Serve's handles send requests over gRPC channels with Ray's keepalive, whose timeout of 120 s is also that
of TCP's acknowledgements. Requests to a lost host would wait for so long, and, if it returns, for as long as
TCP waits before it sends again. ``RAY_grpc_client_keepalive_timeout_ms`` would change Ray's other channels as
well: after 10 s the controller would then replace the replicas of a host that is about to return.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ray._private import grpc_utils
from ray.serve._private.request_router import replica_wrapper

# Without an acknowledgement, also of HAProxy. The kernels detect it, so a replica may compute for
# as long as it likes. TCP repeats a lost packet four times meanwhile.
LOST_HOST_TIMEOUT_S = 5


def break_off_lost_connections() -> None:
    """Make the channels that this process opens fail where their host acknowledges nothing."""
    module: Any = replica_wrapper
    module.init_grpc_channel = _init_grpc_channel


def _init_grpc_channel(address: str, options: Sequence[tuple[str, Any]], asynchronous: bool) -> Any:
    """Return a channel, as Ray's function of this name."""
    timeout = ("grpc.keepalive_timeout_ms", LOST_HOST_TIMEOUT_S * 1000)
    return grpc_utils.init_grpc_channel(address, [*options, timeout], asynchronous=asynchronous)
