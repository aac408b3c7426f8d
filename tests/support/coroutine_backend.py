"""A backend for tests, whose requests run in tasks."""

from __future__ import annotations

from serve_app.domain.request import Cancel, InferenceRequest, OnDone
from serve_app.runtime.backends import Backend, TaskRequest


class CoroutineBackend(Backend):
    """A backend whose subclasses define the coroutine function ``infer``."""

    def submit(self, request: InferenceRequest, on_done: OnDone) -> Cancel:
        return TaskRequest(self.infer(request), on_done).cancel
