"""Makes Ray Serve agree with the registry: what is seen, what should be, and the steps between.

``plan`` is a pure function; ``Reconciler`` looks and acts. Both can be repeated at any moment:
when nothing differs, nothing is done.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import psutil
import ray
from ray import serve
from ray._private.state import available_resources_per_node
from ray.serve.context import _get_global_client

from serve_app.control.registry import Desired
from serve_app.types import ModelSpec, Worker

log = logging.getLogger("torchrelay.reconciler")

OURS = "torchrelay"  # the key in user_config by which an application is known as ours
ATTEMPT = "attempt"

# A replica whose route or settings change is UPDATING for a moment, one that a new controller has found again is
# RECOVERING; both answer all the while.
_SERVES = ("RUNNING", "UPDATING", "RECOVERING", "PENDING_MIGRATION")


@dataclass(frozen=True)
class Seen:
    """One version's application, as Serve has it now."""

    app: str
    route: str | None
    replicas: int  # asked for
    config: Mapping[str, Any]
    attempt: int
    status: str  # of the application: RUNNING, DEPLOYING, DEPLOY_FAILED, UNHEALTHY, DELETING
    message: str
    workers: tuple[Worker, ...]  # alive, ready or not
    scaling: Mapping[str, Any] | None = None  # what the autoscaler goes by; None: it has nothing to do with it

    @property
    def running(self) -> int:
        return sum(worker.ready for worker in self.workers)

    @property
    def failed(self) -> bool:
        """Serve has given up starting it."""
        return self.status == "DEPLOY_FAILED" and self.running == 0


@dataclass(frozen=True)
class Deploy:
    desired: Desired
    route: str | None
    attempt: int = 0  # a rolling update that Serve gave up goes on only when something differs: this number
    scaling: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Delete:
    app: str


def plan(
    desired: Mapping[str, Desired],
    seen: Mapping[str, Seen],
    config_of: Callable[[Desired], Mapping[str, Any]],
    scaling_of: Callable[[ModelSpec, bool], Mapping[str, Any] | None],
) -> list[list[Deploy | Delete]]:
    """The steps from what is seen to what is desired, in waves: a wave begins when the one before was accepted.

    An application gets its route once a replica of it runs, and gives it back when it goes to sleep: without a
    replica the gateway answers, and can wait, or say that it is loading. A route changes hands in two waves, for
    Serve refuses to give one away that is still held. ``scaling_of`` says what the autoscaler should be told, of
    a version that it has, or has not, had to do with before; how many replicas there are is then its own affair.
    """
    unwanted = [app for app, s in seen.items() if app not in desired and s.status != "DELETING"]
    first: list[Deploy | Delete] = [Delete(app) for app in unwanted]
    then: list[Deploy | Delete] = []
    held = {s.route: s.app for s in seen.values() if s.route and s.app in desired}
    for app, want in desired.items():
        have = seen.get(app)
        if have is not None and have.status == "DELETING":
            continue  # its name is free again when its replicas have drained
        route = want.route if have is not None and (have.running or (have.route and have.replicas)) else None
        scaling = scaling_of(want.spec, have is not None and have.scaling is not None)
        attempt = have.attempt + (have.status == "DEPLOY_FAILED") if have is not None else 0
        same = (
            have is not None
            and have.route == route
            and _scales(have, want, scaling)
            and have.config == config_of(want)
            and have.attempt == attempt
        )
        if not same:
            wave = then if route and held.get(route, app) != app else first
            wave.append(Deploy(want, route, attempt, scaling))
    return [wave for wave in (first, then) if wave]


def _scales(have: Seen, want: Desired, scaling: Mapping[str, Any] | None) -> bool:
    """Whether as many replicas are asked for as should be, or the autoscaler knows how many."""
    if scaling is None or have.scaling is None:
        return scaling is have.scaling and have.replicas == want.low
    return all(have.scaling.get(key) == value for key, value in scaling.items())


class Reconciler:
    """Looks at Serve and acts on it. Blocking, and not thread-safe: one thread calls it."""

    def __init__(
        self,
        application: Callable[[Deploy], Any],
        config_of: Callable[[Desired], Mapping[str, Any]],
        scaling_of: Callable[[ModelSpec, bool], Mapping[str, Any] | None],
    ) -> None:
        self._application = application
        self._config_of = config_of
        self._scaling_of = scaling_of

    def look(self) -> dict[str, Seen]:
        """Every application of ours, by name."""
        details = _get_global_client().get_serve_details()
        seen = {}
        for name, app in details["applications"].items():
            for deployment in app["deployments"].values():
                config = deployment["deployment_config"]
                ours = config.get("user_config") or {}
                if OURS in ours:
                    seen[name] = Seen(
                        app=name,
                        route=app["route_prefix"],
                        replicas=deployment["target_num_replicas"],
                        config={key: value for key, value in ours.items() if key != ATTEMPT},
                        attempt=ours.get(ATTEMPT, 0),
                        status=str(getattr(app["status"], "value", app["status"])),
                        message=plain(deployment["message"] or app["message"] or ""),
                        workers=tuple(_worker(r) for r in deployment["replicas"]),
                        scaling=config.get("autoscaling_config"),
                    )
        return seen

    def sources(self, states: tuple[str, ...] = ()) -> set[str]:
        """The replica ids of everything that runs, the gateways too; with ``states``, of what is in one of them."""
        details = _get_global_client().get_serve_details()
        return {
            replica["replica_id"]
            for app in details["applications"].values()
            for deployment in app["deployments"].values()
            for replica in deployment["replicas"]
            if not states or str(getattr(replica["state"], "value", replica["state"])) in states
        }

    def free(self) -> dict[str, dict[str, float]]:
        """The CPUs, GPUs and what else nobody has claimed on each machine, by its address."""
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        free: dict[str, dict[str, float]] = {}
        for node, has in available_resources_per_node().items():
            address = addresses.get(node, node)
            free[f"{address} ({node[:6]})" if address in free else address] = has  # several nodes on one machine
        return free

    def act(self, desired: Mapping[str, Desired], seen: Mapping[str, Seen]) -> int:
        """Take the steps that ``plan`` names; how many there were."""
        steps = 0
        for wave in plan(desired, seen, self._config_of, self._scaling_of):
            targets = []
            for step in wave:
                steps += 1
                if isinstance(step, Delete):
                    log.info("deleting %s", step.app)
                    serve.delete(step.app, _blocking=False)
                else:
                    app = step.desired.spec.ref.app
                    low, high = step.desired.low, step.desired.high
                    count = f"{low} to {high}" if low < high else low
                    log.info("deploying %s: %s replicas, route %s", app, count, step.route)
                    targets.append(serve.RunTarget(self._application(step), app, step.route))
            if targets:
                serve.run_many(
                    targets, wait_for_ingress_deployment_creation=False, wait_for_applications_running=False
                )
        return steps


def plain(message: str) -> str:
    """Ray Serve's message without colours, and with what it means where Ray names only a class of its own."""
    text = _COLOUR.sub("", message).strip()
    if "ActorDiedError" in text:
        return f"{_ENDED}\n{text}"
    return text


_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_ENDED = (
    "The replica's process ended while it loaded the model: the handler ended it (os._exit), or native code of it "
    "crashed (the server's log then shows where), or the system killed it because memory ran out."
)


def _worker(replica: Mapping[str, Any]) -> Worker:
    state = str(getattr(replica["state"], "value", replica["state"]))
    pid = replica.get("pid") or 0  # not there before its process is
    return Worker(
        id=replica["replica_id"],
        pid=pid,
        started=replica["start_time_s"],
        ready=state in _SERVES,
        memory=_resident(pid),
        node=replica.get("node_ip") or "",
    )


def is_dead(worker: Worker) -> bool:
    """Whether a replica of this machine has no process any more; Serve may take seconds to see that."""
    if worker.node != ray.util.get_node_ip_address():
        return False
    try:
        return psutil.Process(worker.pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
    except psutil.Error:
        return False


def _resident(pid: int) -> int:
    """Resident bytes of a process of this machine; 0 for another machine's."""
    try:
        process = psutil.Process(pid)
        return process.memory_info().rss if "ray" in process.name().lower() else 0
    except psutil.Error:
        return 0
