"""A request that runs without a task: its outcome is passed to a callback on the event loop."""

from __future__ import annotations

from collections.abc import Callable

from serve_app.dataplane.key_limits import Admission, charge_tokens
from serve_app.dataplane.request_recorder import RequestRecorder, RequestState
from serve_app.dataplane.version_router import VersionSelection
from serve_app.domain.request import InferenceRequest, InferenceResponse, OnDone, ResponseStream
from serve_app.errors import RelayError

# Starts a request, and returns a function that withdraws it. Raises RelayError.
Submit = Callable[[InferenceRequest, OnDone], Callable[[], None]]


class AdmittedRequest(RequestState):
    """A request with its version and backend. ``submit`` starts it once."""

    __slots__ = ("_admission", "_is_done", "_on_done", "_recorder", "_submit", "_withdraw")

    def __init__(
        self,
        request: InferenceRequest,
        selection: VersionSelection,
        submit: Submit,
        recorder: RequestRecorder,
        admission: Admission | None,
    ) -> None:
        super().__init__(request)
        self.selection = selection
        self.version = selection.route.version
        self._submit = submit
        self._recorder = recorder
        self._admission = admission
        self._is_done = False
        self._on_done: OnDone | None = None
        self._withdraw: Callable[[], None] | None = None

    def submit(self, on_done: OnDone) -> None:
        """Start the request; ``on_done`` receives its outcome, possibly before this method returns."""
        self._on_done = on_done
        try:
            withdraw = self._submit(self.request, self._complete)
            if not self._is_done:
                self._withdraw = withdraw
        except RelayError as error:
            self._complete(error)

    def cancel(self) -> None:
        """Withdraw the request of a client that disconnected; the callback receives nothing."""
        if self._is_done:
            return
        self._is_done, self._on_done = True, None
        if self._withdraw is not None:
            self._withdraw()
        self._recorder.record_disconnect(self)
        if self._admission is not None:
            self._admission.release()

    def _complete(self, outcome: InferenceResponse | ResponseStream | Exception) -> None:
        if self._is_done:
            return
        self._is_done = True
        # Without references in both directions, so that a request is freed without garbage collection.
        on_done, self._on_done, self._withdraw = self._on_done, None, None
        try:
            if isinstance(outcome, RelayError):
                outcome = self._recorder.record_failure(self, outcome)
            elif not isinstance(outcome, Exception):
                outcome = self._recorder.record_response(self, outcome)
            if self._admission is not None:
                self._release(self._admission, outcome)
        except Exception as error:  # the callback answers the client in any case
            outcome = error
        assert on_done is not None
        on_done(outcome)

    def _release(self, admission: Admission, outcome: InferenceResponse | ResponseStream | Exception) -> None:
        """Charge the tokens of a response to the key, and end its admission."""
        if not isinstance(outcome, Exception):
            charge_tokens(admission, self.request, outcome)
        if isinstance(outcome, ResponseStream):
            outcome.add_done_callback(admission.release)
        else:
            admission.release()
