"""The classes of ended replicas are dropped from Ray's function manager and from its cache of signatures."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from ray._private.function_manager import FunctionActorManager
from ray._raylet import PythonFunctionDescriptor

from serve_app.deployments.ray_internals.actor_classes import drop_old_actor_classes


def _load(manager: Any, number: int, name: str) -> type:
    """Enter a class into a manager, as Ray does for one that it has loaded."""
    actor_class = type(name, (), {"answer": lambda self: None, "__module__": "replicas"})
    manager._loaded_actor_classes[number] = actor_class
    for key in (number, _method(name)):
        manager._function_execution_info[key] = object()
        manager._num_task_executions[key] = 0
    return actor_class


def _method(name: str) -> Any:
    return PythonFunctionDescriptor("replicas", "answer", name).function_id


def test_old_classes_are_dropped_and_those_of_running_actors_stay() -> None:
    worker = SimpleNamespace(actors={})
    manager = FunctionActorManager(worker)
    for number in range(10):
        _load(manager, number, f"Replica{number}")
    worker.actors["own"] = manager._loaded_actor_classes[3]()
    drop_old_actor_classes(manager, kept=10)
    assert len(manager._loaded_actor_classes) == 10
    drop_old_actor_classes(manager, kept=2)
    assert list(manager._loaded_actor_classes) == [3, 8, 9]
    kept = {3, 8, 9, *(_method(f"Replica{number}") for number in (3, 8, 9))}
    assert set(manager._function_execution_info) == set(manager._num_task_executions) == kept


def test_methods_of_a_running_actor_stay_where_a_dropped_class_has_its_name() -> None:
    worker = SimpleNamespace(actors={})
    manager = FunctionActorManager(worker)
    _load(manager, 0, "Gateway")
    worker.actors["own"] = _load(manager, 1, "Gateway")()
    drop_old_actor_classes(manager, kept=1)
    assert list(manager._loaded_actor_classes) == [1]
    assert _method("Gateway") in manager._function_execution_info


# In a process of its own, because it changes Ray's classes.
_LOAD = """
import ray
from ray._private.worker import global_worker
from serve_app.deployments.ray_internals.actor_classes import _KEPT, bound_actor_classes

bound_actor_classes()
bound_actor_classes()
ray.init(num_cpus=0, include_dashboard=False, log_to_driver=False)
handles = []
for number in range(_KEPT + 8):
    actor = ray.remote(type(f"A{number}", (), {"one": lambda self: 1}))
    handles.append(actor.options(name=f"a{number}").remote())
for number in range(_KEPT + 8):
    ray.get_actor(f"a{number}")
manager = global_worker.function_actor_manager
print(len(manager._loaded_actor_classes), len(ray.actor._ActorClassMethodMetadata._cache))
"""


@pytest.mark.nightly
def test_a_process_keeps_the_newest_classes() -> None:
    process = subprocess.run(
        [sys.executable, "-c", _LOAD], capture_output=True, text=True, timeout=120, check=False
    )
    assert process.stdout.split() == ["32", "32"], process.stderr
