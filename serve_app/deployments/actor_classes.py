"""A bound on the classes of Ray actors that a process keeps.

Serve creates a class for every replica. Ray's function manager keeps each class that a process has loaded by
``ray.get_actor``, about 80 KiB, and each process that sends requests to replicas loads them all. A dropped
class is loaded again where it is needed.
"""

from __future__ import annotations

from typing import Any

import ray

_KEPT = 32  # of the newest: those of replicas that start together


def drop_old_actor_classes(worker: Any = None, kept: int = _KEPT) -> None:
    """Drop all loaded classes but the newest ``kept`` and those of the actors that run in this process.

    It uses private attributes of the pinned Ray; without them nothing is dropped.
    """
    worker = ray._private.worker.global_worker if worker is None else worker
    manager: Any = getattr(worker, "function_actor_manager", None)
    classes = getattr(manager, "_loaded_actor_classes", None)
    if not classes or len(classes) <= kept:
        return
    own = {type(actor) for actor in worker.actors.values()}
    for function_id in list(classes)[:-kept]:
        if classes[function_id] not in own:
            del classes[function_id]
            manager._function_execution_info.pop(function_id, None)  # of its constructor
