"""Whether a replica has a place on the machines of the cluster, and what is free there where it has none."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import floor
from typing import Any

from serve_app.types import ModelSpec

_LISTED = 8  # machines, those with the most first
_ROUNDING = 1e-4  # Ray's own


def lacking(spec: ModelSpec, free: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, Any]]:
    """What a replica of ``spec`` asks for and is not free, by kind; nothing where there is a place for it.

    ``free`` is what each machine, by its address, has of each kind. ``wanted`` and ``free`` are of all ranks and of all
    machines together; where there are several of these, ``placement`` says how the ranks must lie on them, and
    ``machines`` what each has, ``more`` being those that are left out.
    """
    needs = {kind: amount for kind, amount in (("CPU", spec.num_cpus), ("GPU", spec.num_gpus)) if amount > 0}
    placement = spec.placement_strategy if spec.ranks > 1 else "STRICT_PACK"

    def fits(kinds: Collection[str]) -> bool:
        held = [min(floor((has.get(kind, 0) + _ROUNDING) / needs[kind]) for kind in kinds) for has in free.values()]
        if placement == "STRICT_PACK":
            return max(held, default=0) >= spec.ranks
        return sum(min(ranks, 1) if placement == "STRICT_SPREAD" else ranks for ranks in held) >= spec.ranks

    if not needs or fits(needs):
        return {}
    short = [kind for kind in needs if not fits([kind])] or list(needs)  # each is somewhere, and all are nowhere
    return {kind: _told(kind, needs[kind] * spec.ranks, placement, free) for kind in short}


def _told(kind: str, wanted: float, placement: str, free: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    machines = sorted(((address, has.get(kind, 0.0)) for address, has in free.items()), key=lambda one: -one[1])
    told: dict[str, Any] = {"wanted": wanted, "free": sum(amount for _, amount in machines)}
    if len(machines) > 1:
        told |= {"placement": placement, "machines": dict(machines[:_LISTED])}
    if len(machines) > _LISTED:
        told["more"] = len(machines) - _LISTED
    return told


def in_words(spec: ModelSpec, short: Mapping[str, Mapping[str, Any]]) -> str:
    """What ``lacking`` told, and the cure, as the end of a sentence about the version."""
    replica = "a replica" if spec.ranks == 1 else f"a replica of {spec.ranks} ranks"
    if not any("machines" in one for one in short.values()):
        asked = "; ".join(f"{one['wanted']:g} {kind} asked, {one['free']:g} free" for kind, one in short.items())
        return f"there is no place for {replica} ({asked}). Make room, add a node, or ask for less"
    asked = " and ".join(_asked(spec, kind, one) for kind, one in short.items())
    cure = "Make room, add a node, or ask for less"
    apart = spec.ranks > 1 and all(one["free"] + _ROUNDING >= one["wanted"] for one in short.values())
    if apart and spec.placement_strategy == "STRICT_PACK":
        cure = "Make room, ask for less, or let its ranks lie on several machines by placement_strategy: PACK"
    return f"there is no place for {replica}, which asks for {asked}. {cure}"


def _asked(spec: ModelSpec, kind: str, one: Mapping[str, Any]) -> str:
    count = f"{spec.ranks} × " if spec.ranks > 1 else ""
    machines = ", ".join(f"{address} {amount:g}" for address, amount in one["machines"].items())
    more = f", and no more on {one['more']} others" if "more" in one else ""
    where = {"STRICT_PACK": " on one machine", "STRICT_SPREAD": f" on {spec.ranks} machines"}.get(one["placement"], "")
    return f"{count}{one['wanted'] / spec.ranks:g} {kind}{where}; free: {machines}{more}"
