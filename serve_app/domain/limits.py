"""The limits of every number that an archive, a request or a setting can contain, and their one check.

A number is known by its name, whichever spelling its source has: ``minWorkers`` of an archive,
``min_worker`` of a request and ``min-workers`` of a workflow have the same limit.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from serve_app.domain.validation import STRICT
from serve_app.errors import BadRequest, LimitExceeded

_INT64 = 2**63

# Limits that no setting raises, because a server of any size suffices with them.
MAX_DEADLINE_S = 31_536_000.0  # a year: of a request's own timeout
MAX_ARMS = 100  # of an experiment
MAX_METRICS = 100  # of an experiment
MAX_LABELS = 1_000  # of a traffic policy
MAX_REDACTED_PATHS = 100  # of a shadow
MAX_STEPS = 50  # of a rollout
MAX_WORKFLOW_STEPS = 200
MAX_STEP_RETRIES = 20  # of a step of a workflow
MAX_PARALLEL_ITEMS = 1_000  # of a step of a workflow
MAX_WORKFLOW_WORKERS = 1_000  # of a workflow's functions, whatever limits.workers is


@dataclass(frozen=True)
class Limits:
    """The largest permitted numbers, as the settings' section ``limits`` has them."""

    __pydantic_config__ = STRICT
    workers: int = 1_000  # of a version
    batch_size: int = 10_000  # rows
    batch_delay_s: float = 3_600.0  # that an incomplete batch waits
    timeout_s: float = 604_800.0  # of a batch, a start, a request, a sequence, an installation
    queue_size: int = 100_000  # rows that wait in a replica, or of one sequence
    concurrent_requests: int = 1_000_000  # of a version, or of one replica
    sequences: int = 100_000  # open at once, of a version
    parallel_degree: int = 1_024  # processes of a sharded replica
    cpus: float = 4_096.0  # that a replica claims, each rank of a sharded one
    gpus: float = 1_024.0  # the same
    threads: int = 1_024  # of an operation, and of a stage of micro-batching
    cache_tokens: int = 100_000_000  # of a language model's engine, and blocks of its cache
    samples: int = 1_000  # files that a new replica runs
    autoscaling_target: float = 1_000_000.0  # rows of a replica
    duration_s: float = 31_536_000.0  # of a rollout's steps
    min_calls: int = 1_000_000_000  # requests that a rollout's step waits for

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not 0 < value < math.inf:
                raise ValueError(f"{field.name} is a number above 0, and is {value}")


class _Bound(NamedTuple):
    limit: str  # a field of Limits
    factor: int = 1  # units of the number in a unit of the limit: 1000 for milliseconds


def _list_bounds() -> Iterator[tuple[str, _Bound]]:
    """Yield the name of each number, without its separators and in lower case, with its bound."""
    names = {
        "workers": "min_workers max_workers min_worker max_worker initial_workers default_workers_per_model "
        "gateways",
        "batch_size": "batch_size micro_batch_size",
        "timeout_s": "response_timeout startup_timeout default_response_timeout default_startup_timeout "
        "max_retry_timeout maxRetryTimeoutInSec install_timeout download_timeout timeout_s upscale_delay_s "
        "downscale_delay_s downscale_to_zero_delay_s look_back_period_s",
        "queue_size": "job_queue_size max_sequence_job_queue_size",
        "concurrent_requests": "max_ongoing_requests max_concurrent_requests",
        "sequences": "max_num_sequence",
        "parallel_degree": "parallel_level tensor_parallel pipeline_parallel "
        "tensor_parallel*pipeline_parallel torchrun.nproc_per_node torchrun.nnodes",
        "cpus": "num_cpus",
        "gpus": "num_gpus",
        "threads": "threads parallelism.preprocess parallelism.inference parallelism.postprocess",
        "cache_tokens": "engine.num_blocks engine.page_size engine.max_batch_tokens",
        "samples": "samples device_ids",
        "autoscaling_target": "target_ongoing_requests",
        "duration_s": "bake_s keep_warm_s",
        "min_calls": "min_calls",
    }
    milliseconds = {
        "batch_delay_s": "max_batch_delay",
        "timeout_s": "client_timeout clientTimeoutInMills sequence_max_idle sequenceMaxIdleMSec "
        "sequence_timeout sequenceTimeoutMSec timeout_ms target_p95_ms",
    }
    for factor, table in ((1, names), (1000, milliseconds)):
        for limit, listed in table.items():
            for name in listed.split():
                yield _fold(name), _Bound(limit, factor)


def _fold(name: str) -> str:
    return name.replace("_", "").replace("-", "").lower()


_BOUNDS = dict(_list_bounds())
# The mappings of a model-config.yaml that the server knows; the keys of all others are the author's.
_SECTIONS = {"autoscaling", "micro_batching", "parallelism", "torchrun", "engine"}


def has_limit(name: str) -> bool:
    """Return whether the number of that name has a limit here."""
    return _fold(name) in _BOUNDS


def check(values: Any, limits: Limits, place: str) -> None:
    """Raise LimitExceeded for a number in ``values`` that is beyond its limit.

    ``values`` is a parsed dataclass, with those in it, or the mapping of a document. ``place`` names their
    source in the error. Raises BadRequest where a dataclass has another type in a number's place.
    """
    if isinstance(values, Mapping):
        _check_items(values.items(), limits, place, "", is_document=True)
    else:
        _check_dataclass(values, limits, place, "")


def check_settings(settings: Any) -> None:
    """Raise BadRequest for a number of the settings that is beyond its limit, or not finite."""
    for section in dataclasses.fields(settings):
        values = getattr(settings, section.name)
        if not dataclasses.is_dataclass(values):
            continue
        for field in dataclasses.fields(values):
            number = getattr(values, field.name)
            if isinstance(number, int | float) and not -_INT64 <= number < _INT64:  # so is NaN
                raise BadRequest(f"{section.name}.{field.name} must be a finite number of at most 64 bits")
        if section.name != "limits":
            check(values, settings.limits, section.name)
    for model, versions in settings.control.models.items():
        for version, options in versions.items():
            check(options, settings.limits, f"control.models.{model}.{version}")


def _check_dataclass(values: Any, limits: Limits, place: str, path: str) -> None:
    items = ((field.name, getattr(values, field.name)) for field in dataclasses.fields(values))
    _check_items(items, limits, place, path, is_document=False)


def _check_items(
    items: Iterable[tuple[Any, Any]], limits: Limits, place: str, path: str, is_document: bool
) -> None:
    section = path.rstrip(".").rpartition(".")[2]
    for name, value in items:
        if not isinstance(name, str):
            continue
        bound = _BOUNDS.get(_fold(f"{section}.{name}")) or _BOUNDS.get(_fold(name))
        if bound is not None:
            _check_number(value, bound, limits, f"{path}{name}", place, is_document)
        elif is_document and isinstance(value, Mapping) and name in _SECTIONS:
            _check_items(value.items(), limits, place, f"{path}{name}.", is_document)
        elif not is_document:
            parts = value.items() if isinstance(value, Mapping) else [("", value)]
            for key, part in parts:
                if dataclasses.is_dataclass(part):
                    inner = f"{path}{name}.{key}." if key else f"{path}{name}."
                    _check_dataclass(part, limits, place, inner)


def _check_number(
    value: Any, bound: _Bound, limits: Limits, name: str, place: str, is_document: bool
) -> None:
    limit = getattr(limits, bound.limit) * bound.factor
    counts = bound.limit == "samples" and isinstance(value, list | tuple)
    number = len(value) if counts else value
    if isinstance(number, bool) or not isinstance(number, int | float):
        if is_document or number is None or name == "threads":
            return  # the document's own rules apply
        raise BadRequest(f"{place}: {name} is {str(value)[:40]!r}, and must be a number")
    # In this form the comparison is false for NaN as well.
    if not -math.inf < number <= limit:
        problem = f"{name} is {_describe(number)}, and at most {limit:.15g} is allowed"
        raise LimitExceeded(place, problem, bound.limit)


def _describe(number: float) -> str:
    """Return a number as text; Python refuses to write integers of more than 4,300 digits."""
    if isinstance(number, int) and number.bit_length() > 64:
        return f"a number of {number.bit_length()} bits"
    return str(number)
