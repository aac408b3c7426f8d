"""Experiments: the arms that a model's requests are assigned to, and the metrics that are compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Annotated, Any, Literal

from typing_extensions import TypedDict

from serve_app.domain import json_path, validation
from serve_app.domain.limits import MAX_ARMS, MAX_METRICS
from serve_app.domain.traffic_policy import ActiveSplit, StickyKey, allocate, find_weights_error, shorten_key
from serve_app.domain.validation import PendingStatus, documented
from serve_app.errors import BadRequest

BUCKET_GROUPS = 1_000  # of an arm's buckets, from which its variance is estimated
MAX_EVENTS_PER_REQUEST = 10_000  # events in one request
MAX_REWARD = 1e12  # a larger one could not be squared and summed
_MAX_NAME_LENGTH = 200  # of a name, and of an event's id


@dataclass(frozen=True)
class Arm:
    __pydantic_config__ = validation.STRICT
    version: str
    weight: Annotated[int, documented("Basis points.", minimum=1)]


@dataclass(frozen=True)
class ExperimentMetric:
    """A metric that is compared between the arms.

    ``latency``: milliseconds from arrival to response. ``error_rate``: the percentage of failed requests.
    ``output``: the number at ``path`` of the response. ``reward``: a value posted later for a request or a
    key; a missing one counts as zero, unless the metric is measured ``per`` event.
    """

    __pydantic_config__ = validation.STRICT
    name: Annotated[str, documented(minLength=1, maxLength=_MAX_NAME_LENGTH)]
    kind: Literal["latency", "error_rate", "output", "reward"] = "latency"
    goal: Annotated[
        Literal["increase", "decrease"] | None,
        documented("Default: decrease for latency and error_rate, else increase."),
    ] = None
    path: Annotated[str, documented("Kind output: the JSON path of the number.")] = ""
    per: Literal["exposure", "event"] = "exposure"

    @property
    def direction(self) -> Literal["increase", "decrease"]:
        return self.goal or ("decrease" if self.kind in ("latency", "error_rate") else "increase")


@dataclass(frozen=True)
class ExperimentPlan:
    """An experiment, which splits requests among its arms; without a key, each request by itself."""

    __pydantic_config__ = validation.STRICT
    name: Annotated[str, documented("The display name.", minLength=1, maxLength=_MAX_NAME_LENGTH)]
    arms: Annotated[Mapping[str, Arm], documented("Their weights sum to 10,000.", minProperties=2)]
    metrics: Annotated[tuple[ExperimentMetric, ...], documented("The compared metrics.", minItems=1)]
    baseline: Annotated[str, documented("The arm that the others are compared with.")]
    key: StickyKey | None = None
    salt: Annotated[str, documented("The salt of the key's hash; empty: the experiment's id.")] = ""


@dataclass(frozen=True)
class Experiment(ExperimentPlan):
    id: str = ""
    model: str = ""
    state: Literal["running", "stopped"] = "running"
    started_at: float = 0.0  # seconds since the epoch
    ended_at: float = 0.0

    @property
    def running(self) -> bool:
        return self.state == "running"

    @property
    def versions(self) -> set[str]:
        return {arm.version for arm in self.arms.values()}

    @property
    def active_split(self) -> ActiveSplit:
        """The split that the data plane applies for this experiment."""
        rewards = any(metric.kind == "reward" for metric in self.metrics)
        return ActiveSplit(
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


class ExperimentSummary(TypedDict):
    """An experiment without its results. Times are in seconds since the epoch."""

    id: str
    name: str
    model: str
    state: Literal["running", "stopped"]
    started_at: float
    ended: float | None
    key: Annotated[dict[str, str] | None, documented("One of header, cookie and json.")]
    arms: dict[str, dict[str, Any]]
    baseline: str


class ExperimentDocument(ExperimentSummary, total=False):
    """An experiment with its results."""

    status: PendingStatus
    sentence: Annotated[str, documented("A summary of the result.")]
    alpha: float
    comparisons: int
    alpha_per_comparison: float
    metrics: Annotated[dict[str, dict[str, Any]], documented("The result of each metric.")]
    sample_ratio: Annotated[dict[str, Any], documented("Whether the arms' sizes fit their weights.")]


class ExperimentPoint(TypedDict):
    """The results at one time, in seconds since the epoch."""

    time: float
    units: Annotated[dict[str, int], documented("The units of each arm.")]
    p_value: Annotated[float, documented("The lowest p-value of the sample ratio so far.")]
    metrics: Annotated[
        dict[str, dict[str, dict[str, float | None]]],
        documented("By metric and arm: the difference from the baseline, and its confidence interval."),
    ]


class ExperimentHistory(TypedDict):
    """The results over time, the oldest first."""

    id: str
    points: list[ExperimentPoint]


def read(document: Any) -> Experiment:
    """Parse the experiment in an operator's document.

    Raises BadRequest, which names the key and the remedy.
    """
    if not isinstance(document, Mapping):
        raise BadRequest("An experiment is a JSON object with name, arms, metrics and baseline.")
    plan = validation.read_request(ExperimentPlan, document, "Experiment")
    experiment = Experiment(**vars(plan))
    if problem := _find_error(experiment):
        raise BadRequest(f"Experiment: {problem}")
    return experiment


def _find_error(experiment: Experiment) -> str:
    if not experiment.name:
        return "name is empty; give it one by which people know it"
    if len(experiment.name) > _MAX_NAME_LENGTH:
        return f"name has {len(experiment.name)} characters; it has at most {_MAX_NAME_LENGTH}"
    return _find_arms_error(experiment) or _find_metrics_error(experiment)


def _find_arms_error(experiment: Experiment) -> str:
    if "" in experiment.arms:
        return "an arm's name is empty"
    if len(experiment.arms) < 2:
        return f"arms must be two or more, and are {len(experiment.arms)}"
    if len(experiment.arms) > MAX_ARMS:
        return f"arms are {len(experiment.arms)}, and at most {MAX_ARMS} are allowed"
    if problem := find_weights_error({name: arm.weight for name, arm in experiment.arms.items()}, "arms"):
        return problem
    if unused := [name for name, arm in experiment.arms.items() if arm.weight == 0]:
        return f"arms.{unused[0]} has no share, so nothing could be measured of it"
    if experiment.baseline not in experiment.arms:
        return f"baseline {experiment.baseline!r} is none of the arms {', '.join(experiment.arms)}"
    return ""


def _find_metrics_error(experiment: Experiment) -> str:
    if not experiment.metrics:
        return "metrics is empty; name at least one to compare"
    if len(experiment.metrics) > MAX_METRICS:
        return f"metrics are {len(experiment.metrics)}, and at most {MAX_METRICS} are allowed"
    names = [metric.name for metric in experiment.metrics]
    if "" in names:
        return "a metric's name is empty"
    if duplicates := [name for name in names if names.count(name) > 1]:
        return f"two metrics are called {duplicates[0]!r}"
    if too_long := [name for name in (*experiment.arms, *names) if len(name) > _MAX_NAME_LENGTH]:
        name = too_long[0]
        limit = f"an arm or a metric has at most {_MAX_NAME_LENGTH}"
        return f"the name {name[:20]!r}... has {len(name)} characters; {limit}"
    return next(filter(None, map(_find_metric_error, experiment.metrics)), "")


def _find_metric_error(metric: ExperimentMetric) -> str:
    if (metric.kind == "output") != bool(metric.path):
        return f"metric {metric.name!r}: a path is wanted for the kind output, and only there"
    if metric.per == "event" and metric.kind != "reward":
        return f"metric {metric.name!r}: only a reward is measured per event"
    try:
        json_path.parse(metric.path)
    except ValueError as error:
        return f"metric {metric.name!r}: {error}"
    return ""


@dataclass(frozen=True)
class Reward:
    """A value that became known after the response: of the request ``request_id``, or of the requests with
    ``key``.
    """

    __pydantic_config__ = validation.STRICT
    value: Annotated[float, documented("The reward; true is 1.")]
    request_id: Annotated[str, documented("The x-request-id of a response.")] = ""
    key: Annotated[str, documented("The sticky key of a client, instead of request_id.")] = ""
    metric: Annotated[str, documented("The reward metric; required if there are several.")] = ""
    id: Annotated[
        str,
        documented("An idempotency key; default: request_id or key."),
    ] = ""

    def __post_init__(self) -> None:
        if bool(self.request_id) == bool(self.key):
            raise ValueError("an event names either a request_id or a key")
        if not isfinite(self.value):
            raise ValueError(f"value is a finite number, and is {self.value}")
        if abs(self.value) > MAX_REWARD:
            raise ValueError(f"value is between -{MAX_REWARD:g} and {MAX_REWARD:g}, and is {self.value:g}")
        if len(self.id) > _MAX_NAME_LENGTH:
            raise ValueError(f"id has {len(self.id)} characters; it has at most {_MAX_NAME_LENGTH}")

    @property
    def unit(self) -> str:
        return self.request_id or shorten_key(self.key)


RewardList = Annotated[list[Reward], documented(minItems=1, maxItems=MAX_EVENTS_PER_REQUEST)]


class RewardEvents(TypedDict):
    __pydantic_config__ = validation.STRICT  # type: ignore[misc]
    events: RewardList


RewardsBody = Reward | RewardList | RewardEvents  # of a request


class RewardCounts(TypedDict):
    counted: Annotated[int, documented(minimum=0)]
    repeated: Annotated[int, documented(minimum=0)]


def read_rewards(document: Any) -> list[Reward]:
    """Parse the events of a ``RewardsBody``.

    Raises BadRequest, which names the key and the remedy.
    """
    if isinstance(document, Mapping) and "events" in document:
        if more := [key for key in document if key != "events"]:
            raise BadRequest(f"Events: unknown key {more[0]!r} beside 'events'; the list stands alone there.")
        document = document["events"]
    elif isinstance(document, Mapping):
        document = [document]
    if not isinstance(document, list):
        raise BadRequest(
            f"Events: they are an object, or a list of such, and this is {type(document).__name__}."
        )
    if len(document) > MAX_EVENTS_PER_REQUEST:
        raise BadRequest(f"Events: there are {len(document)}; post at most {MAX_EVENTS_PER_REQUEST} at once.")
    if not document:
        raise BadRequest(
            'Events: there is none; post {"request_id": ID, "value": NUMBER}, or a list of such.'
        )
    return validation.read_request(list[Reward], document, "Events")
