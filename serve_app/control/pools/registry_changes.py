"""Changes of pooled versions: pure functions from one registry to another."""

from __future__ import annotations

from serve_app.control.registry import Registry
from serve_app.control.registry_changes import with_version
from serve_app.domain.model import ModelSpec


def isolate(registry: Registry, spec: ModelSpec, reason: str) -> Registry:
    """Give a version replicas of its own, at least one, instead of its pool's hosts.

    The same registry is returned where the version was removed, replaced or isolated meanwhile.
    """
    record = registry.models.get(spec.name)
    current = record.versions.get(spec.version) if record is not None else None
    if current is None or not current.is_pooled or current.digest != spec.digest:
        return registry
    low = max(1, current.min_workers)
    return with_version(
        registry,
        # Its measured memory is what it added to a host; a process has the base as well.
        current.with_(isolated=reason, min_workers=low, max_workers=max(low, current.max_workers), memory=0),
    )
