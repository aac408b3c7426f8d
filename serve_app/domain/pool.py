"""Pools: shared processes, called hosts, which load many versions on demand."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

import pydantic

from serve_app.domain.model import ModelRef
from serve_app.domain.rendezvous import rank_replicas
from serve_app.domain.validation import STRICT

# The model name of all pools; no model has it, because names do not begin with a period.
POOLS = ".pool"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")


def is_pool_name(name: str) -> bool:
    """Return whether a pool can have this name: it is part of the name of a Serve application."""
    return _NAME.fullmatch(name) is not None and "--" not in name


def check_pool_name(name: str) -> str:
    """Return a pool's name. Raises ValueError where no pool can have it."""
    if not is_pool_name(name):
        raise ValueError(
            f"{name!r} cannot be a pool's name: at most 63 letters, digits and any of _ . -, without --"
        )
    return name


PoolName = Annotated[str, pydantic.AfterValidator(check_pool_name)]


@dataclass(frozen=True)
class PoolSettings:
    """A pool: a number of hosts, the processes that load its versions on demand."""

    __pydantic_config__ = STRICT

    memory: Annotated[int, pydantic.Field(gt=0)] = 2048  # MiB of loaded versions in each host
    hosts: Annotated[int, pydantic.Field(gt=0)] = 1
    num_gpus: Annotated[float, pydantic.Field(ge=0)] = 0.0  # that each host claims
    num_cpus: Annotated[float, pydantic.Field(ge=0)] = 0.0
    allowed_models: tuple[str, ...] = ("*",)  # patterns; versions of a pool can read each other's memory


def pool_ref(name: str) -> ModelRef:
    """Return the identity of a pool's own Serve application."""
    return ModelRef(POOLS, name)


def rank_hosts(ref: ModelRef, hosts: Iterable[str]) -> list[str]:
    """Return the hosts of a pool for a version, best first, in the same order for every process."""
    return rank_replicas(f"{ref.name}\0{ref.version}", hosts)


@dataclass(frozen=True, slots=True)
class LoadedVersion:
    """A version that a host has loaded; its memory in bytes."""

    revision: str
    memory: int = 0
    busy: float = 0.0  # share of the last seconds in which its handler ran


@dataclass(frozen=True, slots=True)
class HostEvent:
    """An event of a version in a host; ``detail`` is a text for the operator."""

    kind: Literal["load_failed", "leak"]
    ref: ModelRef
    revision: str
    detail: str


@dataclass(frozen=True, slots=True)
class HostReport:
    """The state of a host: what it has loaded, and what happened since its last report."""

    pool: str
    loaded: Mapping[ModelRef, LoadedVersion] = field(default_factory=dict)
    events: tuple[HostEvent, ...] = ()
