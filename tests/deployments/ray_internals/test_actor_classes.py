"""The classes of replicas: small in the GCS, equal for equal names, and dropped once replicas have ended."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from ray import JobID
from ray._private.function_manager import FunctionActorManager
from ray._raylet import PythonFunctionDescriptor
from ray.serve._private.deployment_info import DeploymentInfo
from ray.serve._private.replica import ReplicaActor

from serve_app.deployments.ray_internals.actor_classes import drop_old_actor_classes, share_replica_class


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


class KeyValueStore(dict[bytes, bytes]):
    """The GCS, as the function manager uses it."""

    def internal_kv_put(self, key: bytes, value: bytes, overwrite: bool, namespace: str) -> None:
        assert overwrite
        self[key] = value

    def internal_kv_get(self, key: bytes, namespace: str) -> bytes | None:
        return self.get(key)


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> tuple[KeyValueStore, FunctionActorManager]:
    """Return a store and the manager of a process that writes to it, as that of Serve's controller."""
    monkeypatch.setattr(DeploymentInfo, "actor_def", DeploymentInfo.actor_def)
    monkeypatch.setattr(FunctionActorManager, "export_actor_class", FunctionActorManager.export_actor_class)
    share_replica_class()
    store = KeyValueStore()
    worker = SimpleNamespace(
        actors={}, gcs_client=store, load_code_from_local=False, current_job_id=JobID.from_int(1)
    )
    return store, FunctionActorManager(worker)


def export(manager: FunctionActorManager, name: str) -> Any:
    """Store the class of a deployment's replicas, as Ray does; return its descriptor."""
    info = DeploymentInfo(None, None, 0, "", actor_name=name)
    metadata = info.actor_def.__ray_metadata__
    descriptor = metadata.actor_creation_function_descriptor
    manager.export_actor_class(metadata.modified_class, descriptor, metadata.method_meta.methods.keys())
    return descriptor


def test_the_class_of_a_replica_is_small_and_stored_once_for_its_name(stored: Any) -> None:
    store, manager = stored
    first, second = (export(manager, f"ServeReplica:m{number}:m") for number in (1, 2))
    assert (first.class_name, second.class_name) == ("ServeReplica:m1:m", "ServeReplica:m2:m")
    assert len(store) == 2
    assert max(map(len, store.values())) < 1500, "Ray's own are of 22,000 bytes"
    assert export(manager, "ServeReplica:m1:m").function_id == first.function_id
    assert len(store) == 2


def test_another_process_loads_the_class_with_its_name_and_its_methods(stored: Any) -> None:
    _, manager = stored
    descriptor = export(manager, "ServeReplica:m1:m")
    loaded = FunctionActorManager(manager._worker).load_actor_class(JobID.from_int(1), descriptor)
    assert loaded.__name__ == "ServeReplica:m1:m"
    assert issubclass(loaded, ReplicaActor)
    assert {"__ray_terminate__", "handle_request", "check_health"} <= set(dir(loaded))


def test_other_actor_classes_are_stored_as_they_are(stored: Any) -> None:
    _, manager = stored
    other = type("Other", (), {"answer": lambda self: 42})
    descriptor = PythonFunctionDescriptor.from_class(other)
    manager.export_actor_class(other, descriptor, ["answer"])
    loaded = manager.load_actor_class(JobID.from_int(1), descriptor)
    assert loaded().answer() == 42


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
