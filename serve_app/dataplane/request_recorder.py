"""The measurement of requests: each is counted once, with its latency, whichever path it takes."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial

from serve_app.dataplane.experiment_collector import ExperimentCollector
from serve_app.dataplane.shadow.mirror import ShadowMirror
from serve_app.dataplane.version_router import VersionSelection
from serve_app.domain.request import InferenceRequest, InferenceResponse, ResponseStream
from serve_app.errors import ClientTimeout, DeadlineExceeded, RelayError
from serve_app.telemetry import tracing
from serve_app.telemetry.metrics import Meters


class RequestState:
    """The progress of one request through the data plane."""

    __slots__ = ("model_timeout", "request", "selection", "span", "started_at", "version")

    def __init__(self, request: InferenceRequest) -> None:
        self.started_at = time.perf_counter()
        self.request, self.span = tracing.begin(request)
        self.selection: VersionSelection | None = None
        self.version = ""
        self.model_timeout = False  # the model's timeout is shorter than the caller's deadline

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started_at


class RequestRecorder:
    """The recorder of one process: metrics, experiments, and the copies for shadow versions."""

    def __init__(self, meters: Meters, collector: ExperimentCollector, mirror: ShadowMirror | None) -> None:
        self._meters = meters
        self._collector = collector
        self._mirror = mirror

    def record_disconnect(self, state: RequestState) -> None:
        """Count a request whose client disconnected."""
        request = state.request
        if state.span is not None:
            tracing.end(state.span, "caller_left", version=state.version)
        self._meters.request(request.model, state.version, "caller_left", state.seconds, request.version)

    def record_failure(self, state: RequestState, raised: RelayError) -> RelayError:
        """Count a failed request, and return the error for its caller."""
        request, selection = state.request, state.selection
        model_timeout = state.model_timeout and isinstance(raised, DeadlineExceeded)
        error = ClientTimeout(*raised.args) if model_timeout else raised
        error.retry_after = raised.retry_after
        error.selected_version = state.version
        if state.span is not None:
            tracing.end(state.span, error, version=state.version)
        # An unknown model is text of the caller and no label: the number of labels would be unbounded.
        model = request.model if state.version else ""
        self._meters.request(model, state.version, error.reason, state.seconds, request.version)
        if selection is None:
            return error
        if self._mirror is not None and selection.routed_by_policy:
            self._mirror.offer(request, state.version, None, 0.0)
        if selection.active_split is not None:
            error.arm = selection.arm_label
            self._collector.record_failure(selection, request.request_id, error.reason)
        return error

    def record_response(
        self, state: RequestState, response: InferenceResponse | ResponseStream
    ) -> InferenceResponse | ResponseStream:
        """Count a response, and return it with the arm of its experiment."""
        request, selection = state.request, state.selection
        assert selection is not None
        if self._mirror is not None and selection.routed_by_policy:
            self._mirror.offer(request, state.version, response, state.seconds)
        if state.span is not None:
            arm = selection.arm_label if selection.active_split is not None else ""
            head = response.head if isinstance(response, ResponseStream) else response
            tracing.end(state.span, version=state.version, arm=arm, status=head.status)
        if isinstance(response, ResponseStream):
            head = response.head
            if selection.active_split is not None:
                head = replace(head, arm=selection.arm_label)
            stream = ResponseStream(head, response.__aiter__())
            stream.add_status_callback(partial(self._record_stream_end, state, selection, response.head))
            return stream
        seconds = state.seconds
        self._meters.request(
            request.model, state.version, "ok", seconds, request.version, response.timings.queue
        )
        if selection.active_split is not None:
            self._collector.record_response(selection, request.request_id, response, seconds)
            return replace(response, arm=selection.arm_label)
        return response

    def _record_stream_end(
        self, state: RequestState, selection: VersionSelection, head: InferenceResponse, status: str
    ) -> None:
        """Count a streamed response; ``status`` is ok, caller_left, or the reason of an error."""
        request, seconds = state.request, state.seconds
        version = selection.route.version
        self._meters.request(request.model, version, status, seconds, request.version, head.timings.queue)
        if selection.active_split is None or status == "caller_left":
            return
        if status == "ok":
            self._collector.record_response(selection, request.request_id, head, seconds, streamed=True)
        else:
            self._collector.record_failure(selection, request.request_id, status)
