"""The errors of pools."""

from __future__ import annotations

from serve_app.errors import BadRequest, StartFailed, Unavailable


class CannotBePooled(BadRequest, reason="cannot_be_pooled", fields=("model", "version", "pool", "problem")):
    template = (
        "Version {version} of model {model} cannot be in the pool {pool}: {problem}. Take pool out of its "
        "model-config.yaml, and it gets replicas of its own."
    )


class PoolTooSmall(StartFailed, reason="pool_too_small"):
    """A version that needs more memory than its pool's hosts have."""


class PoolBusy(Unavailable, reason="pool_busy", fields=("model", "pool")):
    """A pool in whose host no version can be evicted for another."""

    template = (
        "Model {model} cannot be loaded now: every version that the host of the pool {pool} has loaded is "
        "pinned or in use. Retry, or give the pool more memory or hosts."
    )
