"""The classes of ended replicas are dropped from Ray's function manager."""

from __future__ import annotations

from types import SimpleNamespace

from ray._private.function_manager import FunctionActorManager

from serve_app.deployments.actor_classes import drop_old_actor_classes


def test_old_classes_are_dropped_and_those_of_running_actors_stay() -> None:
    worker = SimpleNamespace(actors={})
    worker.function_actor_manager = manager = FunctionActorManager(worker)
    for number in range(10):
        manager._loaded_actor_classes[number] = type(f"Replica{number}", (), {})
        manager._function_execution_info[number] = object()
    worker.actors["own"] = manager._loaded_actor_classes[3]()
    drop_old_actor_classes(worker, kept=10)
    assert len(manager._loaded_actor_classes) == 10
    drop_old_actor_classes(worker, kept=2)
    assert list(manager._loaded_actor_classes) == [3, 8, 9]
    assert list(manager._function_execution_info) == [3, 8, 9]


def test_a_process_without_ray_has_none() -> None:
    drop_old_actor_classes(SimpleNamespace(actors={}))
