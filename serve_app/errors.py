"""The errors that a caller may see, as one tree; ``reason`` is the machine-readable code.

Pickle calls a class again with its positional arguments, which ``fields`` names for its ``template``.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar


def _get_argument(index: int, error: BaseException) -> Any:
    return error.args[index] if index < len(error.args) else ""  # empty where it has fewer of them


class _NamedArguments:
    """A mixin that names positional arguments: ``fields`` are attributes, and the keys of ``template``."""

    args: tuple[Any, ...]
    reason = "error"
    fields: ClassVar[tuple[str, ...]] = ()
    template: ClassVar[str] = ""  # of the message; empty: the message is the first argument

    def __init_subclass__(cls, reason: str = "", fields: tuple[str, ...] = (), **options: Any) -> None:
        super().__init_subclass__(**options)
        if reason:
            cls.reason = reason
        if fields:
            cls.fields = fields
        for index, name in enumerate(fields):
            if name not in cls.__dict__:
                setattr(cls, name, property(partial(_get_argument, index)))

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def _format(self, template: str) -> str:
        return template.format(**{name: getattr(self, name) for name in self.fields})


class RelayError(_NamedArguments, Exception):
    """The root of the tree."""

    selected_version = ""  # of the model; empty before a version was selected
    arm = ""  # of an experiment or a rollout, as InferenceResponse.arm
    retry_after: int | None = None  # seconds, from 1, until a retry may succeed; None: a retry does not help

    def __str__(self) -> str:
        if self.template:
            return self._format(self.template)
        return str(self.args[0]) if self.args else type(self).__name__


def get_reason(error: BaseException) -> str:
    """Return the machine-readable code; ``internal`` for every error that is not a RelayError."""
    return error.reason if isinstance(error, RelayError) else "internal"


class BadRequest(RelayError, reason="bad_request"):
    """The error of a request that is wrong; the same request will fail again."""


class MissingParameter(BadRequest, reason="missing_parameter", fields=("name",)):
    template = "Parameter {name} is required."


class InvalidBody(BadRequest, reason="invalid_body"):
    """A body that does not match its content type."""


class InvalidInput(BadRequest, reason="invalid_input"):
    """A tensor that contradicts its own header, or the model's signature."""


class InvalidArchive(BadRequest, reason="invalid_archive", fields=("file", "problem")):
    template = "{file}: {problem}"


class DownloadFailed(BadRequest, reason="download_failed", fields=("url", "detail")):
    template = "Failed to download archive from: {url}"


class InstallFailed(BadRequest, reason="install_failed", fields=("model", "detail")):
    """A failed installation of an archive's requirements; ``detail``: the last lines of the installer."""

    template = "Custom pip package installation failed for model {model}"


class ConfigurationError(BadRequest, reason="configuration", fields=("place", "problem")):
    template = "{place}: {problem}"


class LimitExceeded(BadRequest, reason="limit_exceeded", fields=("place", "problem", "setting")):
    template = "{place}: {problem}; write a smaller number, or raise limits.{setting} in the settings"


class InvalidWorkflow(BadRequest, reason="invalid_workflow", fields=("place", "problem")):
    template = "{place}: {problem}"


class InvalidGraph(InvalidWorkflow, reason="invalid_graph"):
    """A cycle of steps, or a step whose result is not used."""


class Forbidden(RelayError, reason="forbidden"):
    """A request that is understood and refused."""


class SignatureRejected(Forbidden, reason="signature_rejected", fields=("file", "problem")):
    template = "{file}: {problem}"  # of an archive without a valid signature by a trusted key


class CannotRemoveDefault(Forbidden, reason="default_version", fields=("model",)):
    """A refusal to remove the default version while the model has other versions."""

    template = "Cannot remove default version for model {model}"


class AccessDenied(RelayError, reason="access_denied"):
    """A request whose key is missing or insufficient; TorchServe has one sentence for all of these."""

    template = "Token Authorization failed. Token either incorrect, expired, or not provided correctly"


class MissingToken(AccessDenied, reason="missing_token"):
    pass


class InvalidToken(AccessDenied, reason="invalid_token"):
    """A key that is unknown, or was replaced."""


class ExpiredToken(AccessDenied, reason="expired_token"):
    pass


class MissingPermission(AccessDenied, reason="missing_permission", fields=("right",)):
    pass


class ModelNotAllowed(AccessDenied, reason="model_not_allowed", fields=("model",)):
    pass


class NotFound(RelayError, reason="not_found"):
    pass


class ModelNotFound(NotFound, reason="model_not_found", fields=("model",)):
    template = "Model not found: {model}"


class VersionNotFound(NotFound, reason="version_not_found", fields=("model", "version")):
    template = "Model version: {version} does not exist for model: {model}"


class DefaultVersionNotFound(VersionNotFound):
    """A new default version that does not exist; TorchServe has another text for it."""

    template = "Model version {version} does not exist for model {model}"


class ArchiveNotFound(NotFound, reason="archive_not_found"):
    """A URL without an archive, or one that is not allowed."""


class ResourceNotFound(NotFound, reason="no_route"):
    template = "Requested resource is not found, please refer to API document."


class DocumentVersionNotFound(NotFound, reason="no_document_version", fields=("version", "versions")):
    template = "There is no version {version} of this model's document; there are {versions}."


class PredictionNotFound(NotFound, reason="prediction_not_found", fields=("id",)):
    template = (
        "No asynchronous prediction {id} is kept here. One is kept until its document's time expires "
        "(async_predictions.retention_s seconds after it ended)."
    )


class PredictionCancelled(NotFound, reason="cancelled", fields=("id",)):
    template = "Asynchronous prediction {id} was cancelled and has no answer."


class PredictionLost(NotFound, reason="prediction_lost", fields=("id", "problem")):
    template = "Asynchronous prediction {id} has no answer: {problem} Send the request again."


class IdempotencyKeyReused(BadRequest, reason="idempotency_key_reused", fields=("key", "model")):
    template = (
        "Idempotency-Key {key!r} was used for another request to model {model}; "
        "send the same request, or another key."
    )


class AdapterNotFound(NotFound, reason="adapter_not_found", fields=("model", "adapter", "names")):
    template = "Model {model} has no adapter {adapter!r}. Its adapters: {names}."


class AdapterRejected(BadRequest, reason="adapter_rejected", fields=("adapter", "problem")):
    """A LoRA adapter that the engine cannot apply to its model."""

    template = "Adapter {adapter} cannot be loaded: {problem}"


class KeyNotFound(NotFound, reason="key_not_found", fields=("name",)):
    template = "Key not found: {name}"


class CannotBePooled(BadRequest, reason="cannot_be_pooled", fields=("model", "version", "pool", "problem")):
    template = (
        "Version {version} of model {model} cannot be in the pool {pool}: {problem}. Take pool out of its "
        "model-config.yaml, and it gets replicas of its own."
    )


class MethodNotAllowed(RelayError, reason="method_not_allowed"):
    template = "Requested method is not allowed, please refer to API document."


class VersionExists(RelayError, reason="version_exists", fields=("model", "version")):
    template = "Model version {version} is already registered for model {model}"


class WorkflowExists(RelayError, reason="workflow_exists", fields=("workflow", "version")):
    """A workflow that is registered already; ``version`` is empty in TorchServe's form, which has none."""

    def __str__(self) -> str:
        version = f" version {self.version}" if self.version else ""
        return f"Workflow {self.workflow}{version} is already registered."


class Conflict(RelayError, reason="conflict"):
    """A change that conflicts with an active policy, experiment, rollout or workflow."""


class AdapterExists(Conflict, reason="adapter_exists", fields=("model", "version", "adapter")):
    template = "Version {version} of model {model} has an adapter {adapter} already; remove it first."


class InsufficientResources(Conflict, reason="insufficient_resources"):
    """A version that no node of the cluster can hold."""


class ExperimentNotFound(NotFound, reason="experiment_not_found", fields=("id",)):
    template = "Experiment not found: {id}"


class RolloutNotFound(NotFound, reason="rollout_not_found", fields=("model",)):
    template = "Model {model} has had no rollout; begin one: POST /models/{model}/rollout"


class WorkflowNotFound(NotFound, reason="workflow_not_found", fields=("workflow",)):
    template = "Workflow not found: {workflow}"


class WorkflowArchiveNotFound(WorkflowNotFound, reason="archive_not_found"):
    """A URL without a .war archive, or one that is not allowed; its argument is the message."""

    template = ""


class ExposureNotFound(NotFound, reason="exposure_not_found", fields=("unit", "experiment")):
    template = (
        "Experiment {experiment} has no exposure of the request id or key {unit!r}; "
        "send the X-Request-Id of one of its responses, or the key of the client."
    )


class RateLimited(RelayError, reason="rate_limited", fields=("key", "limit", "value")):
    """A request over a limit of its key; ``limit`` is the name of the limit, ``value`` its value."""

    retry_after: int | None = 1
    template = "The key {key!r} has reached its limit {limit} ({value:g})."


class KeyShareExceeded(RateLimited, reason="key_share_exceeded", fields=("key", "limit", "value")):
    retry_after = 10
    template = (
        "No more asynchronous predictions of the key {key!r} are taken now: its share of "
        "async_predictions.{limit} ({value:g}) is reached. Fetch and DELETE what has ended."
    )


class RequestTooLarge(RelayError, reason="request_too_large", fields=("limit",)):
    template = "The request's body is larger than max_request_size ({limit} bytes)."


class ClientTooSlow(BadRequest, reason="client_too_slow", fields=("limit",)):
    """A client that reads a stream more slowly than it is produced; ``limit``: bytes of its buffer."""

    template = "The answer was ended: its caller is more than {limit} bytes behind in reading it."


class Unavailable(RelayError, reason="unavailable"):
    """A temporary lack of capacity. ``retry_after`` is 1 s unless the latency of the model is known."""

    retry_after: int | None = 1


class QuotaExceeded(Unavailable, reason="quota_exceeded", fields=("model", "version", "limit")):
    template = (
        'Model "{model}" Version {version} answers {limit} requests at once '
        "(maxConcurrentRequests) and has no room for this one."
    )


class AsyncQueueFull(Unavailable, reason="async_queue_full", fields=("setting", "limit")):
    retry_after = 10
    template = (
        "No more asynchronous predictions are taken now: {setting} ({limit}) is reached. Fetch and "
        "DELETE what has ended, or raise the setting."
    )


class ResultStoreUnavailable(Unavailable, reason="result_store_unavailable", fields=("folder", "problem")):
    retry_after = 10
    template = "async_predictions.results ({folder}) cannot be used now: {problem}"


class TooManySequences(Unavailable, reason="too_many_sequences", fields=("model", "version", "count")):
    template = (
        'Model "{model}" Version {version} has no room for another sequence: its replica keeps '
        "{count} open (maxNumSequence). End one, or come again when one has ended."
    )


class PoolBusy(Unavailable, reason="pool_busy", fields=("model", "pool")):
    """A pool in whose host no version can be evicted for another."""

    template = (
        "Model {model} cannot be loaded now: every version that the host of the pool {pool} has loaded is "
        "pinned or in use. Retry, or give the pool more memory or hosts."
    )


class _NoReplicaReady(Unavailable, fields=("model", "version", "detail")):
    """A version without an available replica; TorchServe has one sentence for all of these."""

    def __str__(self) -> str:
        # With a version the real server puts its closing quote after the version, and nowhere else.
        version = f'" Version {self.version}"' if self.version else '"'
        return (
            f'Model "{self.model}{version} has no worker to serve inference request. '
            "Please use scale workers API to add workers. If this is a sequence inference, "
            "please check if it is closed, or expired; or exceeds maxSequenceJobQueueSize"
        )


class NoReplica(_NoReplicaReady, reason="no_replica"):
    """A version that is scaled to zero, or whose replicas cannot start."""

    retry_after: int | None = 10  # an operator has to scale it, or to repair its start


class QueueFull(_NoReplicaReady, reason="queue_full"):
    """A replica whose bounded queue is full."""


class ModelLoading(_NoReplicaReady, reason="loading"):
    """A version whose replicas start, none of which is ready yet."""


class DeadlineExceeded(RelayError, reason="deadline", fields=("model", "seconds")):
    """A deadline of the caller that passed before the response; ``seconds``: how long the request waited."""

    retry_after = 1
    template = "The deadline of this request passed before model {model} answered."


class CannotMeetDeadline(DeadlineExceeded, fields=("model", "seconds", "predicted", "remaining")):
    """A request that is rejected at once because its response would miss the deadline.

    ``predicted``: seconds until the response, by earlier batches; ``remaining``: until the deadline.
    """

    _estimate = "about {predicted:.3g} s are needed and {remaining:.3g} s are left"
    template = f"Model {{model}} cannot answer within the deadline of this request: {_estimate}."

    @property
    def detail(self) -> str:
        return self._format(self._estimate)


class ClientTimeout(DeadlineExceeded, reason="client_timeout"):
    """A deadline set by the model's ``clientTimeoutInMills`` and not by the caller."""


class ReplicaDied(RelayError, reason="replica_died", fields=("detail",)):
    """A replica that ended while it ran the row, by a crash, a kill or a response timeout."""

    template = "Worker died."


class SequenceLost(RelayError, reason="sequence_lost", fields=("model", "sequence", "problem")):
    template = (
        'Sequence {sequence!r} of model "{model}" is lost: {problem}. '
        "Begin another: name none, or say with a name of yours that it starts."
    )


class ResponseTimeout(ReplicaDied, reason="response_timeout"):
    """A handler that exceeded response_timeout; its replica was ended."""


class StartFailed(RelayError, reason="start_failed", fields=("model", "version", "detail")):
    """A version of which no replica could be started; ``detail``: the handler's traceback, or the cause."""

    template = "Failed to start workers for model {model} version: {version}"


class StartOutOfMemory(StartFailed, reason="out_of_memory"):
    pass


class PoolTooSmall(StartFailed, reason="pool_too_small"):
    """A version that needs more memory than its pool's hosts have."""


class WorkflowFailed(StartFailed, fields=("workflow", "failures", "detail")):
    """A workflow that is removed again because one of its models could not be started."""

    template = "Workflow {workflow} has failed to register. Failures: [{failures}]"


class InProgress(RelayError, reason="in_progress"):
    """A change that is stored, and not yet applied by every reader."""


class HandlerFailed(RelayError, reason="handler_failed", fields=("detail",)):
    """An exception of the handler; ``detail``: its traceback."""

    template = "Prediction failed"


class InvalidOutput(HandlerFailed, reason="invalid_output"):
    """A return value of the handler that is not a list."""

    template = "Invalid model predict output"


class BatchSizeMismatch(HandlerFailed, reason="batch_size_mismatch"):
    template = "number of batch response mismatched"


class OutputTooLarge(InvalidOutput, reason="response_too_large", fields=("size", "limit")):
    template = (
        "The model's answer of {size} bytes is larger than max_response_size ({limit} bytes). "
        "Raise runtime.max_response_size, or let the handler answer with less."
    )
    detail = property(str)


class ResultTooLarge(InvalidOutput, reason="response_too_large", fields=("limit",)):
    template = "The model's answer is larger than async_predictions.max_result_size ({limit} bytes)."
    detail = property(str)


class UnsupportedOutput(HandlerFailed, reason="unsupported_output"):
    template = "Unsupported model output data type."  # neither bytes, text, a tensor nor JSON


class HandlerOutOfMemory(HandlerFailed, reason="out_of_memory"):
    template = "Out of resources"


class HandlerRejected(HandlerFailed, reason="handler_rejected", fields=("message", "code")):
    """A PredictionException of the handler, with its message and its status."""

    detail = ""
    template = "{message}"

    @property
    def code(self) -> int:
        return int(self.args[1])


class WorkflowStepError(_NamedArguments, fields=("workflow", "step", "message", "reason", "code", "detail")):
    """A mixin for a failed step of a workflow, which fails the whole request.

    ``message``, ``reason`` and ``detail`` are those of the step's own error. ``code`` is the status that its
    handler requested, else 0. Each class below has the status of the error whose child it is.
    """

    template = "Step {step} of workflow {workflow} failed: {message}"


class StepFailed(WorkflowStepError, HandlerFailed):
    """A failure of the step's handler, or of its replica."""


class StepRejected(WorkflowStepError, HandlerRejected):
    """A PredictionException of the step's handler."""


class StepBadRequest(WorkflowStepError, BadRequest):
    """An input that is wrong for the step."""


class StepUnavailable(WorkflowStepError, Unavailable):
    """A lack of capacity for the step."""


class StepTimeout(WorkflowStepError, DeadlineExceeded):
    """The timeout of the step, or the deadline of the request."""
