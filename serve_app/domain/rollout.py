"""Progressive rollouts: the share of a new version grows in steps, or is set back to zero automatically."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from math import isfinite
from typing import Annotated, Any, Literal

from typing_extensions import NotRequired, TypedDict

from serve_app.domain import validation
from serve_app.domain.limits import MAX_STEPS
from serve_app.domain.traffic_policy import BUCKET_COUNT, ActiveSplit, StickyKey, allocate
from serve_app.domain.validation import PendingStatus, documented
from serve_app.errors import BadRequest

BASELINE, CANDIDATE = "baseline", "candidate"  # the arms of its trial


@dataclass(frozen=True)
class Guardrails:
    """The limits on how much worse than the concurrent baseline the candidate may be; None: not checked."""

    __pydantic_config__ = validation.STRICT
    error_rate: Annotated[float | None, documented("The share of failures above the baseline's.")] = 0.01
    p99: Annotated[float | None, documented("The p99 latency as a multiple of the baseline's.")] = 1.5
    non_finite: Annotated[float | None, documented("NaN or infinity: share above the baseline's.")] = 0.0
    empty: Annotated[float | None, documented("The share of empty responses above the baseline's.")] = 0.01
    out_of_memory: Annotated[int | None, documented("Failures for lack of memory.")] = 0


@dataclass(frozen=True)
class RolloutPlan:
    """A rollout, which moves requests to a new version in steps. Times are in seconds."""

    __pydantic_config__ = validation.STRICT
    to: Annotated[str, documented("The new version.")]
    steps: Annotated[
        tuple[Annotated[float, documented(exclusiveMinimum=0, maximum=100)], ...],
        documented("Percent of the requests: increasing, the last is 100.", minItems=1, maxItems=MAX_STEPS),
    ] = (1, 5, 25, 50, 100)
    bake_s: Annotated[float, documented("The minimum duration of a step.", minimum=0)] = 60.0
    guardrails: Guardrails = field(default_factory=Guardrails)
    min_calls: Annotated[int, documented("The minimum of requests in each step.", minimum=0)] = 50
    keep_warm_s: Annotated[
        float | None, documented("How long the old version keeps its workers; null: forever.", minimum=0)
    ] = 600.0
    key: StickyKey | None = None  # a request with the key of an earlier one keeps the new version
    salt: Annotated[str, documented("The salt of the key's hash; empty: the rollout's id.")] = ""


State = Literal["starting", "running", "paused", "promoted", "rolled_back", "aborted"]
ACTIVE_STATES: tuple[State, ...] = ("starting", "running", "paused")
Verdict = Literal[
    "started", "step", "held", "paused", "resumed", "rolled_back", "aborted", "promoted", "scaled_down"
]


@dataclass(frozen=True)
class RolloutDecision:
    """A decision, and the figures that it is based on."""

    time: float  # seconds since the epoch
    verdict: Verdict
    percent: float  # of the model's calls that the candidate gets from then on
    reason: str
    figures: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Rollout:
    """A plan in progress, or at its end."""

    plan: RolloutPlan
    id: str
    model: str
    baseline: str  # the version that it began from
    state: State
    started_at: float  # seconds since the epoch, as all times here
    step: int = 0
    step_started_at: float = 0.0  # when this step began
    ended_at: float = 0.0
    workers_added: bool = False  # the candidate had no workers, and got as many as the baseline has
    # least and most workers of the replaced version, until it has cooled
    previous_workers: tuple[int, int] | None = None
    decisions: tuple[RolloutDecision, ...] = ()

    @property
    def active(self) -> bool:
        return self.state in ACTIVE_STATES

    @property
    def percent(self) -> float:
        """The candidate's current share."""
        if self.state == "promoted":
            return 100.0
        return self.plan.steps[self.step] if self.state in ("running", "paused") else 0.0

    @property
    def active_split(self) -> ActiveSplit:
        """The split that the data plane applies. Each step has an id, and thus figures, of its own."""
        share = _to_basis_points(self.percent)
        return ActiveSplit(
            id=self.split_id(self.step),
            arms={CANDIDATE: self.plan.to, BASELINE: self.baseline},
            allocation=allocate({CANDIDATE: share, BASELINE: BUCKET_COUNT - share}),
            baseline=BASELINE,
            key=self.plan.key,
            salt=self.plan.salt or self.id,
            checks=True,
        )

    def split_id(self, step: int) -> str:
        """Return the id under which a step's requests are counted."""
        return f"{self.id}:{step}"


class RolloutDocument(TypedDict):
    """The state of a rollout. Times are in seconds since the epoch."""

    model: str
    id: str
    baseline: Annotated[str, documented("The old version.")]
    to: Annotated[str, documented("The new version.")]
    state: State
    percent: Annotated[float, documented("The new version's percentage.", minimum=0, maximum=100)]
    step: int
    started_at: float
    since: Annotated[float, documented("The start of the step.")]
    ended: float | None
    next: Annotated[str | None, documented("The condition of the next step.")]
    plan: RolloutPlan
    figures: Annotated[dict[str, dict[str, Any]], documented("The statistics of both versions in this step.")]
    guardrails: Annotated[list[dict[str, Any]], documented("The state of each guardrail.")]
    keeps_warm: bool
    decisions: list[RolloutDecision]
    status: NotRequired[PendingStatus]


def _to_basis_points(percent: float) -> int:
    """Convert percent to basis points."""
    return round(percent * BUCKET_COUNT / 100)


def read(document: Any) -> RolloutPlan:
    """Parse the plan in an operator's document. Raises BadRequest, which names the key and the remedy."""
    if not isinstance(document, Mapping):
        raise BadRequest('A rollout is a JSON object, such as {"to": "2.0"}.')
    return validation.read_request(RolloutPlan, document, "Rollout", _find_error)


def _find_error(plan: RolloutPlan) -> str:
    if not plan.to:
        return "to is empty; name the version that should take over"
    steps = ", ".join(f"{step:g}" for step in plan.steps)
    if not plan.steps:
        return "steps is empty; name at least one, in percent"
    if len(plan.steps) > MAX_STEPS:
        return f"steps are {len(plan.steps)}; at most {MAX_STEPS} are allowed"
    if any(not 0.01 <= step <= 100 for step in plan.steps):
        return f"steps are shares from 0.01 to 100 percent, and are {steps}"
    shares = [_to_basis_points(step) for step in plan.steps]
    if any(before >= after for before, after in pairwise(shares)):
        return f"steps must grow from one to the next, by 0.01 percent at least, and are {steps}"
    if plan.steps[-1] != 100:
        return f"the last step is {plan.steps[-1]:g}; a rollout ends at 100 percent"
    for name in ("bake_s", "keep_warm_s", "min_calls"):
        number = getattr(plan, name)
        if number is not None and not (isfinite(number) and number >= 0):
            return f"{name} is a number from 0, and is {number:g}"
    at_most = {"error_rate": 1.0, "p99": None, "non_finite": 1.0, "empty": 1.0, "out_of_memory": None}
    for name, most in at_most.items():
        limit = getattr(plan.guardrails, name)
        if limit is None:
            continue
        if not (isfinite(limit) and limit >= 0 and (most is None or limit <= most)):
            within = "a share from 0 to 1" if most else "a number from 0"
            return f"guardrails.{name} is {within}, or null to pass it over, and is {limit:g}"
    if plan.guardrails.p99 == 0:
        return (
            "guardrails.p99 is a multiple of the baseline's p99, such "
            "as 1.5, or null to pass it over, and is 0"
        )
    return ""
