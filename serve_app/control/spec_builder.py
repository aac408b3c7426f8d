"""Builders of specs from an archive, its registration and the settings. Pure functions."""

from __future__ import annotations

import re
from dataclasses import fields
from math import ceil
from typing import Any, Literal

from serve_app.control.pools.selection import select_pool
from serve_app.domain import limits
from serve_app.domain.model import NAME, VERSION, ModelRef, ModelSpec, Registration
from serve_app.domain.workflow_graph import WorkflowGraph
from serve_app.errors import BadRequest, ConfigurationError
from serve_app.model_store.manifest import Manifest, handler_module
from serve_app.model_store.model_config import ModelConfig
from serve_app.model_store.workflow_archive import WorkflowModel
from serve_app.settings import RuntimeSettings, Settings, VersionSettings

FUNCTIONS = "handlers.loading.workflow_functions:WorkflowFunctions"  # the handler of a workflow's functions
_PREFIX_CACHING_HANDLERS = ("llm", "vllm_handler", "trt_llm_handler")
RUNTIMES = ("python", "python3", "LSP")

# A name is part of a route, and twice of the name of each replica's log file, which has at most 255 bytes.
_MAX_LENGTH = 100

# Keys of model-config.yaml for which other sources count too; a spec has all others as the file has them.
_COMBINED_KEYS = {
    "min_workers",
    "max_workers",
    "batch_size",
    "max_batch_delay",
    "response_timeout",
    "startup_timeout",
    "autoscaling",
    "batcher",
    "routing",
    "pool",
}
_FILE_KEYS = {f.name for f in fields(ModelConfig)} & {f.name for f in fields(ModelSpec)} - _COMBINED_KEYS

# Keys of model-config.yaml that @serve.batch cannot serve -> the fields of ModelConfig, and why.
_WITHOUT_RAY = {
    "sequenceBatching": ("sequence_batching", "a batch takes one row of each sequence"),
    "continuousBatching": ("continuous_batching", "rows join and leave a running batch"),
    "useJobTicket": ("use_job_ticket", "a row is taken only where the model is idle"),
    "bucket_by_length": ("bucket_by_length", "a batch is chosen among all waiting rows"),
}

# Defaults of a stateful model; times in milliseconds.
_SEQUENCE_DEFAULTS = {"sequence_max_idle": 60_000, "max_num_sequence": 100, "max_sequence_job_queue_size": 16}


def build_spec(
    registration: Registration,
    manifest: Manifest,
    config: ModelConfig,
    *,
    digest: str,
    archive: str,
    settings: Settings,
    at_startup: bool,
) -> ModelSpec:
    """Build the spec of a version from its registration, its model-config.yaml and the settings.

    The first source with a value applies; ``control.models`` holds settings of single versions. Batch size
    and delay: registration, file, control.models. Timeouts: file, control.models, registration, settings.
    Workers: file, registration, control.models at start-up, settings, and at start-up one. All others: file,
    settings. A number of zero or less is no value, except for workers. Raises BadRequest, and LimitExceeded
    for a number of any source that is beyond its limit, also where another source has precedence.
    """
    defaults = settings.runtime
    limits.check(registration, settings.limits, "the registration")
    place = f"{manifest.archive}/{manifest.config_file}"
    limits.check(config.raw, settings.limits, place)
    limits.check({"tensor_parallel*pipeline_parallel": _ranks(config)}, settings.limits, place)
    if _ranks(config) > 1 and config.num_gpus not in (None, 0, 1):
        why = (
            f"num_gpus: {config.num_gpus:g}; a rank of a sharded model has one GPU to itself: 1, "
            f"or 0 for CPUs"
        )
        raise ConfigurationError(manifest.config_file or "", why)
    ref = _ref(registration.model_name or manifest.model_name, manifest.version)
    version_settings = settings.control.models.get(ref.name, {}).get(ref.version, VersionSettings())
    min_workers, max_workers = _workers(registration, config, version_settings, settings, at_startup)
    options: dict[str, Any] = {
        "job_queue_size": defaults.job_queue_size,
        "batcher": _batcher(config, defaults, place),
        "routing": config.routing or _default_routing(registration.handler or manifest.handler, config),
        "num_cpus": defaults.num_cpus,
        "num_gpus": _gpus(config, defaults.num_gpus),
        **{key: getattr(config, key) for key in _FILE_KEYS if getattr(config, key) is not None},
    }
    if config.sequence_batching:
        options |= {key: value for key, value in _SEQUENCE_DEFAULTS.items() if not options.get(key)}
    if config.retries is None and (config.sequence_batching or config.continuous_batching):
        options["retries"] = False  # an executed request has changed the state already
    spec = ModelSpec(
        name=ref.name,
        version=ref.version,
        url=registration.url,
        digest=digest,
        archive=archive,
        handler=registration.handler or manifest.handler,
        runtime=_runtime(registration.runtime or manifest.runtime),
        min_workers=min_workers,
        max_workers=max_workers,
        batch_size=_first(registration.batch_size, config.batch_size, version_settings.batch_size) or 1,
        max_batch_delay=_first(
            registration.max_batch_delay, config.max_batch_delay, version_settings.max_batch_delay
        ),
        response_timeout=_first(
            config.response_timeout, version_settings.response_timeout, registration.response_timeout
        )
        or defaults.default_response_timeout,
        startup_timeout=_first(
            config.startup_timeout, version_settings.startup_timeout, registration.startup_timeout
        )
        or defaults.default_startup_timeout,
        loaded_at_startup=at_startup,
        requirements=_requirements(manifest, config, settings) or "",
        autoscaling=config.autoscaling if min_workers < max_workers else None,
        config=dict(config.raw),
        **options,
    )
    spec = select_pool(spec, config, settings)
    if spec.pool and at_startup and config.min_workers is None and version_settings.min_workers is None:
        return spec.with_(min_workers=0, max_workers=0)  # its first request loads it
    return spec


def build_workflow_spec(
    registration: Registration,
    graph: WorkflowGraph,
    settings: Settings,
    *,
    digest: str = "",
    archive: str = "",
    file: str = "",
) -> ModelSpec:
    """Build the spec of a workflow; ``file`` of its archive defines its functions, where it has any.

    Raises BadRequest, and LimitExceeded as ``build_spec`` does.
    """
    limits.check(registration, settings.limits, "the registration")
    limits.check(graph, settings.limits, f"workflow {graph.name}")
    ref = _ref(graph.name, graph.version)
    defaults = settings.runtime
    functions = {"file": file, "names": list(graph.functions), "plain": bool(graph.torchserve)}
    workers = graph.workers if file else 0
    return ModelSpec(
        name=ref.name,
        version=ref.version,
        url=registration.url,
        digest=digest,
        archive=archive,
        handler=FUNCTIONS if file else "",
        min_workers=workers,
        max_workers=workers,
        response_timeout=registration.response_timeout or defaults.default_response_timeout,
        startup_timeout=registration.startup_timeout or defaults.default_startup_timeout,
        client_timeout=ceil(graph.timeout_s * 1000) if graph.timeout_s is not None else 0,
        job_queue_size=defaults.job_queue_size,
        num_cpus=defaults.num_cpus,
        graph=graph,
        config={"functions": functions} if file else {},
    )


def build_member_spec(spec: ModelSpec, member: WorkflowModel) -> ModelSpec:
    """Build the spec of a model that a workflow brings; the workflow determines its workers."""
    low, high = member.min_workers, member.max_workers
    return spec.with_(min_workers=low, max_workers=high, autoscaling=spec.autoscaling if low < high else None)


def _first(*numbers: int | None) -> int | None:
    """Return the first positive number."""
    return next((number for number in numbers if number is not None and number > 0), None)


def _workers(
    registration: Registration,
    config: ModelConfig,
    version_settings: VersionSettings,
    settings: Settings,
    at_startup: bool,
) -> tuple[int, int]:
    if config.min_workers is not None:
        low, high = config.min_workers, config.max_workers or config.min_workers
        if config.autoscaling is not None and config.max_workers and config.raw.get("minWorkers") == 0:
            low = 0  # TorchServe reads 1; with autoscaling configured, 0 is meant
        if high >= low:
            return low, high
    if registration.initial_workers is not None:
        count = max(0, registration.initial_workers)
    elif at_startup and version_settings.min_workers is not None:
        low = version_settings.min_workers
        return low, max(low, version_settings.max_workers or 0)
    else:
        count = _first(settings.runtime.default_workers_per_model) or int(at_startup)
    return count, count


def _gpus(config: ModelConfig, default: float) -> float:
    """Return the GPUs of a replica whose file has no ``num_gpus``."""
    if config.device_type == "cpu":
        return 0.0  # a share would be idle
    if _ranks(config) > 1:
        return float(ceil(default))  # no two ranks can share one
    if config.parallel_type == "custom" and config.parallel_level is not None:
        return float(config.parallel_level)
    return default


def _batcher(config: ModelConfig, defaults: RuntimeSettings, place: str) -> Literal["torchrelay", "ray"]:
    """Return the batcher of the file, else of the settings. Raises ConfigurationError where it cannot be."""
    batcher = config.batcher or defaults.batcher
    for key, (name, reason) in _WITHOUT_RAY.items() if batcher == "ray" else ():
        if getattr(config, name):
            source = "batcher: ray" if config.batcher else "runtime.batcher: ray in the settings"
            remedy = "write batcher: torchrelay into this file"
            raise ConfigurationError(place, f"{key}: {reason}; {source} selects @serve.batch. {remedy}")
    return batcher


def _default_routing(handler: str, config: ModelConfig) -> Literal["load", "prefix"]:
    """Return the routing of a version whose file has none: by prefix where the handler caches prefixes."""
    engine = config.raw.get("engine")
    if handler_module(handler) not in _PREFIX_CACHING_HANDLERS or config.sequence_batching:
        return "load"
    return "load" if isinstance(engine, dict) and engine.get("prefix_caching") is False else "prefix"


def _ranks(config: ModelConfig) -> int:
    return (config.tensor_parallel or 1) * (config.pipeline_parallel or 1)


def _requirements(manifest: Manifest, config: ModelConfig, settings: Settings) -> str | None:
    wanted = config.use_venv or settings.runtime.install_py_dep_per_model
    return manifest.requirements_file if wanted else None


def _runtime(runtime: str) -> str:
    if runtime not in RUNTIMES:
        raise BadRequest(f"Invalid RuntimeType value: {runtime}")
    return runtime


def _ref(name: str, version: str) -> ModelRef:
    check_word(name, "a model's name has")
    _check(VERSION, version, "a version has letters, digits and any of _ . - +")
    ref = ModelRef(name, version)
    if len(ref.app) > _MAX_LENGTH:
        raise BadRequest(
            f"{ref.app[:_MAX_LENGTH]!r} is too long: name and version together have at most "
            f"{_MAX_LENGTH - 2} characters; in a version with --, each . and - counts as two."
        )
    return ref


def check_word(word: str, such: str) -> None:
    """Raise BadRequest for a word that cannot be part of a route; ``such`` starts the explanation."""
    _check(NAME, word, f"{such} letters, digits and any of _ . -")


def _check(valid: re.Pattern[str], word: str, what: str) -> None:
    if not valid.fullmatch(word):
        raise BadRequest(f"{word!r} cannot be part of a route: {what} and begin with none of . and -")
