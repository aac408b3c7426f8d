"""The interface of a version's replicas in other processes, which the data plane's routers choose among."""

from __future__ import annotations

from abc import abstractmethod

from serve_app.domain.request import InferenceRequest, InferenceResponse, ResponseStream
from serve_app.domain.routing_table import VersionRoute
from serve_app.runtime.backends import Backend


class ConnectionLost(Exception):
    """The replica or its socket is gone; unanswered requests may be sent to another."""


class ReplicaBackend(Backend):
    """A backend of all replicas of one version, which also reaches each of them."""

    @property
    @abstractmethod
    def route(self) -> VersionRoute:
        """Return the version's entry in the routing table."""

    @abstractmethod
    async def infer_at(self, replica: str, request: InferenceRequest) -> InferenceResponse | ResponseStream:
        """Return the response of one replica. Raises RelayError, and ConnectionLost where it is dead."""

    @abstractmethod
    async def holds(self, replica: str, sequence: str) -> bool:
        """Return whether a replica has the state of a sequence. Raises ConnectionLost where it is dead."""
