"""A bound on the classes of Ray actors that a process keeps.

Serve creates a class for every replica. Ray keeps each class that a process has loaded by ``ray.get_actor``
in its function manager, and in two caches: about 80 KiB for each replica that ever ran, in every process
that calls replicas, and twice that in Serve's controller. A dropped class is loaded again where it is needed.

The controller also stores each class in the GCS, which keeps it: 22 KiB for each registration, of the 29 KiB
by which the GCS grew (300 registrations and removals).

This uses private attributes of the pinned Ray.
"""

from __future__ import annotations

from copy import copy
from functools import cache, lru_cache
from typing import Any

import ray.actor
from ray._private.function_manager import FunctionActorManager
from ray._raylet import PythonFunctionDescriptor  # type: ignore[attr-defined]

_KEPT = 32  # of the newest: those of replicas that start together

_REPLICA_MODULE = "ray.serve._private.replica"


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


class _StoredClass:
    """A replica's class as it is stored in the GCS: how to define it, 0.3 KiB, instead of its methods."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __reduce__(self) -> tuple[Any, ...]:
        replica_class = _get_replica_class()
        # Without names of this package: any process of the cluster may call a replica.
        derived = type(self.__name__, (replica_class,), {"__module__": _REPLICA_MODULE})
        return ray.actor._modify_class, (derived,)


def share_replica_class() -> None:
    """Make Serve's controller, in whose process this runs, define one class for all replicas.

    A replica's class keeps its own name, which process titles and logs show. Its identifier follows from the
    name, so that a model that is registered again replaces its class in the GCS.
    """
    from ray.serve._private.deployment_info import DeploymentInfo

    info: Any = DeploymentInfo
    info.actor_def = property(lambda self: _define_actor_class(self.actor_name))
    export = FunctionActorManager.export_actor_class

    def export_small(manager: Any, actor_class: Any, descriptor: Any, methods: Any) -> None:
        if issubclass(actor_class, _get_replica_class()):
            actor_class = _StoredClass(descriptor.class_name)
        export(manager, actor_class, descriptor, methods)

    FunctionActorManager.export_actor_class = export_small


def _get_replica_class() -> Any:
    from ray.serve._private.replica import ReplicaActor

    return ReplicaActor


@cache
def _get_shared_class() -> Any:
    derived = type("ServeReplica", (_get_replica_class(),), {"__module__": _REPLICA_MODULE})
    return ray.remote(derived)


@lru_cache(1024)  # 1 KiB each; one that was dropped is stored again
def _define_actor_class(name: str) -> Any:
    """Return the class of replicas with this name, for Ray."""
    actor_class = copy(_get_shared_class())
    actor_class.__ray_metadata__ = metadata = copy(actor_class.__ray_metadata__)
    metadata.class_name = name
    metadata.actor_creation_function_descriptor = PythonFunctionDescriptor(
        _REPLICA_MODULE, "__init__", name, ray.__version__
    )
    return actor_class


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
