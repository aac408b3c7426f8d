"""The selection of a version's pool, and the versions that no pool can have."""

from __future__ import annotations

from serve_app.domain.access import matches
from serve_app.domain.model import ModelSpec
from serve_app.domain.pool import check_pool_name
from serve_app.domain.pool_settings import PoolSettings
from serve_app.errors import BadRequest, CannotBePooled
from serve_app.model_store.model_config import ModelConfig
from serve_app.settings import Settings


def select_pool(spec: ModelSpec, config: ModelConfig, settings: Settings) -> ModelSpec:
    """Return the spec with the pool of its model-config.yaml, else with that of the settings.

    An empty name in the file keeps a version out of the pool of the settings. Raises CannotBePooled where the
    file names a pool that cannot have it; then the pool of the settings is not used either.
    """
    name = settings.runtime.pool if config.pool is None else config.pool
    if not name:
        return spec
    try:
        check_pool_name(name)
    except ValueError as error:
        raise BadRequest(f"runtime.pool: {error}") from None
    allowed = settings.pools.get(name, PoolSettings()).allowed_models
    problem = find_obstacle(spec, config)
    if not problem and not matches(spec.name, allowed):
        problem = f"pools.{name}.allowed_models admits {', '.join(allowed) or 'none'} only"
    if not problem:
        return spec.with_(pool=name)
    if config.pool is None:
        return spec
    raise CannotBePooled(spec.name, spec.version, name, problem)


def find_obstacle(spec: ModelSpec, config: ModelConfig) -> str:
    """Return why a version cannot share its process with others; empty where it can."""
    obstacles = {
        "it has Python packages of its own, and a process has one set of them": spec.requirements,
        "its shards are processes of their own": spec.ranks > 1,
        "torchrun starts processes of its own": config.torchrun or config.parallel_type,
        "its sequences keep state, which an eviction would lose": spec.sequence_batching,
        "@serve.batch (batcher: ray) has one queue for each process": spec.batcher == "ray",
        "threads and pin apply to a process, which pools.NAME configures": config.threads or config.pin,
        "num_cpus and num_gpus are claimed by hosts, which pools.NAME configures": config.num_cpus
        or config.num_gpus,
        "autoscaling starts replicas, and a pool has a fixed number of hosts": config.autoscaling,
        "its requests are captured into files of its own replicas": config.capture,
        "its LoRA adapters are loaded by all replicas of a version": spec.all_adapters,
    }
    return next((problem for problem, applies in obstacles.items() if applies), "")
