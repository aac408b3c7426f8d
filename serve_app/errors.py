"""Everything a caller may be told, as one tree.

Each class carries positional arguments only and makes its message in ``__str__``: an exception
crosses processes by pickle, which calls its class again with ``args``. ``reason`` is the
machine-readable word that every door may show beside its own dialect's text.
"""

from __future__ import annotations


class RelayError(Exception):
    """The root: something Torchrelay can say in a caller's words."""

    reason = "error"
    version = ""  # of the model that was to answer, where that had been chosen already
    arm = ""  # of a trial, as Reply.arm
    retry_after: int | None = None  # seconds after which it is worth to ask again, from 1; None: waiting does not help

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else type(self).__name__


def reason(error: BaseException) -> str:
    """The word for a machine; of what is no RelayError always ``internal``, whatever it calls a reason itself."""
    return error.reason if isinstance(error, RelayError) else "internal"


class BadRequest(RelayError):
    """The request itself is wrong; sending it again unchanged will not help."""

    reason = "bad_request"


class MissingParameter(BadRequest):
    """``MissingParameter(name)``"""

    reason = "missing_parameter"

    def __str__(self) -> str:
        return f"Parameter {self.args[0]} is required."


class InvalidBody(BadRequest):
    """``InvalidBody(message)``: a body that is not what its content type says."""

    reason = "invalid_body"


class InvalidInput(BadRequest):
    """``InvalidInput(message)``: a tensor that is not what it says, or not what the model takes."""

    reason = "invalid_input"


class InvalidArchive(BadRequest):
    """``InvalidArchive(file, what_is_wrong_and_the_cure)``"""

    reason = "invalid_archive"

    def __str__(self) -> str:
        return f"{self.args[0]}: {self.args[1]}"


class DownloadFailed(BadRequest):
    """``DownloadFailed(url, why)``"""

    reason = "download_failed"

    def __str__(self) -> str:
        return f"Failed to download archive from: {self.args[0]}"

    @property
    def detail(self) -> str:
        return self.args[1] if len(self.args) > 1 else ""


class InstallFailed(BadRequest):
    """``InstallFailed(model, the_installers_last_lines)``: what an archive requires cannot be installed."""

    reason = "install_failed"

    def __str__(self) -> str:
        return f"Custom pip package installation failed for model {self.args[0]}"

    @property
    def detail(self) -> str:
        return self.args[1] if len(self.args) > 1 else ""


class ConfigurationError(BadRequest):
    """``ConfigurationError(where, what_is_wrong_and_the_cure)``: a file or setting of the operator's."""

    reason = "configuration"

    def __str__(self) -> str:
        return f"{self.args[0]}: {self.args[1]}"


class InvalidWorkflow(BadRequest):
    """``InvalidWorkflow(where, what_is_wrong_and_the_cure)``: a workflow's document, or its archive."""

    reason = "invalid_workflow"

    def __str__(self) -> str:
        return f"{self.args[0]}: {self.args[1]}"


class InvalidGraph(InvalidWorkflow):
    """``InvalidGraph(where, what_is_wrong_and_the_cure)``: steps that wait for each other, or for nothing."""

    reason = "invalid_graph"


class Forbidden(RelayError):
    """Understood, and refused."""

    reason = "forbidden"


class CannotRemoveDefault(Forbidden):
    """``CannotRemoveDefault(model)``: other versions still stand behind the default one."""

    reason = "default_version"

    def __str__(self) -> str:
        return f"Cannot remove default version for model {self.args[0]}"


class AccessDenied(RelayError):
    """The key that a request showed, if any, does not allow it. TorchServe has one sentence for all of these."""

    reason = "access_denied"

    def __str__(self) -> str:
        return "Token Authorization failed. Token either incorrect, expired, or not provided correctly"


class MissingToken(AccessDenied):
    reason = "missing_token"


class InvalidToken(AccessDenied):
    """No key that is in force; it may have been replaced."""

    reason = "invalid_token"


class ExpiredToken(AccessDenied):
    reason = "expired_token"


class WrongRole(AccessDenied):
    """``WrongRole(right)``: a good key, which is not for this."""

    reason = "wrong_role"


class WrongModel(AccessDenied):
    """``WrongModel(model)``: a good key, which is not for this model."""

    reason = "wrong_model"


class NotFound(RelayError):
    reason = "not_found"


class ModelNotFound(NotFound):
    """``ModelNotFound(model)``"""

    reason = "model_not_found"

    def __str__(self) -> str:
        return f"Model not found: {self.args[0]}"


class VersionNotFound(NotFound):
    """``VersionNotFound(model, version)``"""

    reason = "version_not_found"

    def __str__(self) -> str:
        return f"Model version: {self.args[1]} does not exist for model: {self.args[0]}"


class UnknownDefault(VersionNotFound):
    """``UnknownDefault(model, version)``: a default that is not there; TorchServe words this one apart."""

    def __str__(self) -> str:
        return f"Model version {self.args[1]} does not exist for model {self.args[0]}"


class ArchiveNotFound(NotFound):
    """``ArchiveNotFound(message)``: no archive where the URL points, or a URL that is not allowed."""

    reason = "archive_not_found"


class ResourceNotFound(NotFound):
    """No route of this API."""

    reason = "no_route"

    def __str__(self) -> str:
        return "Requested resource is not found, please refer to API document."


class DeferralNotFound(NotFound):
    """``DeferralNotFound(id)``: it never was, or what came of it is kept no longer."""

    reason = "prediction_not_found"

    def __str__(self) -> str:
        return (
            f"No asynchronous prediction {self.args[0]} is kept here. One is kept until its document's time expires "
            "(asynchronous.keep seconds after it ended)."
        )


class DeferralCancelled(NotFound):
    """``DeferralCancelled(id)``: there is no answer, and there will be none."""

    reason = "cancelled"

    def __str__(self) -> str:
        return f"Asynchronous prediction {self.args[0]} was cancelled and has no answer."


class DeferralLost(NotFound):
    """``DeferralLost(id, why)``: there is no answer, and there will be none; not for the model's sake."""

    reason = "prediction_lost"

    def __str__(self) -> str:
        return f"Asynchronous prediction {self.args[0]} has no answer: {self.args[1]} Send the request again."


class KeyReused(BadRequest):
    """``KeyReused(key, model)``: another request came with the same Idempotency-Key before."""

    reason = "idempotency_key_reused"

    def __str__(self) -> str:
        return (
            f"Idempotency-Key {self.args[0]!r} was used for another request to model {self.args[1]}; "
            "send the same request, or another key."
        )


class MethodNotAllowed(RelayError):
    reason = "method_not_allowed"

    def __str__(self) -> str:
        return "Requested method is not allowed, please refer to API document."


class VersionExists(RelayError):
    """``VersionExists(model, version)``"""

    reason = "version_exists"

    def __str__(self) -> str:
        return f"Model version {self.args[1]} is already registered for model {self.args[0]}"


class WorkflowExists(RelayError):
    """``WorkflowExists(workflow, version)``: an empty version is that of a form which knows none."""

    reason = "workflow_exists"

    def __str__(self) -> str:
        version = f" version {self.args[1]}" if self.args[1] else ""
        return f"Workflow {self.args[0]}{version} is already registered."


class InUse(RelayError):
    """``InUse(message)``: something else that is in force stands against it; the message names it, and the cure."""

    reason = "in_use"


class ExperimentNotFound(NotFound):
    """``ExperimentNotFound(id)``"""

    reason = "experiment_not_found"

    def __str__(self) -> str:
        return f"Experiment not found: {self.args[0]}"


class RolloutNotFound(NotFound):
    """``RolloutNotFound(model)``: it never had one."""

    reason = "rollout_not_found"

    def __str__(self) -> str:
        return f"Model {self.args[0]} has had no rollout; begin one: POST /models/{self.args[0]}/rollout"


class WorkflowNotFound(NotFound):
    """``WorkflowNotFound(workflow)``"""

    reason = "workflow_not_found"

    def __str__(self) -> str:
        return f"Workflow not found: {self.args[0]}"


class WorkflowArchiveNotFound(WorkflowNotFound):
    """``WorkflowArchiveNotFound(message)``: no .war where the URL points, or a URL that is not allowed."""

    reason = "archive_not_found"

    def __str__(self) -> str:
        return str(self.args[0])


class UnknownUnit(NotFound):
    """``UnknownUnit(unit, experiment)``: nobody of this request id or key was assigned an arm."""

    reason = "unknown_unit"

    def __str__(self) -> str:
        return (
            f"Experiment {self.args[1]} has assigned nobody of the request id or key {self.args[0]!r}; "
            "post the X-Request-Id of an answer that it gave, or the key that its caller showed."
        )


class TooLarge(RelayError):
    """``TooLarge(limit_in_bytes)``: the request's body is over the limit."""

    reason = "too_large"

    def __str__(self) -> str:
        return f"The request's body is larger than max_request_size ({self.args[0]} bytes)."


class CallerTooSlow(BadRequest):
    """``CallerTooSlow(limit_in_bytes)``: a streamed answer's pieces came faster than its caller reads them."""

    reason = "caller_too_slow"

    def __str__(self) -> str:
        return f"The answer was ended: its caller is more than {self.args[0]} bytes behind in reading it."


class Unavailable(RelayError):
    """Nobody can answer now. Whoever knows how fast the model works sets ``retry_after``; else it is this."""

    reason = "unavailable"
    retry_after = 1


class QuotaExceeded(Unavailable):
    """``QuotaExceeded(model, version, limit)``: as many calls are under way as the version's maxConcurrentRequests."""

    reason = "quota"

    def __str__(self) -> str:
        return (
            f'Model "{self.args[0]}" Version {self.args[1]} answers {self.args[2]} requests at once '
            "(maxConcurrentRequests) and has no room for this one."
        )


class NoRoomForDeferrals(Unavailable):
    """``NoRoomForDeferrals(setting, limit)``: as much waits, runs or is kept as that setting allows."""

    reason = "asynchronous_full"
    retry_after = 10

    def __str__(self) -> str:
        return (
            f"No more asynchronous predictions are taken now: {self.args[0]} ({self.args[1]}) is reached. Fetch and "
            "DELETE what has ended, or raise the setting."
        )


class ResultsUnreachable(Unavailable):
    """``ResultsUnreachable(place, why_and_the_cure)``: the folder of large requests and answers does not answer."""

    reason = "asynchronous_results"
    retry_after = 10

    def __str__(self) -> str:
        return f"asynchronous.results ({self.args[0]}) cannot be used now: {self.args[1]}"


class TooManySequences(Unavailable):
    """``TooManySequences(model, version, open)``: a replica keeps as many as its share of maxNumSequence."""

    reason = "sequences"

    def __str__(self) -> str:
        return (
            f'Model "{self.args[0]}" Version {self.args[1]} has no room for another sequence: its replica keeps '
            f"{self.args[2]} open (maxNumSequence). End one, or come again when one has ended."
        )


class _NobodyServes(Unavailable):
    """``(model, version or None, detail)``: TorchServe has one sentence for all of these."""

    def __str__(self) -> str:
        # With a version the real server puts its closing quote after the version, and nowhere else.
        version = f'" Version {self.args[1]}"' if self.args[1] else '"'
        return (
            f'Model "{self.args[0]}{version} has no worker to serve inference request. '
            "Please use scale workers API to add workers. If this is a sequence inference, "
            "please check if it is closed, or expired; or exceeds maxSequenceJobQueueSize"
        )

    @property
    def detail(self) -> str:
        return self.args[2] if len(self.args) > 2 else ""


class NoWorker(_NobodyServes):
    """``NoWorker(model, version or None, detail)``: no replica was asked for, or none could start."""

    reason = "no_replica"
    retry_after = 10  # somebody has to scale it, or to mend what keeps it from starting


class QueueFull(_NobodyServes):
    """``QueueFull(model, version or None, detail)``: the replica's bounded queue has no room."""

    reason = "queue_full"


class Loading(_NobodyServes):
    """``Loading(model, version or None, detail)``: replicas are on their way, none is ready yet."""

    reason = "loading"


class DeadlineExceeded(RelayError):
    """``DeadlineExceeded(model, seconds)``: the caller's time was over before there was an answer."""

    reason = "deadline"
    retry_after = 1

    def __str__(self) -> str:
        return f"The deadline of this request passed before model {self.args[0]} answered."


class CannotMeetDeadline(DeadlineExceeded):
    """``CannotMeetDeadline(model, 0.0, predicted, remaining)``: the answer would come too late, so it is not begun.

    ``predicted`` are the seconds until the answer, as the batches before it went; ``remaining`` those of the deadline.
    """

    def __str__(self) -> str:
        return f"Model {self.args[0]} cannot answer within the deadline of this request: {self.detail}."

    @property
    def detail(self) -> str:
        return f"about {self.args[2]:.3g} s are needed and {self.args[3]:.3g} s are left"


class ClientTimeout(DeadlineExceeded):
    """The deadline that passed was the model's own ``clientTimeoutInMills``, not one that the caller set."""

    reason = "client_timeout"


class WorkerDied(RelayError):
    """``WorkerDied(detail)``: the replica that ran the row ended (crash, kill, or response timeout)."""

    reason = "worker_died"

    def __str__(self) -> str:
        return "Worker died."

    @property
    def detail(self) -> str:
        return self.args[0] if self.args else ""


class SequenceLost(RelayError):
    """``SequenceLost(model, sequence, why)``: its state is gone, with its replica or because it has ended."""

    reason = "sequence_lost"

    def __str__(self) -> str:
        return (
            f'Sequence {self.args[1]!r} of model "{self.args[0]}" is lost: {self.args[2]}. '
            "Begin another: name none, or say with a name of yours that it starts."
        )


class ResponseTimeout(WorkerDied):
    """The handler gave no answer within response_timeout, so that its replica was ended."""

    reason = "response_timeout"


class StartFailed(RelayError):
    """``StartFailed(model, version, traceback)``: no replica of the version could be started."""

    reason = "start_failed"

    def __str__(self) -> str:
        return f"Failed to start workers for model {self.args[0]} version: {self.args[1]}"

    @property
    def detail(self) -> str:
        """The handler's own traceback, or what kept it from starting."""
        return self.args[2] if len(self.args) > 2 else ""


class StartOutOfMemory(StartFailed):
    reason = "out_of_memory"


class WorkflowFailed(StartFailed):
    """``WorkflowFailed(workflow, failures, traceback)``: a part of a workflow could not be started, so none stays."""

    def __str__(self) -> str:
        return f"Workflow {self.args[0]} has failed to register. Failures: [{self.args[1]}]"


class NotYet(RelayError):
    """``NotYet(what)``: accepted and stored, not everywhere in force yet."""

    reason = "in_progress"


class HandlerFailed(RelayError):
    """``HandlerFailed(detail)``: the handler raised; ``detail`` holds its traceback."""

    reason = "handler_failed"

    def __str__(self) -> str:
        return "Prediction failed"

    @property
    def detail(self) -> str:
        return self.args[0] if self.args else ""


class InvalidOutput(HandlerFailed):
    """The handler returned something that is not a list."""

    reason = "invalid_output"

    def __str__(self) -> str:
        return "Invalid model predict output"


class CountMismatch(HandlerFailed):
    """The handler returned a list of another length than its batch."""

    reason = "count_mismatch"

    def __str__(self) -> str:
        return "number of batch response mismatched"


class OutputTooLarge(InvalidOutput):
    """``OutputTooLarge(size, limit)``: what the handler returned for one row is over max_response_size."""

    reason = "response_too_large"

    def __str__(self) -> str:
        size, limit = self.args
        return (
            f"The model's answer of {size} bytes is larger than max_response_size ({limit} bytes). "
            "Raise runtime.max_response_size, or let the handler answer with less."
        )

    @property
    def detail(self) -> str:
        return str(self)


class ResultTooLarge(InvalidOutput):
    """``ResultTooLarge(limit)``: an asynchronous prediction's answer is larger than what is kept of one."""

    reason = "response_too_large"

    def __str__(self) -> str:
        return f"The model's answer is larger than asynchronous.max_result_size ({self.args[0]} bytes)."

    @property
    def detail(self) -> str:
        return str(self)


class UnsupportedOutput(HandlerFailed):
    """A returned value that is neither bytes, text, a tensor nor JSON."""

    reason = "unsupported_output"

    def __str__(self) -> str:
        return "Unsupported model output data type."


class OutOfResources(HandlerFailed):
    """The handler ran out of memory, on the host or on the device."""

    reason = "out_of_memory"

    def __str__(self) -> str:
        return "Out of resources"


class HandlerSaid(HandlerFailed):
    """``HandlerSaid(message, code)``: the handler's own PredictionException, its words and its status."""

    reason = "handler_said"

    def __str__(self) -> str:
        return str(self.args[0])

    @property
    def code(self) -> int:
        return int(self.args[1])

    @property
    def detail(self) -> str:
        return ""


class OfStep:
    """``(workflow, step, message, reason, code, detail)``: a step of a workflow went wrong, and the call with it.

    ``message``, ``reason`` and ``detail`` are those of the step's own error, ``code`` is the status that its handler
    asked for, else 0. Each class below answers as the error does whose child it is.
    """

    args: tuple[str, str, str, str, int, str]

    def __str__(self) -> str:
        return f"Step {self.args[1]} of workflow {self.args[0]} failed: {self.args[2]}"

    @property
    def step(self) -> str:
        return self.args[1]

    @property
    def reason(self) -> str:
        return self.args[3]

    @property
    def code(self) -> int:
        return self.args[4]

    @property
    def detail(self) -> str:
        return self.args[5]


class StepFailed(OfStep, HandlerFailed):
    """The step's handler failed, or its worker."""


class StepSaid(OfStep, HandlerSaid):
    """The step's handler refused, in its own words and with its own status."""


class StepRefused(OfStep, BadRequest):
    """What the step was asked is wrong."""


class StepUnavailable(OfStep, Unavailable):
    """Nobody can answer for the step now."""


class StepTimeout(OfStep, DeadlineExceeded):
    """The step's time was over, or the call's."""
