"""The protocol's descriptions of server and models, built from the routing table. The functions are pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from typing_extensions import NotRequired, TypedDict

import serve_app
from serve_app.domain import signature
from serve_app.domain.access import matches
from serve_app.domain.model import VersionStats
from serve_app.domain.routing_table import ModelRoute, RoutingTable, VersionRoute
from serve_app.domain.validation import documented

PLATFORM = "torchrelay"
EXTENSIONS = (
    "binary_tensor_data",
    "classification",
    "generate",
    "model_configuration",
    "model_repository",
    "parameters",
    "schedule_policy",
    "sequence",
    "statistics",
)
_NANOSECONDS = 1e9  # per second

Count = Annotated[int, documented(minimum=0)]
Datatype = Annotated[str, documented(enum=list(signature.DATATYPES))]


class ServerMetadata(TypedDict):
    name: str
    version: str
    extensions: list[str]


class TensorMetadata(TypedDict):
    name: str
    datatype: Datatype
    shape: Annotated[list[int], documented("-1: any length.")]


class ModelMetadata(TypedDict):
    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


class PortConfig(TypedDict):
    name: str
    data_type: str
    dims: list[int]


class TritonModelConfig(TypedDict):
    """The parts of a model's configuration that Triton's clients read."""

    name: str
    platform: str
    backend: str
    max_batch_size: Annotated[int, documented("0: shapes include the batch axis.")]
    input: list[PortConfig]
    output: list[PortConfig]
    dynamic_batching: dict[str, list[int]]
    instance_group: list[dict[str, Any]]
    model_transaction_policy: dict[str, bool]
    version_policy: dict[str, dict[str, list[str]]]


RepositoryState = Literal["READY", "LOADING", "UNAVAILABLE"]


class RepositoryEntry(TypedDict):
    name: str
    version: str
    state: RepositoryState
    reason: str


class Duration(TypedDict):
    count: Count
    ns: Count


class BatchStatistics(TypedDict):
    batch_size: Annotated[int, documented(minimum=1)]
    compute_input: Duration
    compute_infer: Duration
    compute_output: Duration


class VersionStatistics(TypedDict):
    name: str
    version: str
    last_inference: Annotated[int, documented("Milliseconds since the epoch, or 0.", minimum=0)]
    inference_count: Count
    execution_count: Count
    inference_stats: dict[str, Duration]
    batch_stats: list[BatchStatistics]
    memory_usage: list[Any]


class Statistics(TypedDict):
    model_stats: list[VersionStatistics]


class Readiness(TypedDict):
    name: NotRequired[str]
    ready: bool


def describe_server() -> ServerMetadata:
    return {"name": "torchrelay", "version": serve_app.__version__, "extensions": list(EXTENSIONS)}


def describe_model(name: str, model: ModelRoute, version: VersionRoute) -> ModelMetadata:
    """Return the metadata of one version.

    Inputs and outputs are empty if neither its signature file nor its handler declares them.
    """
    ports = signature.write(version.signature or signature.Signature())
    return {
        "name": name,
        "versions": sorted(model.versions),
        "platform": PLATFORM,
        "inputs": ports["inputs"],
        "outputs": ports["outputs"],
    }


def is_ready(version: VersionRoute) -> bool:
    """Return whether the version serves requests; a request starts one that is scaled to zero."""
    return version.phase == "idle" or (version.phase == "ready" and version.replicas > 0)


def describe_config(name: str, version: VersionRoute) -> TritonModelConfig:
    """Return the parts of a model's configuration that Triton's clients read.

    ``max_batch_size`` is 0, which means that shapes include the batch axis.
    """
    ports = signature.write(version.signature or signature.Signature())
    return {
        "name": name,
        "platform": PLATFORM,
        "backend": "torchrelay",
        "max_batch_size": 0,
        "input": [_describe_port(port) for port in ports["inputs"]],
        "output": [_describe_port(port) for port in ports["outputs"]],
        "dynamic_batching": {"preferred_batch_size": [version.max_batch_size]},
        "instance_group": [{"name": name, "count": version.replicas, "kind": "KIND_AUTO"}],
        "model_transaction_policy": {"decoupled": False},
        "version_policy": {"specific": {"versions": [version.version]}},
    }


def _describe_port(port: TensorMetadata) -> PortConfig:
    datatype = "STRING" if port["datatype"] == "BYTES" else port["datatype"]
    return {"name": port["name"], "data_type": f"TYPE_{datatype}", "dims": port["shape"]}


def list_versions(
    table: RoutingTable, allowed_models: tuple[str, ...], only_ready: bool = False
) -> list[RepositoryEntry]:
    """Return the state of every version of the models that match ``allowed_models``."""
    documents: list[RepositoryEntry] = []
    for name, model in sorted(table.models.items()):
        for version in model.versions.values() if matches(name, allowed_models) else ():
            ready = is_ready(version)
            if ready or not only_ready:
                state = _repository_state(version)
                reason = "" if ready or state == "LOADING" else (version.last_error.strip() or "unloaded")
                documents.append({"name": name, "version": version.version, "state": state, "reason": reason})
    return documents


def _repository_state(version: VersionRoute) -> RepositoryState:
    if is_ready(version):
        return "READY"
    return "LOADING" if version.phase == "loading" else "UNAVAILABLE"


def describe_statistics(stats: Iterable[VersionStats]) -> Statistics:
    """Return the statistics of versions in the format of the extension ``statistics``.

    Times are in nanoseconds. ``inference_count`` and ``batch_size`` count rows, along the first axis of
    tensors; ``inference_stats`` counts requests. ``compute_infer`` counts batches; the times before and after
    the model, and those of the response cache, are not measured and stay 0. ``last_inference``: milliseconds
    since the epoch, or 0 without an inference.
    """
    return {"model_stats": [_describe_version_stats(version) for version in stats]}


def _describe_version_stats(stats: VersionStats) -> VersionStatistics:
    def duration(count: int, seconds: float) -> Duration:
        return {"count": count, "ns": round(seconds * _NANOSECONDS)}

    return {
        "name": stats.model,
        "version": stats.version,
        "last_inference": round(stats.last_batch_at * 1000),
        "inference_count": sum(rows * count for rows, count, _ in stats.batch_sizes),
        "execution_count": stats.batches,
        "inference_stats": {
            "success": duration(stats.answered, stats.seconds),
            "fail": duration(stats.failed, 0.0),
            "queue": duration(stats.rows, stats.queue_seconds),
            "compute_input": duration(0, 0.0),
            "compute_infer": duration(stats.batches, stats.inference_seconds),
            "compute_output": duration(0, 0.0),
            "cache_hit": duration(stats.cache_hits, 0.0),
            "cache_miss": duration(stats.cache_misses, 0.0),
        },
        "batch_stats": [
            {
                "batch_size": rows,
                "compute_input": duration(0, 0.0),
                "compute_infer": duration(count, seconds),
                "compute_output": duration(0, 0.0),
            }
            for rows, count, seconds in stats.batch_sizes
        ],
        "memory_usage": [],
    }
