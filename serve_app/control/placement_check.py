"""Checks of replicas against the cluster: how many it holds, and which resources a replica lacks.

Machines and node types are mappings from a name to resources as Ray counts them; memory is in bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from math import floor
from typing import Any

from serve_app.control.registry import DesiredState
from serve_app.domain.model import ModelSpec
from serve_app.domain.resources import format_amount

_MAX_LISTED = 8  # machines, those with the most free resources first
_FIX = "Free resources, add a node, or require less"
_ROUNDING = 1e-4  # Ray's own
_MIN_RANK_BYTES = 256 << 20  # of memory; a process with torch has 221 MB of its own without a model
# Replicas without a place that are requested nevertheless: the demand that Ray's node autoscaler sees.
MARGIN = 8


def limit_to_cluster(
    desired: Mapping[str, DesiredState],
    running: Mapping[str, int],
    machines: Mapping[str, Mapping[str, float]],
) -> dict[str, DesiredState]:
    """Return the desired states with no more replicas than the cluster holds, and a margin.

    Serve's controller keeps every requested replica in memory: 2,000 without a place cost it 0.9 GB in 40 s.
    ``machines`` holds each machine's resources, free or not, so that the result does not depend on what other
    versions use. Running replicas, by application, always stay.
    """
    return {app: _limit(state, running.get(app, 0), machines) for app, state in desired.items()}


def _limit(state: DesiredState, running: int, machines: Mapping[str, Mapping[str, float]]) -> DesiredState:
    low, high = state.min_replicas, state.max_replicas
    if high <= MARGIN:
        return state
    limit = max(running, count_fitting(state.spec, machines) + MARGIN)
    if high <= limit:
        return state
    if state.replicas is not None:
        return replace(state, replicas=limit)
    return replace(state, spec=state.spec.with_(min_workers=min(low, limit), max_workers=limit))


def count_fitting(spec: ModelSpec, machines: Mapping[str, Mapping[str, float]]) -> int:
    """Return the number of replicas of a version that the cluster holds if it runs nothing else."""
    needs = _needs(spec)
    ranks = [
        min(floor((resources.get(kind, 0) + _ROUNDING) / amount) for kind, amount in needs.items())
        for resources in machines.values()
    ]
    if spec.ranks == 1 or spec.placement_strategy != "STRICT_PACK":
        return sum(ranks) // spec.ranks
    return sum(count // spec.ranks for count in ranks)


def exceeds_cluster(
    spec: ModelSpec,
    machines: Mapping[str, Mapping[str, float]],
    node_types: Mapping[str, Mapping[str, float]],
) -> bool:
    """Return whether replicas of a version would never be started, because the cluster holds fewer.

    Up to MARGIN more are started, and any number where a node type holds one.
    """
    if spec.min_workers <= MARGIN or find_node_type(spec, node_types):
        return False
    return spec.min_workers > count_fitting(spec, machines) + MARGIN


def explain_excess(spec: ModelSpec, machines: Mapping[str, Mapping[str, float]]) -> str:
    """Return an error for a version with more replicas than the cluster holds, with their number."""
    needs = " and ".join(f"{format_amount(kind, amount)} {kind}" for kind, amount in _needs(spec).items())
    ranks = f"{spec.ranks} × " if spec.ranks > 1 else ""
    return (
        f"{spec.min_workers:,} replicas of {spec.name} {spec.version} are required, and the cluster can hold "
        f"{count_fitting(spec, machines):,} of them, each with {ranks}{needs}. Require no more than these, "
        "or add nodes; nodes that an autoscaler adds are declared in control.node_types"
    )


def find_impossible(
    spec: ModelSpec,
    machines: Mapping[str, Mapping[str, float]],
    node_types: Mapping[str, Mapping[str, float]],
) -> dict[str, dict[str, Any]]:
    """Return the resources of a replica that no machine has, free or not, and no node type; else nothing.

    The result is as that of ``find_missing``.
    """
    if not find_missing(spec, machines) or find_node_type(spec, node_types):
        return {}
    return find_missing(spec, {**machines, **{f"node type {name}": node_types[name] for name in node_types}})


def find_node_type(spec: ModelSpec, node_types: Mapping[str, Mapping[str, float]]) -> str:
    """Return the name of a node type whose nodes hold a replica, or its ranks one by one; else nothing."""
    on_one_node = (
        spec
        if spec.placement_strategy == "STRICT_PACK"
        else spec.with_(tensor_parallel=1, pipeline_parallel=1)
    )
    fitting = (name for name in node_types if not find_missing(on_one_node, {name: node_types[name]}))
    return next(fitting, "")


def _claims(spec: ModelSpec) -> dict[str, float]:
    """Return the resources that each rank claims."""
    claims = {"CPU": spec.num_cpus, "GPU": spec.num_gpus, "memory": spec.claimed_memory}
    return {kind: amount for kind, amount in claims.items() if amount > 0}


def _needs(spec: ModelSpec) -> dict[str, float]:
    """Return the resources that each rank takes: its claims, and the memory of a process at least."""
    return {**_claims(spec), "memory": max(_MIN_RANK_BYTES, spec.claimed_memory)}


def find_missing(spec: ModelSpec, free: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, Any]]:
    """Return the resources that a replica of ``spec`` requests and that are not free, by kind.

    The result is empty where there is a place for the replica. ``free`` holds each machine's free resources,
    by its address. ``wanted`` and ``free`` of the result are sums over all ranks and all machines. With
    several machines, ``placement`` is the placement strategy of the ranks, ``machines`` the free amount of
    each, and ``more`` the number of machines that are left out.
    """
    needs = _claims(spec)
    placement = spec.placement_strategy if spec.ranks > 1 else "STRICT_PACK"

    def fits(kinds: Collection[str]) -> bool:
        ranks_by_machine = [
            min(floor((resources.get(kind, 0) + _ROUNDING) / needs[kind]) for kind in kinds)
            for resources in free.values()
        ]
        if placement == "STRICT_PACK":
            return max(ranks_by_machine, default=0) >= spec.ranks
        if placement == "STRICT_SPREAD":
            ranks_by_machine = [min(ranks, 1) for ranks in ranks_by_machine]
        return sum(ranks_by_machine) >= spec.ranks

    if not needs or fits(needs):
        return {}
    # Each kind may be free somewhere, and all of them together nowhere.
    missing = [kind for kind in needs if not fits([kind])] or list(needs)
    return {kind: _summarize(kind, needs[kind] * spec.ranks, placement, free) for kind in missing}


def _summarize(
    kind: str, wanted: float, placement: str, free: Mapping[str, Mapping[str, float]]
) -> dict[str, Any]:
    amounts = ((address, resources.get(kind, 0.0)) for address, resources in free.items())
    machines = sorted(amounts, key=lambda machine: -machine[1])
    summary: dict[str, Any] = {"wanted": wanted, "free": sum(amount for _, amount in machines)}
    if len(machines) > 1:
        summary |= {"placement": placement, "machines": dict(machines[:_MAX_LISTED])}
    if len(machines) > _MAX_LISTED:
        summary["more"] = len(machines) - _MAX_LISTED
    return summary


def explain_impossible(spec: ModelSpec, missing: Mapping[str, Mapping[str, Any]]) -> str:
    """Return an error for a version that no machine can hold, with the amounts of each."""
    name = f"{spec.name} {spec.version}"
    parts = []
    for kind, summary in missing.items():
        nodes = summary.get("machines", {"the only node": summary["free"]})
        listed = ", ".join(f"{node} has {format_amount(kind, nodes[node])}" for node in nodes)
        more = f", and {summary['more']} others have less" if "more" in summary else ""
        count = f"{spec.ranks} × " if spec.ranks > 1 else ""
        parts.append(f"{count}{format_amount(kind, summary['wanted'] / spec.ranks)} {kind} ({listed}{more})")
    return (
        f"No node of the cluster can hold a replica of {name}, which requires {' and '.join(parts)}. "
        "Require less, or add a larger node; nodes that an autoscaler adds are declared in control.node_types"
    )


def explain(spec: ModelSpec, missing: Mapping[str, Mapping[str, Any]], node_type: str = "") -> str:
    """Return the missing resources and the fix, as the end of a sentence about the version.

    ``node_type`` is the type of the nodes that the node autoscaler adds for it.
    """
    if node_type:
        return f"{explain(spec, missing)}; the node autoscaler adds a node of type {node_type}"
    replica = "a replica" if spec.ranks == 1 else f"a replica of {spec.ranks} ranks"
    if not any("machines" in summary for summary in missing.values()):
        requested = "; ".join(
            f"{format_amount(kind, summary['wanted'])} {kind} required, "
            f"{format_amount(kind, summary['free'])} free"
            for kind, summary in missing.items()
        )
        return f"the cluster lacks resources for {replica} ({requested}). {_FIX}"
    requested = " and ".join(_describe(spec, kind, summary) for kind, summary in missing.items())
    fix = _FIX
    is_scattered = spec.ranks > 1 and all(
        summary["free"] + _ROUNDING >= summary["wanted"] for summary in missing.values()
    )
    if is_scattered and spec.placement_strategy == "STRICT_PACK":
        fix = "Free resources, require less, or spread its ranks over machines by placement_strategy: PACK"
    return f"the cluster lacks resources for {replica}, which requires {requested}. {fix}"


def _describe(spec: ModelSpec, kind: str, summary: Mapping[str, Any]) -> str:
    count = f"{spec.ranks} × " if spec.ranks > 1 else ""
    machines = ", ".join(
        f"{address} {format_amount(kind, amount)}" for address, amount in summary["machines"].items()
    )
    more = f", and no more on {summary['more']} others" if "more" in summary else ""
    where = {"STRICT_PACK": " on one machine", "STRICT_SPREAD": f" on {spec.ranks} machines"}.get(
        summary["placement"], ""
    )
    wanted = format_amount(kind, summary["wanted"] / spec.ranks)
    return f"{count}{wanted} {kind}{where}; free: {machines}{more}"
