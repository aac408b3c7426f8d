"""A backend for tests, whose requests run in tasks."""

from __future__ import annotations

from collections.abc import AsyncIterator

from serve_app.domain.request import Cancel, InferenceRequest, InferenceResponse, OnDone, ResponseStream
from serve_app.domain.routing_table import ModelRoute, RoutingTable, VersionRoute
from serve_app.runtime.backends import Backend, TaskRequest


class CoroutineBackend(Backend):
    """A backend whose subclasses define the coroutine function ``infer``."""

    def submit(self, request: InferenceRequest, on_done: OnDone) -> Cancel:
        return TaskRequest(self.infer(request), on_done).cancel


class Pieces(CoroutineBackend):
    """A backend whose responses are streams of three chunks."""

    async def infer(self, call: InferenceRequest) -> InferenceResponse | ResponseStream:
        async def bodies() -> AsyncIterator[bytes]:
            for piece in (b"a", b"b", b"c"):
                yield piece

        return ResponseStream(InferenceResponse(b""), bodies())


def table(generation: int = 1, **phases: str) -> RoutingTable:
    """Return a table of model m, whose versions have these phases; the first one is the default."""
    versions = {
        v: VersionRoute(v, p, replicas=int(p == "ready"), job_queue_size=2) for v, p in phases.items()
    }
    return RoutingTable(generation, {"m": ModelRoute(next(iter(phases)), versions)}, startup_complete=True)
