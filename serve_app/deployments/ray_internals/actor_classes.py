"""A bound on the classes of Ray actors that a process keeps.

Serve creates a class for every replica. Ray keeps each class that a process has loaded by ``ray.get_actor``
in its function manager, and in two caches: about 80 KiB for each replica that ever ran, in every process
that calls replicas, and twice that in Serve's controller. A dropped class is loaded again where it is needed.

This uses private attributes of the pinned Ray.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import ray.actor
from ray._private.function_manager import FunctionActorManager
from ray._raylet import PythonFunctionDescriptor  # type: ignore[attr-defined]

_KEPT = 32  # of the newest: those of replicas that start together


class _NewestEntries(dict[Any, Any]):
    """A dictionary that keeps the entries that were added last."""

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        while len(self) > _KEPT:
            del self[next(iter(self))]


def bound_actor_classes() -> None:
    """Bound the classes that Ray keeps in this process, and in its forks."""
    metadata: Any = ray.actor._ActorClassMethodMetadata
    if isinstance(metadata._cache, _NewestEntries):
        return
    metadata._cache = _NewestEntries(metadata._cache)
    module: Any = ray.actor  # a cache of 1,024 classes by default
    module.has_async_methods = lru_cache(_KEPT)(module.has_async_methods.__wrapped__)
    load = FunctionActorManager.load_actor_class

    def load_and_drop(manager: Any, job_id: Any, descriptor: Any) -> Any:
        actor_class = load(manager, job_id, descriptor)
        drop_old_actor_classes(manager)
        return actor_class

    FunctionActorManager.load_actor_class = load_and_drop


def drop_old_actor_classes(manager: Any, kept: int = _KEPT) -> None:
    """Drop all loaded classes but the newest ``kept`` and those of the actors that run in this process."""
    classes = manager._loaded_actor_classes
    if len(classes) <= kept:
        return
    own = {type(actor) for actor in manager._worker.actors.values()}
    used = {name for actor_class in own for name in _names(actor_class)}
    for function_id in list(classes)[:-kept]:
        if classes[function_id] in own:
            continue
        actor_class = classes.pop(function_id)
        forgotten = {function_id}
        for method in dir(actor_class):
            for module, name in _names(actor_class) - used:  # another replica's class may have the same name
                forgotten.add(PythonFunctionDescriptor(module, method, name).function_id)
        for key in forgotten:
            manager._function_execution_info.pop(key, None)
            manager._num_task_executions.pop(key, None)


def _names(actor_class: type) -> set[tuple[str, str]]:
    """Return the module and the names by which Ray describes the methods of a class."""
    return {
        (actor_class.__module__, actor_class.__name__),
        (actor_class.__module__, actor_class.__qualname__),
    }
