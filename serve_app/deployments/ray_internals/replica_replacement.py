"""Replacement of single replicas by Ray Serve's controller.

Ray Serve replaces the replicas of an old version: it starts a new one first (``max_surge_percent``), and then
drains the old one. A single replica is replaced by the same code once it counts as one of an old version. A
new controller forgets the mark, so that the caller repeats it. ``__ray_call__`` runs the functions in the
controller's event loop, between two rounds.
"""

from __future__ import annotations

from copy import copy
from typing import Any

import ray
from ray.serve._private.common import ReplicaState
from ray.serve.context import _get_global_client

_REPLACED = "-replaced"  # ends the code version of a replica that is to be replaced


def replace_replica(app: str, replica: str, drain_first: bool) -> bool:
    """Replace a replica; return whether it is running.

    Its application continues with a new replica. With ``drain_first`` it stops before that one has started.
    """
    controller = _get_global_client()._controller
    return bool(ray.get(controller.__ray_call__.remote(mark_replaced, app, replica, drain_first)))


def mark_replaced(controller: Any, app: str, replica_id: str, drain_first: bool) -> bool:
    """Mark a running replica as one of an old version, or stop it; return whether it was running."""
    for deployment, state in controller.deployment_state_manager._deployment_states.items():
        if deployment.app_name != app:
            continue
        for replica in state._replicas.get([ReplicaState.RUNNING]):
            if replica.replica_id.unique_id == replica_id:
                _replace(state, replica, drain_first)
                return True
    return False


def _replace(state: Any, replica: Any, drain_first: bool) -> None:
    # Replicas are counted by state and version, hence removed and added again.
    state._replicas.remove({replica.replica_id})
    version = replica._actor._version
    if not version.code_version.endswith(_REPLACED):
        outdated = copy(version)
        outdated.code_version += _REPLACED
        outdated.compute_hashes()
        replica._actor._version = outdated
    if drain_first:
        state._stop_replica(replica, graceful_stop=True)
    else:
        state._replicas.add(ReplicaState.RUNNING, replica)
    state._in_transition = True
