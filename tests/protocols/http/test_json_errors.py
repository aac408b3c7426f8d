"""Every class of the tree through TorchServe's table."""

from __future__ import annotations

import json
import pickle

import pytest

from serve_app import errors
from serve_app.protocols.http.json_errors import (
    TABLE,
    JsonSyntaxError,
    TokenNotIssued,
    WorkflowNodeFailed,
    encode_json,
    look_up,
    to_document,
)

NO_WORKER = (
    "has no worker to serve inference request. Please use scale workers API to add workers. If this is a sequence "  # noqa: E501
    "inference, please check if it is closed, or expired; or exceeds maxSequenceJobQueueSize"
)
NO_KEY = "Token Authorization failed. Token either incorrect, expired, or not provided correctly"
REFUSED = [
    errors.AccessDenied(),
    errors.MissingToken(),
    errors.InvalidToken(),
    errors.ExpiredToken(),
    errors.MissingPermission("infer"),
    errors.ModelNotAllowed("m"),
]
STEP = ("w", "s", "no", "handler_rejected", 418, "secret")
STEP_SAYS = "Step s of workflow w failed: no"
# One instance of every class that a caller can be told: status, type, message as TorchServe has them.
EXPECTED = [
    (errors.BadRequest("no"), 400, "BadRequestException", "no"),
    (
        errors.ClientTooSlow(9),
        400,
        "BadRequestException",
        "The answer was ended: its caller is more than 9 bytes behind in reading it.",
    ),
    (errors.MissingParameter("url"), 400, "BadRequestException", "Parameter url is required."),
    (errors.InvalidBody("no"), 400, "BadRequestException", "no"),
    (errors.InvalidInput("no"), 400, "BadRequestException", "no"),
    (
        errors.LimitExceeded("here", "batch_size is 9", "batch_size"),
        400,
        "BadRequestException",
        "here: batch_size is 9; write a smaller number, or raise limits.batch_size in the settings",
    ),
    (JsonSyntaxError("no"), 400, "JsonSyntaxException", "no"),
    (errors.InvalidArchive("a.mar", "no"), 400, "InvalidModelException", "a.mar: no"),
    (errors.DownloadFailed("u", "w"), 400, "DownloadArchiveException", "Failed to download archive from: u"),
    (
        errors.InstallFailed("m", "no"),
        400,
        "ModelException",
        "Custom pip package installation failed for model m",
    ),
    (errors.ConfigurationError("f", "no"), 400, "BadRequestException", "f: no"),
    (errors.Forbidden("no"), 403, "IllegalArgumentException", "no"),
    (errors.SignatureRejected("m.mar", "no"), 403, "IllegalArgumentException", "m.mar: no"),
    (
        errors.CannotRemoveDefault("m"),
        403,
        "InvalidModelVersionException",
        "Cannot remove default version for model m",
    ),
    *((refused, 400, "InvalidKeyException", NO_KEY) for refused in REFUSED),
    (
        TokenNotIssued("missing_token"),
        400,
        "InvalidKeyException",
        NO_KEY.replace("Authorization", "Authentication"),
    ),
    (errors.NotFound("no"), 404, "ResourceNotFoundException", "no"),
    (errors.ModelNotFound("m"), 404, "ModelNotFoundException", "Model not found: m"),
    (
        errors.DocumentVersionNotFound("4", "2 and 3"),
        404,
        "ResourceNotFoundException",
        "There is no version 4 of this model's document; there are 2 and 3.",
    ),
    (
        errors.VersionNotFound("m", "3"),
        404,
        "ModelVersionNotFoundException",
        "Model version: 3 does not exist for model: m",
    ),
    (
        errors.DefaultVersionNotFound("m", "3"),
        404,
        "ModelVersionNotFoundException",
        "Model version 3 does not exist for model m",
    ),
    (errors.ArchiveNotFound("empty url"), 404, "ModelNotFoundException", "empty url"),
    (
        errors.ResourceNotFound(),
        404,
        "ResourceNotFoundException",
        "Requested resource is not found, please refer to API document.",
    ),
    (
        errors.MethodNotAllowed(),
        405,
        "MethodNotAllowedException",
        "Requested method is not allowed, please refer to API document.",
    ),
    (errors.Conflict("no"), 409, "ConflictStatusException", "no"),
    (errors.InsufficientResources("no node"), 409, "ConflictStatusException", "no node"),
    (
        errors.RolloutNotFound("m"),
        404,
        "ResourceNotFoundException",
        "Model m has had no rollout; begin one: POST /models/m/rollout",
    ),
    (errors.ExperimentNotFound("e"), 404, "ResourceNotFoundException", "Experiment not found: e"),
    (
        errors.ExposureNotFound("u", "e"),
        404,
        "ResourceNotFoundException",
        "Experiment e has no exposure of the request id or key 'u'; "
        "send the X-Request-Id of one of its responses, or the key of the client.",
    ),
    (
        errors.VersionExists("m", "1.0"),
        409,
        "ConflictStatusException",
        "Model version 1.0 is already registered for model m",
    ),
    (errors.NoReplica("m", None), 503, "ServiceUnavailableException", f'Model "m" {NO_WORKER}'),
    (errors.QueueFull("m", "1.0"), 503, "ServiceUnavailableException", f'Model "m" Version 1.0" {NO_WORKER}'),
    (errors.ModelLoading("m", None), 503, "ServiceUnavailableException", f'Model "m" {NO_WORKER}'),
    (errors.Unavailable("no"), 503, "ServiceUnavailableException", "no"),
    (
        errors.TooManySequences("m", "1.0", 4),
        503,
        "ServiceUnavailableException",
        'Model "m" Version 1.0 has no room for another sequence: its replica keeps 4 open (maxNumSequence). '
        "End one, or come again when one has ended.",
    ),
    (
        errors.AsyncQueueFull("async_predictions.max_bytes", 10),
        503,
        "ServiceUnavailableException",
        "No more asynchronous predictions are taken now: async_predictions.max_bytes (10) is reached. "
        "Fetch and DELETE what has ended, or raise the setting.",
    ),
    (
        errors.IdempotencyKeyReused("k", "m"),
        422,
        "IdempotencyKeyException",
        "Idempotency-Key 'k' was used for another request to model m; send the same request, or another key.",
    ),
    (
        errors.PredictionNotFound("1f"),
        404,
        "ResourceNotFoundException",
        "No asynchronous prediction 1f is kept here. One is kept until its document's time expires "
        "(async_predictions.retention_s seconds after it ended).",
    ),
    (
        errors.PredictionCancelled("1f"),
        410,
        "PredictionCancelledException",
        "Asynchronous prediction 1f was cancelled and has no answer.",
    ),
    (
        errors.PredictionLost("1f", "it is gone."),
        410,
        "PredictionLostException",
        "Asynchronous prediction 1f has no answer: it is gone. Send the request again.",
    ),
    (
        errors.ResultStoreUnavailable("s3://a/b", "it is down; start it"),
        503,
        "ServiceUnavailableException",
        "async_predictions.results (s3://a/b) cannot be used now: it is down; start it",
    ),
    (
        errors.ResultTooLarge(10),
        503,
        "InternalServerException",
        "The model's answer is larger than async_predictions.max_result_size (10 bytes).",
    ),
    (
        errors.SequenceLost("m", "s", "it has ended"),
        410,
        "SequenceLostException",
        "Sequence 's' of model \"m\" is lost: it has ended. "
        "Begin another: name none, or say with a name of yours that it starts.",
    ),
    (
        errors.QuotaExceeded("m", "1.0", 4),
        429,
        "TooManyRequestsException",
        'Model "m" Version 1.0 answers 4 requests at once (maxConcurrentRequests) and has no room for this one.',  # noqa: E501
    ),
    (
        errors.DeadlineExceeded("m", 1.0),
        504,
        "RequestTimeoutException",
        "The deadline of this request passed before model m answered.",
    ),
    (
        errors.CannotMeetDeadline("m", 0.0, 2.5, 1.25),
        504,
        "RequestTimeoutException",
        "Model m cannot answer within the deadline of this request: about 2.5 s are needed and 1.25 s are left.",  # noqa: E501
    ),
    (
        errors.ClientTimeout("m", 1.0),
        504,
        "RequestTimeoutException",
        "The deadline of this request passed before model m answered.",
    ),
    (
        errors.AdapterNotFound("m", "a", "b, c"),
        404,
        "ResourceNotFoundException",
        "Model m has no adapter 'a'. Its adapters: b, c.",
    ),
    (
        errors.AdapterExists("m", "1.0", "a"),
        409,
        "ConflictStatusException",
        "Version 1.0 of model m has an adapter a already; remove it first.",
    ),
    (
        errors.AdapterRejected("a", "no"),
        400,
        "BadRequestException",
        "Adapter a cannot be loaded: no",
    ),
    (errors.KeyNotFound("k"), 404, "ResourceNotFoundException", "Key not found: k"),
    (
        errors.RateLimited("k", "requests_per_second", 5),
        429,
        "TooManyRequestsException",
        "The key 'k' has reached its limit requests_per_second (5).",
    ),
    (
        errors.KeyShareExceeded("k", "max_jobs", 5),
        429,
        "TooManyRequestsException",
        "No more asynchronous predictions of the key 'k' are taken now: its share of "
        "async_predictions.max_jobs (5) is reached. Fetch and DELETE what has ended.",
    ),
    (
        errors.CannotBePooled("m", "1.0", "p", "no"),
        400,
        "BadRequestException",
        "Version 1.0 of model m cannot be in the pool p: no. Take pool out of its model-config.yaml, and it "
        "gets replicas of its own.",
    ),
    (
        errors.PoolBusy("m", "p"),
        503,
        "ServiceUnavailableException",
        "Model m cannot be loaded now: every version that the host of the pool p has loaded is pinned or in "
        "use. Retry, or give the pool more memory or hosts.",
    ),
    (
        errors.PoolTooSmall("m", "1.0", ""),
        500,
        "InternalServerException",
        "Failed to start workers for model m version: 1.0",
    ),
    (errors.ReplicaDied("why"), 500, "InternalServerException", "Worker died."),
    (errors.ResponseTimeout("why"), 500, "InternalServerException", "Worker died."),
    (
        errors.StartFailed("m", "1.0", ""),
        500,
        "InternalServerException",
        "Failed to start workers for model m version: 1.0",
    ),
    (
        errors.StartOutOfMemory("m", "1.0", ""),
        507,
        "InternalServerException",
        "Failed to start workers for model m version: 1.0",
    ),
    (
        errors.WorkflowFailed("w", "Workflow Node w__m failed to register. Details: no", "why"),
        500,
        "WorkflowException",
        "Workflow w has failed to register. Failures: [Workflow Node w__m failed to register. Details: no]",
    ),
    (errors.InvalidWorkflow("w.war", "no"), 400, "InvalidWorkflowException", "w.war: no"),
    (errors.InvalidGraph("w.war", "no"), 400, "InvalidDAGException", "w.war: no"),
    (errors.WorkflowNotFound("w"), 404, "WorkflowNotFoundException", "Workflow not found: w"),
    (errors.WorkflowArchiveNotFound("not in u"), 404, "WorkflowNotFoundException", "not in u"),
    (errors.WorkflowExists("w", ""), 409, "ConflictStatusException", "Workflow w is already registered."),
    (
        errors.WorkflowExists("w", "2.0"),
        409,
        "ConflictStatusException",
        "Workflow w version 2.0 is already registered.",
    ),
    (errors.StepFailed(*STEP), 503, "InternalServerException", STEP_SAYS),
    (errors.StepRejected(*STEP), 418, "InternalServerException", STEP_SAYS),
    (errors.StepBadRequest(*STEP), 400, "BadRequestException", STEP_SAYS),
    (errors.StepUnavailable(*STEP), 503, "ServiceUnavailableException", STEP_SAYS),
    (errors.StepTimeout(*STEP), 504, "RequestTimeoutException", STEP_SAYS),
    (WorkflowNodeFailed(*STEP), 500, "InternalServerException", "Error executing s"),
    (errors.HandlerFailed("traceback"), 503, "InternalServerException", "Prediction failed"),
    (errors.InvalidOutput(), 503, "InternalServerException", "Invalid model predict output"),
    (
        errors.OutputTooLarge(2000, 1000),
        503,
        "InternalServerException",
        "The model's answer of 2000 bytes is larger than max_response_size (1000 bytes). "
        "Raise runtime.max_response_size, or let the handler answer with less.",
    ),
    (errors.BatchSizeMismatch(), 503, "InternalServerException", "number of batch response mismatched"),
    (errors.UnsupportedOutput(), 503, "InternalServerException", "Unsupported model output data type."),
    (errors.HandlerOutOfMemory("traceback"), 507, "InternalServerException", "Out of resources"),
    (errors.HandlerRejected("my words", 418), 418, "InternalServerException", "my words"),
    (errors.HandlerRejected("my words", 413), 507, "InternalServerException", "my words"),
    (errors.HandlerRejected("my words", 42), 500, "InternalServerException", "my words"),
]


def tree(cls: type) -> set[type]:
    return {cls}.union(
        *(tree(child) for child in cls.__subclasses__() if child.__module__ == errors.__name__)
    )


@pytest.mark.parametrize(("error", "status", "name", "message"), EXPECTED, ids=lambda v: type(v).__name__)
def test_error_answers_as_torchserve_does(error: Exception, status: int, name: str, message: str) -> None:
    assert look_up(error) == (status, name)
    result = to_document(error)
    assert result is not None
    assert {key: result[key] for key in ("code", "type", "message")} == {
        "code": status,
        "type": name,
        "message": message,
    }


@pytest.mark.parametrize("error", [error for error, *_ in EXPECTED], ids=lambda error: type(error).__name__)
def test_an_error_crosses_processes_with_what_was_put_on_it(error: errors.RelayError) -> None:
    sent = type(error)(*error.args)
    sent.selected_version, sent.retry_after = "2.0", 17
    got = pickle.loads(pickle.dumps(sent))
    assert (type(got), str(got), got.selected_version, got.retry_after) == (
        type(error),
        str(error),
        "2.0",
        17,
    )


def test_every_class_of_the_tree_is_in_the_examples() -> None:
    shown = {type(error) for error, *_ in EXPECTED} | {
        errors.RequestTooLarge,
        errors.InProgress,
        errors.RelayError,
    }
    named = {cls for cls in tree(errors.RelayError) if not cls.__name__.startswith("_")}
    assert named <= shown


@pytest.mark.parametrize(
    "cls", sorted(tree(errors.RelayError), key=lambda c: c.__name__), ids=lambda c: c.__name__
)
def test_every_class_finds_a_line_of_its_own_tree(cls: type) -> None:
    found = next(c for c in cls.__mro__ if c in TABLE)
    assert found is not Exception or cls is errors.RelayError


def test_body_is_pretty_json_with_a_line_end() -> None:
    assert encode_json(to_document(errors.ModelNotFound("m"))) == (
        b'{\n  "code": 404,\n  "type": "ModelNotFoundException",\n  "message": "Model not found: m"\n}\n'
    )


def test_too_large_has_no_body_and_not_yet_is_a_status() -> None:
    assert look_up(errors.RequestTooLarge(10))[0] == 413
    assert to_document(errors.RequestTooLarge(10)) is None
    assert look_up(errors.InProgress("nearly"))[0] == 202
    assert to_document(errors.InProgress("nearly")) == {"status": "nearly"}


def test_a_failed_start_brings_the_handlers_traceback() -> None:
    result = to_document(errors.StartFailed("m", "1.0", "Traceback: no module named foo"))
    assert result is not None
    assert result["detail"] == "Traceback: no module named foo"
    assert result["message"] == "Failed to start workers for model m version: 1.0"


@pytest.mark.parametrize(
    "error", [errors.HandlerFailed("secret"), errors.NoReplica("m", None, "secret"), OSError("secret")]
)
def test_other_errors_hide_their_detail(error: Exception) -> None:
    assert "secret" not in json.dumps(to_document(error))
