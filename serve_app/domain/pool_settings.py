"""The settings of one pool: items of the section ``pools``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import pydantic

from serve_app.domain.pool import check_pool_name
from serve_app.domain.validation import STRICT

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
