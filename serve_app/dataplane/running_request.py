"""Running requests, and their measurement: each is counted once, with its latency."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial

from serve_app.dataplane.access_limits import Admission, charge_tokens
from serve_app.dataplane.experiment_collector import ExperimentCollector
from serve_app.dataplane.routing.version_router import VersionSelection
from serve_app.dataplane.shadow.mirror import ShadowMirror
from serve_app.domain.request import (
    Cancel,
    InferenceRequest,
    InferenceResponse,
    OnDone,
    Outcome,
    ResponseStream,
)
from serve_app.errors import ClientTimeout, DeadlineExceeded, RelayError
from serve_app.runtime.backends import Backend
from serve_app.telemetry import tracing
from serve_app.telemetry.metrics import Meters


class RunningRequest:
    """A request on its way through the data plane. ``start`` runs it once.

    ``on_done`` receives its outcome once, after it was recorded; nothing after ``cancel``.
    """

    __slots__ = (
        "_admission",
        "_on_done",
        "_recorder",
        "_withdraw",
        "model_timeout",
        "request",
        "selection",
        "span",
        "started_at",
        "version",
    )

    def __init__(
        self,
        request: InferenceRequest,
        on_done: OnDone,
        recorder: RequestRecorder,
        admission: Admission | None,
    ) -> None:
        self.started_at = time.perf_counter()
        self.request, self.span = tracing.begin(request)
        self.selection: VersionSelection | None = None
        self.version = ""
        self.model_timeout = False  # the model's timeout is shorter than the caller's deadline
        self._recorder = recorder
        self._admission = admission
        self._on_done: OnDone | None = on_done
        self._withdraw: Cancel | None = None

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started_at

    def start(self, backend: Backend) -> None:
        """Start the request in a backend. Raises RelayError."""
        withdraw = backend.submit(self.request, self.complete)
        if self._on_done is not None:
            self._withdraw = withdraw

    def cancel(self) -> None:
        """Withdraw the request of a client that disconnected."""
        if self._on_done is None:
            return
        self._on_done, withdraw = None, self._withdraw
        if withdraw is not None:
            withdraw()
        self._recorder.record_disconnect(self)
        if self._admission is not None:
            self._admission.release()

    def complete(self, outcome: Outcome) -> None:
        """Record the outcome, and pass it to the client's callback."""
        # Without references in both directions, so that a request is freed without garbage collection.
        on_done, self._on_done, self._withdraw = self._on_done, None, None
        assert on_done is not None
        try:
            if isinstance(outcome, RelayError):
                outcome = self._recorder.record_failure(self, outcome)
            elif not isinstance(outcome, Exception):
                outcome = self._recorder.record_response(self, outcome)
            if self._admission is not None:
                self._release(self._admission, outcome)
        except Exception as error:  # the client is answered in any case
            outcome = error
        on_done(outcome)

    def _release(self, admission: Admission, outcome: Outcome) -> None:
        """Charge the tokens of a response to the key, and end its admission."""
        if not isinstance(outcome, Exception):
            charge_tokens(admission, self.request, outcome)
        if isinstance(outcome, ResponseStream):
            outcome.add_done_callback(admission.release)
        else:
            admission.release()


class RequestRecorder:
    """The recorder of one process: metrics, experiments, and the copies for shadow versions."""

    def __init__(self, meters: Meters, collector: ExperimentCollector, mirror: ShadowMirror | None) -> None:
        self._meters = meters
        self._collector = collector
        self._mirror = mirror

    def record_disconnect(self, running: RunningRequest) -> None:
        """Count a request whose client disconnected."""
        request = running.request
        if running.span is not None:
            tracing.end(running.span, "caller_left", version=running.version)
        self._meters.request(request.model, running.version, "caller_left", running.seconds, request.version)

    def record_failure(self, running: RunningRequest, raised: RelayError) -> RelayError:
        """Count a failed request, and return the error for its caller."""
        request, selection = running.request, running.selection
        model_timeout = running.model_timeout and isinstance(raised, DeadlineExceeded)
        error = ClientTimeout(*raised.args) if model_timeout else raised
        error.retry_after = raised.retry_after
        error.selected_version = running.version
        if running.span is not None:
            tracing.end(running.span, error, version=running.version)
        # An unknown model is text of the caller and no label: the number of labels would be unbounded.
        model = request.model if running.version else ""
        self._meters.request(model, running.version, error.reason, running.seconds, request.version)
        if selection is None:
            return error
        if self._mirror is not None and selection.routed_by_policy:
            self._mirror.offer(request, running.version, None, 0.0)
        if selection.active_split is not None:
            error.arm = selection.arm_label
            self._collector.record_failure(selection, request.request_id, error.reason)
        return error

    def record_response(
        self, running: RunningRequest, response: InferenceResponse | ResponseStream
    ) -> InferenceResponse | ResponseStream:
        """Count a response, and return it with the arm of its experiment."""
        request, selection = running.request, running.selection
        assert selection is not None
        if self._mirror is not None and selection.routed_by_policy:
            self._mirror.offer(request, running.version, response, running.seconds)
        if running.span is not None:
            arm = selection.arm_label if selection.active_split is not None else ""
            head = response.head if isinstance(response, ResponseStream) else response
            tracing.end(running.span, version=running.version, arm=arm, status=head.status)
        if isinstance(response, ResponseStream):
            head = response.head
            if selection.active_split is not None:
                head = replace(head, arm=selection.arm_label)
            stream = ResponseStream(head, response.__aiter__())
            stream.add_status_callback(partial(self._record_stream_end, running, selection, response.head))
            return stream
        seconds = running.seconds
        self._meters.request(
            request.model, running.version, "ok", seconds, request.version, response.timings.queue
        )
        if selection.active_split is not None:
            self._collector.record_response(selection, request.request_id, response, seconds)
            return replace(response, arm=selection.arm_label)
        return response

    def _record_stream_end(
        self, running: RunningRequest, selection: VersionSelection, head: InferenceResponse, status: str
    ) -> None:
        """Count a streamed response; ``status`` is ok, caller_left, or the reason of an error."""
        request, seconds = running.request, running.seconds
        version = selection.route.version
        self._meters.request(request.model, version, status, seconds, request.version, head.timings.queue)
        if selection.active_split is None or status == "caller_left":
            return
        if status == "ok":
            self._collector.record_response(selection, request.request_id, head, seconds, streamed=True)
        else:
            self._collector.record_failure(selection, request.request_id, status)
