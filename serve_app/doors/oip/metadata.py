"""What the protocol's clients are told of server and models. Pure functions over the table, on no wire."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import serve_app
from serve_app import signature
from serve_app.types import Figures, ModelRow, Table, VersionRow, matches

Said = dict[str, Any]

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
_NS = 1e9


def server() -> Said:
    return {"name": "torchrelay", "version": serve_app.__version__, "extensions": list(EXTENSIONS)}


def model(name: str, row: ModelRow, version: VersionRow) -> Said:
    """Metadata of one version. Inputs and outputs are empty where neither its file nor its handler says them."""
    ports = signature.write(version.signature or signature.Signature())
    return {"name": name, "versions": sorted(row.versions), "platform": PLATFORM, **ports}


def ready(version: VersionRow) -> bool:
    """Whether it answers; one that sleeps is woken by the call."""
    return version.phase == "idle" or (version.phase == "ready" and version.replicas > 0)


def config(name: str, version: VersionRow) -> Said:
    """What Triton's clients read of a model's configuration.

    ``max_batch_size`` is 0, which says that shapes are whole: a batch axis is among them.
    """
    ports = signature.write(version.signature or signature.Signature())
    return {
        "name": name,
        "platform": PLATFORM,
        "backend": "torchrelay",
        "max_batch_size": 0,
        "input": [_put(port) for port in ports["inputs"]],
        "output": [_put(port) for port in ports["outputs"]],
        "dynamic_batching": {"preferred_batch_size": [version.max_batch_size]},
        "instance_group": [{"name": name, "count": version.replicas, "kind": "KIND_AUTO"}],
        "model_transaction_policy": {"decoupled": False},
        "version_policy": {"specific": {"versions": [version.version]}},
    }


def _put(port: Said) -> Said:
    datatype = "STRING" if port["datatype"] == "BYTES" else port["datatype"]
    return {"name": port["name"], "data_type": f"TYPE_{datatype}", "dims": port["shape"]}


def index(table: Table, within: tuple[str, ...], only_ready: bool = False) -> list[Said]:
    """Every version of the models that match ``within``, and whether it can be asked."""
    said = []
    for name, row in sorted(table.models.items()):
        for version in row.versions.values() if matches(name, within) else ():
            answers = ready(version)
            if answers or not only_ready:
                state = "READY" if answers else "LOADING" if version.phase == "loading" else "UNAVAILABLE"
                reason = "" if answers or state == "LOADING" else (version.last_error.strip() or "unloaded")
                said.append({"name": name, "version": version.version, "state": state, "reason": reason})
    return said


def statistics(figures: Iterable[Figures]) -> Said:
    """What the meters have counted of each version, in the words of the extension ``statistics``.

    Times are in nanoseconds. ``compute_infer`` counts batches; what goes before and after the model is not measured
    by itself, and so is not told. ``last_inference``: milliseconds since the epoch, 0 where nothing ran.
    """
    return {"model_stats": [_statistics(one) for one in figures]}


def _statistics(one: Figures) -> Said:
    def times(count: int, seconds: float) -> Said:
        return {"count": count, "ns": round(seconds * _NS)}

    return {
        "name": one.model,
        "version": one.version,
        "last_inference": round(one.last * 1000),
        "inference_count": one.rows,
        "execution_count": one.batches,
        "inference_stats": {
            "success": times(one.answered, one.seconds),
            "fail": times(one.failed, 0.0),
            "queue": times(one.rows, one.queue_seconds),
            "compute_input": times(0, 0.0),
            "compute_infer": times(one.batches, one.inference_seconds),
            "compute_output": times(0, 0.0),
            "cache_hit": times(0, 0.0),
            "cache_miss": times(0, 0.0),
        },
        "batch_stats": [
            {
                "batch_size": rows,
                "compute_input": times(0, 0.0),
                "compute_infer": times(count, seconds),
                "compute_output": times(0, 0.0),
            }
            for rows, count, seconds in one.sizes
        ],
        "memory_usage": [],
    }
