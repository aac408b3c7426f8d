"""Ray Serve's proxy of the head node, in the process of the actor that runs HAProxy there.

HAProxy sends a request to this proxy where a version has no replica. Ray Serve starts an actor for it, which
takes 55 MiB and wakes as often as any other process of Ray Serve.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

from ray.serve._private import controller as ray_controller
from ray.serve._private import proxy as ray_proxy
from ray.serve._private import proxy_state as ray_proxy_state
from ray.serve._private.constants import (
    RAY_SERVE_FALLBACK_PROXY_GRPC_PORT,
    RAY_SERVE_FALLBACK_PROXY_HTTP_PORT,
)

_RayProxy: Any = ray_proxy.ProxyActor.__ray_metadata__.modified_class.__ray_actor_class__


class FallbackProxy(_RayProxy):
    """Ray Serve's proxy with the ports of its fallback, as an object of another actor."""

    def __init__(self, http_options: Any, grpc_options: Any, **options: Any) -> None:
        http_options, grpc_options = deepcopy(http_options), deepcopy(grpc_options)
        http_options.port = RAY_SERVE_FALLBACK_PROXY_HTTP_PORT
        grpc_options.port = RAY_SERVE_FALLBACK_PROXY_GRPC_PORT
        super().__init__(http_options, grpc_options, **options)


class ProxyStateManager(ray_proxy_state.ProxyStateManager):
    """Ray Serve's register of proxies, whose fallback is the proxy of the head node."""

    def _start_fallback_proxy_if_needed(self, *_: Any, **options: Any) -> None:
        """Start no actor: that of HAProxy has the fallback."""

    def started_fallback_proxy_at_least_once(self) -> bool:
        with self._head_proxy_as_fallback():
            return super().started_fallback_proxy_at_least_once()

    def get_fallback_proxy_targets(self) -> Any:
        with self._head_proxy_as_fallback():
            return super().get_fallback_proxy_targets()

    @contextlib.contextmanager
    def _head_proxy_as_fallback(self) -> Iterator[None]:
        """Use the state of the head node's proxy in the block; elsewhere Ray would stop or list it twice."""
        self._fallback_proxy_state = self._proxy_states.get(self._head_node_id)
        try:
            yield
        finally:
            self._fallback_proxy_state = None


def install() -> None:
    """Make Ray Serve's controller, in whose process this runs, start no fallback proxy of its own."""
    controller: Any = ray_controller
    controller.ProxyStateManager = ProxyStateManager
