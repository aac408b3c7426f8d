"""Models and changes of them as TorchServe's management APIs describe them, over REST and gRPC."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

from serve_app.control.api import ControlPlane
from serve_app.domain import autoscaling
from serve_app.domain.model import ReplicaInfo, ScalingProgress, VersionDescription
from serve_app.errors import NoReplica

MAX_PAGE_SIZE = 100
_DEFAULT_MAX_BATCH_DELAY_MS = 100  # TorchServe shows it where none is set


class NoReplicaToDescribe(NoReplica):
    """``NoReplicaToDescribe(model)``"""

    def __str__(self) -> str:
        return (
            f'Model "{self.args[0]}" has no worker to serve describe request. '
            "Please use scale workers API to add workers."
        )


async def list_models(
    control: ControlPlane, limit: int, start: int, allowed_models: tuple[str, ...]
) -> dict[str, Any]:
    """Return a page of the models whose names match ``allowed_models``."""
    limit = limit if 0 <= limit <= MAX_PAGE_SIZE else MAX_PAGE_SIZE
    page, next_start = await control.list_models(max(start, 0), limit, allowed_models)
    document: dict[str, Any] = {} if next_start is None else {"nextPageToken": str(next_start)}
    document["models"] = [{"modelName": name, "modelUrl": url} for name, url in page]
    return document


def describe_registration(progress: ScalingProgress) -> tuple[int, str]:
    """Return the status and the sentence after a registration."""
    if progress.state == "done":
        ref, status = progress.ref, 200
        sentence = (
            f'Model "{ref.name}" Version: {ref.version} registered with {progress.replicas} initial workers'
        )
        if progress.replicas == 0 and progress.bounds is None:
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


def describe_version(description: VersionDescription) -> dict[str, Any]:
    """Return a version's description with TorchServe's fields, in its order; ours follow."""
    spec, status = description.spec, description.status
    document: dict[str, Any] = {
        "modelName": spec.name,
        "modelVersion": spec.version,
        "modelUrl": spec.url,
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
    }
    if spec.device_ids:
        document["deviceIds"] = list(spec.device_ids)
    document |= {
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
    if spec.scaling is not None:
        document["autoscaling"] = autoscaling.write(spec.scaling)
    if task := spec.config.get("task"):
        document["task"] = task
    if description.metadata is not None:
        document["customizedMetadata"] = (
            description.metadata if isinstance(description.metadata, dict) else {}
        )
    if status.last_error:
        document["lastError"] = status.last_error
        if status.error_time:
            document["lastErrorTime"] = _utc(status.error_time)
    return document


def _describe_worker(worker: ReplicaInfo) -> dict[str, Any]:
    return {
        "id": worker.id,
        "startTime": _utc(worker.started_at),
        "status": "READY" if worker.ready else "UNLOADING",
        "memoryUsage": worker.memory,
        "pid": worker.pid,
        "gpu": bool(worker.gpu),
        "gpuUsage": f"gpuId::{worker.gpu}" if worker.gpu else "N/A",
    }


def _utc(seconds: float) -> str:
    return (
        datetime.fromtimestamp(seconds, timezone.utc)
        .isoformat(timespec="milliseconds")
        .replace("+00:00", "Z")
    )
