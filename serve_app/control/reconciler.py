"""Reconciliation of Ray Serve with the registry: observation, desired state, and the actions between them.

``plan`` is a pure function; ``Reconciler`` observes and acts. Both may be repeated at any moment: when
nothing differs, there is no action.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import psutil
import ray
from ray import serve
from ray._private.state import available_resources_per_node
from ray.serve.context import _get_global_client

from serve_app.control import placement_check
from serve_app.control.registry import DesiredState
from serve_app.control.replica_health import ObservedApp
from serve_app.domain.model import ModelSpec, ReplicaInfo

log = logging.getLogger(__name__)
T = TypeVar("T")

OURS = "torchrelay"  # the key in user_config that marks an application of this server
ATTEMPT = "attempt"
MEMORY = "memory"

# A replica whose route or settings change is UPDATING for a moment, and one that a new controller has found
# again is RECOVERING; both execute requests meanwhile.
_READY_STATES = ("RUNNING", "UPDATING", "RECOVERING", "PENDING_MIGRATION")


@dataclass(frozen=True)
class DeployAction:
    """The deployment of an application, new or changed."""

    desired: DesiredState
    route: str | None
    attempt: int = 0  # a rolling update that Serve gave up goes on only when something differs: this number
    scaling: Mapping[str, Any] | None = None
    memory: int = 0  # bytes that each rank claims


@dataclass(frozen=True)
class DeleteAction:
    """The deletion of an application."""

    app: str


def plan(
    desired: Mapping[str, DesiredState],
    observed: Mapping[str, ObservedApp],
    user_config: Callable[[DesiredState], Mapping[str, Any]],
    autoscaling_config: Callable[[ModelSpec, bool], Mapping[str, Any] | None],
) -> list[list[DeployAction | DeleteAction]]:
    """Return the actions from the observed to the desired state, in waves.

    A wave starts when Serve has accepted the one before. An application gets its route once a replica of it
    runs, and loses it when it scales to zero: without a replica the gateway answers, and can wait or return
    that the model is loading. A route moves in two waves, because Serve refuses a route that is still in use.
    ``autoscaling_config`` returns the autoscaler's configuration of a version, given whether the autoscaler
    manages the version already; it then determines the number of replicas. A changed claim of memory would
    restart the replicas, so the claim changes only with their code.
    """
    unwanted = [app for app, s in observed.items() if app not in desired and s.status != "DELETING"]
    first: list[DeployAction | DeleteAction] = [DeleteAction(app) for app in unwanted]
    second: list[DeployAction | DeleteAction] = []
    route_owners = {s.route: s.app for s in observed.values() if s.route and s.app in desired}
    for app, state in desired.items():
        current = observed.get(app)
        if current is not None and current.status == "DELETING":
            continue  # its name is free again when its replicas current drained
        route = (
            state.route
            if current is not None and (current.running or (current.route and current.replicas))
            else None
        )
        bounded = state.spec
        if state.replicas is not None:
            bounded = bounded.with_(min_workers=state.replicas, max_workers=state.replicas)
        scaling = autoscaling_config(bounded, current is not None and current.scaling is not None)
        attempt = current.attempt + (current.status == "DEPLOY_FAILED") if current is not None else 0
        config = user_config(state)
        keeps_replicas = current is not None and current.config.get("code") == config.get("code")
        memory = current.memory if current is not None and keeps_replicas else state.spec.claimed_memory
        is_unchanged = (
            current is not None
            and current.route == route
            and _has_desired_scale(current, state, scaling)
            and current.config == config
            and current.attempt == attempt
        )
        if not is_unchanged:
            wave = second if route and route_owners.get(route, app) != app else first
            wave.append(DeployAction(state, route, attempt, scaling, memory))
    return [wave for wave in (first, second) if wave]


def _has_desired_scale(current: ObservedApp, state: DesiredState, scaling: Mapping[str, Any] | None) -> bool:
    """Return whether the requested replicas, or the autoscaler's bounds, are the desired ones."""
    if scaling is None or current.scaling is None:
        return scaling is current.scaling and current.replicas == state.min_replicas
    return all(current.scaling.get(key) == value for key, value in scaling.items())


@dataclass(frozen=True)
class ActResult:
    """The outcome of a round of actions.

    ``problems`` holds by application why it could not be deployed. ``shortages`` holds by application why
    fewer replicas are requested than desired: the cluster is too small for them.
    """

    count: int
    problems: Mapping[str, str]
    shortages: Mapping[str, str]


def _attempt(
    app: str, problems: dict[str, str], function: Callable[..., T], *args: Any, **options: Any
) -> T | None:
    """Call a function for an application; add its error to ``problems`` instead of raising it."""
    try:
        return function(*args, **options)
    except Exception as error:
        log.exception("%s could not be deployed", app)
        problems[app] = f"{type(error).__name__}: {error}"
        return None


def _deploy(targets: Sequence[serve.RunTarget], problems: dict[str, str]) -> None:
    """Deploy applications together; where Serve refuses them, deploy each by itself."""
    waits = {"wait_for_ingress_deployment_creation": False, "wait_for_applications_running": False}
    if not targets:
        return
    try:
        serve.run_many(targets, **waits)
    except Exception:
        if len(targets) > 1:
            log.exception("%d applications could not be deployed together", len(targets))
        for target in targets:
            _attempt(target.name, problems, serve.run_many, [target], **waits)


def _name_by_address(nodes: Mapping[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Return values of nodes, which are by id, by address; several nodes may run on one machine."""
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    named: dict[str, dict[str, float]] = {}
    for node, value in nodes.items():
        address = addresses.get(node, node)
        named[f"{address} ({node[:6]})" if address in named else address] = value
    return named


def _list_machines() -> dict[str, dict[str, float]]:
    """Return the resources of each live node, free or not, by its id."""
    return {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}


class Reconciler:
    """The observer of Serve and its only writer. Blocking, and not thread-safe: a single thread calls it."""

    def __init__(
        self,
        build_application: Callable[[DeployAction], Any],
        user_config: Callable[[DesiredState], Mapping[str, Any]],
        autoscaling_config: Callable[[ModelSpec, bool], Mapping[str, Any] | None],
    ) -> None:
        self._build_application = build_application
        self._user_config = user_config
        self._autoscaling_config = autoscaling_config

    def observe(self) -> dict[str, ObservedApp]:
        """Return every application of this server, by name."""
        details = _get_global_client().get_serve_details()
        observed = {}
        for name, app in details["applications"].items():
            for deployment in app["deployments"].values():
                config = deployment["deployment_config"]
                user_config = config.get("user_config") or {}
                if OURS in user_config:
                    observed[name] = ObservedApp(
                        app=name,
                        route=app["route_prefix"],
                        replicas=deployment["target_num_replicas"],
                        config={k: value for k, value in user_config.items() if k not in (ATTEMPT, MEMORY)},
                        attempt=user_config.get(ATTEMPT, 0),
                        status=str(getattr(app["status"], "value", app["status"])),
                        message=explain_message(deployment["message"] or app["message"] or ""),
                        workers=tuple(_to_replica_info(r) for r in deployment["replicas"]),
                        scaling=config.get("autoscaling_config"),
                        memory=user_config.get(MEMORY, 0),
                    )
        return observed

    def list_replicas(self, states: tuple[str, ...] = ()) -> set[str]:
        """Return the ids of all replicas, gateways included; with ``states``, of those in one of them."""
        details = _get_global_client().get_serve_details()
        return {
            replica["replica_id"]
            for app in details["applications"].values()
            for deployment in app["deployments"].values()
            for replica in deployment["replicas"]
            if not states or str(getattr(replica["state"], "value", replica["state"])) in states
        }

    def get_free_resources(self) -> dict[str, dict[str, float]]:
        """Return each node's free CPUs, GPUs, memory and other resources, by its address."""
        return _name_by_address(available_resources_per_node())

    def get_total_resources(self) -> dict[str, dict[str, float]]:
        """Return each live node's resources, free or not, by its address."""
        return _name_by_address(_list_machines())

    def act(self, desired: Mapping[str, DesiredState], observed: Mapping[str, ObservedApp]) -> ActResult:
        """Execute the actions of ``plan``; an action that fails does not keep the others from execution."""
        count = 0
        problems: dict[str, str] = {}
        running = {app: current.running for app, current in observed.items()}
        limited, machines = desired, {}
        if any(state.max_replicas > placement_check.MARGIN for state in desired.values()):
            machines = _list_machines()
            limited = placement_check.limit_to_cluster(desired, running, machines)
        configs = {app: _attempt(app, problems, self._user_config, state) for app, state in limited.items()}
        plannable = {app: state for app, state in limited.items() if app not in problems}
        for wave in plan(
            plannable, observed, lambda state: configs[state.spec.ref.app] or {}, self._autoscaling_config
        ):
            targets = []
            for action in wave:
                count += 1
                if isinstance(action, DeleteAction):
                    if action.app in problems:
                        continue  # its replicas go on as they are
                    log.info("deleting %s", action.app)
                    _attempt(action.app, problems, serve.delete, action.app, _blocking=False)
                elif (target := self._build_target(action, problems)) is not None:
                    targets.append(target)
            _deploy(targets, problems)
        shortages = {
            app: placement_check.explain_excess(
                state.spec.with_(min_workers=state.min_replicas, max_workers=state.max_replicas), machines
            )
            for app, state in desired.items()
            if limited[app].min_replicas < state.min_replicas
        }
        return ActResult(count, problems, shortages)

    def _build_target(self, action: DeployAction, problems: dict[str, str]) -> serve.RunTarget | None:
        app = action.desired.spec.ref.app
        low, high = action.desired.min_replicas, action.desired.max_replicas
        replicas = f"{low} to {high}" if low < high else low
        log.info("deploying %s: %s replicas, route %s", app, replicas, action.route)
        application = _attempt(app, problems, self._build_application, action)
        return None if app in problems else serve.RunTarget(application, app, action.route)


def explain_message(message: str) -> str:
    """Return Ray Serve's message without colours, explained where Ray names only one of its classes."""
    text = _ANSI_COLOUR.sub("", message).strip()
    if "ActorDiedError" in text:
        return f"{_PROCESS_ENDED}\n{text}"
    return text


_ANSI_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_PROCESS_ENDED = (
    "The replica's process ended while it loaded the model: the handler ended it (os._exit), or its native "
    "code crashed (the server's log then shows where), or the system killed it because memory ran out."
)


def _to_replica_info(replica: Mapping[str, Any]) -> ReplicaInfo:
    state = str(getattr(replica["state"], "value", replica["state"]))
    pid = replica.get("pid") or 0  # absent before its process starts
    node = replica.get("node_ip") or ""
    return ReplicaInfo(
        id=replica["replica_id"],
        pid=pid,
        started_at=replica["start_time_s"],
        ready=state in _READY_STATES,
        memory=_resident_bytes(pid) if node == ray.util.get_node_ip_address() else 0,
        node=node,
    )


def is_dead(worker: ReplicaInfo) -> bool:
    """Return whether the process of a replica on this machine has ended; Serve may notice seconds later."""
    if worker.node != ray.util.get_node_ip_address():
        return False
    try:
        return psutil.Process(worker.pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
    except psutil.Error:
        return False


def _resident_bytes(pid: int) -> int:
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0
