"""Models and changes of them as TorchServe's management APIs describe them, over REST and gRPC."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Annotated, Any, Literal

from typing_extensions import NotRequired, TypedDict

from serve_app.control.api import ControlPlane
from serve_app.domain import autoscaling
from serve_app.domain.model import ModelStatus, ReplicaInfo, ScalingProgress, VersionDescription
from serve_app.domain.urls import redact_url
from serve_app.domain.validation import documented
from serve_app.errors import NoReplica

MAX_PAGE_SIZE = 100
_DEFAULT_MAX_BATCH_DELAY_MS = 100  # TorchServe shows it where none is set
_Count = Annotated[int, documented(minimum=0)]
_UTC = documented("In UTC.", format="date-time")


class ModelEntry(TypedDict):
    modelName: str
    modelUrl: Annotated[str, documented("The URL of the default version.")]


class ModelPage(TypedDict):
    nextPageToken: NotRequired[Annotated[str, documented("Absent on the last page.")]]
    models: Annotated[list[ModelEntry], documented(maxItems=MAX_PAGE_SIZE)]


class WorkerDescription(TypedDict):
    id: str
    startTime: Annotated[str, _UTC]
    status: Literal["READY", "LOADING", "UNLOADING"]
    memoryUsage: Annotated[int, documented("The resident memory in bytes.")]
    pid: Annotated[int, documented("The process id.")]
    gpu: Annotated[bool, documented("Whether it uses a GPU.")]
    gpuUsage: Annotated[str, documented("The visible GPUs, or N/A.")]
    node: NotRequired[Annotated[str, documented("The id of the node.")]]


class JobQueueStatus(TypedDict):
    remainingCapacity: Annotated[int, documented("The free places in the queues.", minimum=0)]
    pendingRequests: Annotated[int, documented("The requests in the queues.", minimum=0)]


class ModelDescription(TypedDict):
    """A version of a model: TorchServe's fields, then ours."""

    modelName: str
    modelVersion: str
    modelUrl: Annotated[str, documented("The source of the archive.")]
    runtime: Annotated[str, documented("The interpreter of the handler.")]
    minWorkers: _Count
    maxWorkers: _Count
    batchSize: Annotated[int, documented("The maximum number of requests in a batch.", minimum=1)]
    maxBatchDelay: Annotated[int, documented("Milliseconds that an incomplete batch waits.", minimum=0)]
    responseTimeout: Annotated[float, documented("The timeout of a batch in seconds.")]
    startupTimeout: Annotated[float, documented("The timeout of a worker's start in seconds.")]
    maxRetryTimeoutInSec: int
    clientTimeoutInMills: int
    parallelType: str
    parallelLevel: int
    deviceType: str
    deviceIds: NotRequired[list[int]]
    continuousBatching: bool
    useJobTicket: bool
    useVenv: bool
    stateful: bool
    sequenceMaxIdleMSec: int
    sequenceTimeoutMSec: int
    maxNumSequence: int
    maxSequenceJobQueueSize: int
    loadedAtStartup: bool
    workers: list[WorkerDescription]
    jobQueueStatus: JobQueueStatus
    autoscaling: NotRequired[Annotated[dict[str, Any], documented("The autoscaling policy.")]]
    inputType: NotRequired[Annotated[str, documented("The media type of an input, such as image/*.")]]
    schemas: NotRequired[
        Annotated[
            dict[str, Any],
            documented("mediaType and JSON schema of input and output, and an author's documents."),
        ]
    ]
    handler: NotRequired[Annotated[str, documented("The built-in handler, or the archive's own file.")]]
    task: NotRequired[Annotated[str, documented("The task of a Hugging Face folder.")]]
    adapters: NotRequired[Annotated[list[str], documented("The LoRA adapters of a language model.")]]
    customizedMetadata: NotRequired[Annotated[dict[str, Any], documented("With customized=true.")]]
    sha256: NotRequired[Annotated[str, documented("The SHA-256 of the stored archive.")]]
    memory: NotRequired[
        Annotated[int, documented("The bytes of memory that the next worker claims.", minimum=0)]
    ]
    pool: NotRequired[Annotated[str, documented("The pool whose hosts load the version.")]]
    isolated: NotRequired[
        Annotated[str, documented("Why the version left its pool for replicas of its own.")]
    ]
    waitingFor: NotRequired[Annotated[str, documented("What workers without a place wait for.")]]
    lastError: NotRequired[Annotated[str, documented("The last error that ended a worker or its start.")]]
    lastErrorTime: NotRequired[Annotated[str, _UTC]]


class NoReplicaToDescribe(NoReplica):
    """``NoReplicaToDescribe(model)``"""

    def __str__(self) -> str:
        return (
            f'Model "{self.args[0]}" has no worker to serve describe request. '
            "Please use scale workers API to add workers."
        )


async def list_models(
    control: ControlPlane, limit: int, start: int, allowed_models: tuple[str, ...]
) -> ModelPage:
    """Return a page of the models whose names match ``allowed_models``."""
    limit = limit if 0 <= limit <= MAX_PAGE_SIZE else MAX_PAGE_SIZE
    page, next_start = await control.list_models(max(start, 0), limit, allowed_models)
    models: list[ModelEntry] = [{"modelName": name, "modelUrl": redact_url(url)} for name, url in page]
    if next_start is None:
        return {"models": models}
    return {"nextPageToken": str(next_start), "models": models}


def describe_registration(progress: ScalingProgress) -> tuple[int, str]:
    """Return the status and the sentence after a registration."""
    if progress.state == "done":
        ref, status = progress.ref, 200
        sentence = (
            f'Model "{ref.name}" Version: {ref.version} registered with {progress.replicas} initial workers'
        )
        if progress.replicas == 0 and progress.on_demand:
            sentence += ". Its pool loads it with the first request."
        elif progress.replicas == 0 and progress.bounds is None:
            sentence += ". Use scale workers API to add workers for the model."
    else:
        status, sentence = _IN_PROGRESS[progress.state]
    sentence += _describe_autoscaling(progress)
    return status, f"{sentence.rstrip('.')}. {progress.advice}" if progress.advice else sentence


def describe_scaling(progress: ScalingProgress, workers: int | None, with_version: bool) -> tuple[int, str]:
    """Return the status and the sentence after a change of workers.

    TorchServe names the version only where the request does (``with_version``).
    """
    status, sentence = _IN_PROGRESS.get(progress.state, (200, ""))
    if progress.state == "done":
        version = f", version: {progress.ref.version}" if with_version else ""
        sentence = f"Workers scaled to {workers} for model: {progress.ref.name}{version}"
    return status, sentence + _describe_autoscaling(progress)


def _describe_autoscaling(progress: ScalingProgress) -> str:
    """Return what follows TorchServe's sentence where autoscaling starts or ends."""
    if progress.bounds is not None:
        low, high = progress.bounds
        return f"; autoscaling holds between {low} and {high} workers from now on"
    if progress.previous_bounds is not None:
        low, high = progress.previous_bounds
        return f"; autoscaling between {low} and {high} workers is off from now on"
    return ""


_IN_PROGRESS = {
    "processing": (202, "Processing worker updates..."),
    "partial": (206, "Workers scaling in progress..."),
}


def describe_version(description: VersionDescription) -> ModelDescription:
    """Return a version's description with TorchServe's fields, in its order; ours follow."""
    spec, status = description.spec, description.status
    document: ModelDescription = {
        "modelName": spec.name,
        "modelVersion": spec.version,
        "modelUrl": redact_url(spec.url),
        "runtime": spec.runtime,
        "minWorkers": spec.min_workers,
        "maxWorkers": spec.max_workers,
        "batchSize": spec.batch_size,
        "maxBatchDelay": _DEFAULT_MAX_BATCH_DELAY_MS
        if spec.max_batch_delay is None
        else spec.max_batch_delay,
        "responseTimeout": spec.response_timeout,
        "startupTimeout": spec.startup_timeout,
        "maxRetryTimeoutInSec": spec.max_retry_timeout,
        "clientTimeoutInMills": spec.client_timeout,
        "parallelType": spec.parallel_type,
        "parallelLevel": spec.parallel_level,
        "deviceType": spec.device_type or ("gpu" if spec.num_gpus else "cpu"),
        "deviceIds": list(spec.device_ids),
        "continuousBatching": spec.continuous_batching,
        "useJobTicket": spec.use_job_ticket,
        "useVenv": spec.use_venv,
        "stateful": spec.sequence_batching,
        "sequenceMaxIdleMSec": spec.sequence_max_idle,
        "sequenceTimeoutMSec": spec.sequence_timeout,
        "maxNumSequence": spec.max_num_sequence,
        "maxSequenceJobQueueSize": spec.max_sequence_job_queue_size,
        "loadedAtStartup": spec.loaded_at_startup,
        "workers": [_describe_worker(worker) for worker in status.workers],
        "jobQueueStatus": {
            "remainingCapacity": max(0, spec.job_queue_size * max(1, status.replicas) - description.pending),
            "pendingRequests": description.pending,
        },
    }
    if not spec.device_ids:
        del document["deviceIds"]
    if spec.scaling is not None:
        document["autoscaling"] = autoscaling.write(spec.scaling)
    if status.input_type:
        document["inputType"] = status.input_type
    if status.schemas is not None:
        document["schemas"] = dict(status.schemas)
    if spec.handler:
        document["handler"] = spec.handler
    if task := spec.config.get("task"):
        document["task"] = task
    if adapters := spec.all_adapters:
        document["adapters"] = sorted(adapter.name for adapter in adapters)
    if description.metadata is not None:
        document["customizedMetadata"] = (
            description.metadata if isinstance(description.metadata, dict) else {}
        )
    if spec.digest:
        document["sha256"] = spec.digest
    if spec.claimed_memory:
        document["memory"] = spec.claimed_memory
    if spec.is_pooled:
        document["pool"] = spec.pool
    if spec.isolated:
        document["isolated"] = spec.isolated
    _add_problems(document, status)
    return document


def _add_problems(document: ModelDescription, status: ModelStatus) -> None:
    if status.waiting_for:
        document["waitingFor"] = status.waiting_for
    if status.last_error:
        document["lastError"] = status.last_error
        if status.error_time:
            document["lastErrorTime"] = _utc(status.error_time)


def _describe_worker(worker: ReplicaInfo) -> WorkerDescription:
    document: WorkerDescription = {
        "id": worker.id,
        "startTime": _utc(worker.started_at),
        "status": "READY" if worker.ready else "UNLOADING",
        "memoryUsage": worker.memory,
        "pid": worker.pid,
        "gpu": bool(worker.gpu),
        "gpuUsage": f"gpuId::{worker.gpu}" if worker.gpu else "N/A",
    }
    if worker.node:
        document["node"] = worker.node
    return document


def _utc(seconds: float) -> str:
    return (
        datetime.fromtimestamp(seconds, timezone.utc)
        .isoformat(timespec="milliseconds")
        .replace("+00:00", "Z")
    )
