"""An experiment: which arms a model's calls are dealt to, and what is measured of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any, Literal

from serve_app import documents, json_path
from serve_app.errors import BadRequest
from serve_app.policy import Key, Trial, allocate, wrong_weights

GROUPS = 1_000  # into which an arm's buckets are put together for its variance
AT_ONCE = 10_000  # events in one request
GREATEST = 1e12  # of a reward: more could not be squared and summed
_LONGEST = 200  # characters of a name, and of an event's id


@dataclass(frozen=True)
class Arm:
    __pydantic_config__ = documents.STRICT
    version: str
    weight: int  # basis points


@dataclass(frozen=True)
class Metric:
    """What is compared between the arms.

    ``latency``: seconds from a call's arrival to its answer. ``error_rate``: the share of calls that failed.
    ``output``: the number at ``path`` of the answer. ``reward``: what is posted later for a call or a key; where
    nothing was posted it counts as zero, unless it is measured ``per`` event.
    """

    __pydantic_config__ = documents.STRICT
    name: str
    kind: Literal["latency", "error_rate", "output", "reward"] = "latency"
    goal: Literal["increase", "decrease"] | None = None  # None: decrease for latency and error_rate, else increase
    path: str = ""
    per: Literal["exposure", "event"] = "exposure"

    @property
    def wanted(self) -> Literal["increase", "decrease"]:
        return self.goal or ("decrease" if self.kind in ("latency", "error_rate") else "increase")


@dataclass(frozen=True)
class Experiment:
    __pydantic_config__ = documents.STRICT
    name: str
    arms: Mapping[str, Arm]
    metrics: tuple[Metric, ...]
    baseline: str
    key: Key | None = None  # None: each call is assigned by itself
    salt: str = ""  # empty: the experiment's id
    id: str = ""
    model: str = ""
    state: Literal["running", "stopped"] = "running"
    began: float = 0.0  # seconds since the epoch
    ended: float = 0.0

    @property
    def running(self) -> bool:
        return self.state == "running"

    @property
    def versions(self) -> set[str]:
        return {arm.version for arm in self.arms.values()}

    @property
    def trial(self) -> Trial:
        """What the data plane does for it."""
        rewards = any(metric.kind == "reward" for metric in self.metrics)
        return Trial(
            id=self.id,
            arms={name: arm.version for name, arm in self.arms.items()},
            allocation=allocate({name: arm.weight for name, arm in self.arms.items()}),
            baseline=self.baseline,
            key=self.key,
            salt=self.salt or self.id,
            outputs=tuple((metric.name, metric.path) for metric in self.metrics if metric.kind == "output"),
            exposures=self.key is not None or rewards,
            rewards=rewards,
        )


_ASKED = ("name", "arms", "metrics", "baseline", "key", "salt")


def read(document: Any) -> Experiment:
    """The experiment that an operator's document asks for. Raises BadRequest, which names the key and the cure."""
    if not isinstance(document, Mapping):
        raise BadRequest("An experiment is a JSON object with name, arms, metrics and baseline.")
    if unknown := [key for key in document if key not in _ASKED]:
        near = documents.near_miss(str(unknown[0]), _ASKED)
        cure = f"did you mean {near!r}?" if near else f"known here: {', '.join(_ASKED)}"
        raise BadRequest(f"Experiment: unknown key {unknown[0]!r}; {cure}")
    try:
        experiment = documents.read(Experiment, document)
    except documents.Misread as error:
        raise BadRequest(f"Experiment: {error}") from None
    if wrong := _wrong(experiment):
        raise BadRequest(f"Experiment: {wrong}")
    return experiment


def _wrong(experiment: Experiment) -> str:
    if not experiment.name:
        return "name is empty; give it one by which people know it"
    if len(experiment.name) > _LONGEST:
        return f"name has {len(experiment.name)} characters; it has at most {_LONGEST}"
    if "" in experiment.arms:
        return "an arm's name is empty"
    if len(experiment.arms) < 2:
        return f"arms must be two or more, and are {len(experiment.arms)}"
    if wrong := wrong_weights({name: arm.weight for name, arm in experiment.arms.items()}, "arms"):
        return wrong
    if nothing := [name for name, arm in experiment.arms.items() if arm.weight == 0]:
        return f"arms.{nothing[0]} has no share, so nothing could be measured of it"
    if experiment.baseline not in experiment.arms:
        return f"baseline {experiment.baseline!r} is none of the arms {', '.join(experiment.arms)}"
    if not experiment.metrics:
        return "metrics is empty; name at least one to compare"
    names = [metric.name for metric in experiment.metrics]
    if "" in names:
        return "a metric's name is empty"
    if doubled := [name for name in names if names.count(name) > 1]:
        return f"two metrics are called {doubled[0]!r}"
    if long := [name for name in (*experiment.arms, *names) if len(name) > _LONGEST]:
        return f"the name {long[0][:20]!r}... has {len(long[0])} characters; an arm or a metric has at most {_LONGEST}"
    for metric in experiment.metrics:
        if (metric.kind == "output") != bool(metric.path):
            return f"metric {metric.name!r}: a path is wanted for the kind output, and only there"
        if metric.per == "event" and metric.kind != "reward":
            return f"metric {metric.name!r}: only a reward is measured per event"
        try:
            json_path.steps(metric.path)
        except ValueError as error:
            return f"metric {metric.name!r}: {error}"
    return ""


@dataclass(frozen=True)
class Reward:
    """A value that became known after a call: that with ``request_id``, or those of whoever showed ``key``."""

    __pydantic_config__ = documents.STRICT
    value: float  # true is 1
    request_id: str = ""
    key: str = ""
    metric: str = ""  # may be left out where the experiment has one reward alone
    id: str = ""  # two with the same are one; without it, two for the same call or key are

    def __post_init__(self) -> None:
        if bool(self.request_id) == bool(self.key):
            raise ValueError("an event names either a request_id or a key")
        if not isfinite(self.value):
            raise ValueError(f"value is a finite number, and is {self.value}")
        if abs(self.value) > GREATEST:
            raise ValueError(f"value is between -{GREATEST:g} and {GREATEST:g}, and is {self.value:g}")
        if len(self.id) > _LONGEST:
            raise ValueError(f"id has {len(self.id)} characters; it has at most {_LONGEST}")

    @property
    def unit(self) -> str:
        return self.request_id or self.key


def read_rewards(document: Any) -> list[Reward]:
    """One event, a list of them, or ``{"events": [...]}``. Raises BadRequest, which names the key and the cure."""
    if isinstance(document, Mapping) and "events" in document:
        if more := [key for key in document if key != "events"]:
            raise BadRequest(f"Events: unknown key {more[0]!r} beside 'events'; the list stands alone there.")
        document = document["events"]
    elif isinstance(document, Mapping):
        document = [document]
    if not isinstance(document, list):
        raise BadRequest(f"Events: they are an object, or a list of such, and this is {type(document).__name__}.")
    if len(document) > AT_ONCE:
        raise BadRequest(f"Events: there are {len(document)}; post at most {AT_ONCE} at once.")
    if not document:
        raise BadRequest('Events: there is none; post {"request_id": ID, "value": NUMBER}, or a list of such.')
    try:
        return documents.read(list[Reward], document)
    except documents.Misread as error:
        raise BadRequest(f"Events: {error}") from None
