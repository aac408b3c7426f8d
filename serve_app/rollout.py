"""A progressive rollout: the share of a new version grows step by step, or goes back to none by itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from serve_app import documents
from serve_app.errors import BadRequest
from serve_app.policy import WHOLE, Key, Trial, allocate

BASELINE, CANDIDATE = "baseline", "candidate"  # the arms of its trial


@dataclass(frozen=True)
class Guardrails:
    """How much worse than the baseline of the same moment the candidate may be; None: not looked at."""

    __pydantic_config__ = documents.STRICT
    error_rate: float | None = 0.01  # share of calls that failed, above the baseline's
    p99: float | None = 1.5  # 99th percentile of the latency, as a multiple of the baseline's
    non_finite: float | None = 0.0  # share of answers with NaN or infinity in them, above the baseline's
    empty: float | None = 0.01  # share of answers with nothing in them, above the baseline's
    out_of_memory: int | None = 0  # calls of the candidate that failed so


@dataclass(frozen=True)
class Plan:
    """What is asked for. Times are in seconds, steps in percent of the model's calls."""

    __pydantic_config__ = documents.STRICT
    to: str
    steps: tuple[float, ...] = (1, 5, 25, 50, 100)
    bake_s: float = 60.0  # for which each step must hold
    guardrails: Guardrails = field(default_factory=Guardrails)
    min_calls: int = 50  # of the candidate in a step, before the next
    keep_warm_s: float | None = 600.0  # the version that was replaced keeps its workers so long; None: for good
    key: Key | None = None  # whoever shows the same key stays with the same version
    salt: str = ""


State = Literal["starting", "running", "paused", "promoted", "rolled_back", "aborted"]


@dataclass(frozen=True)
class Decision:
    """Something that was decided, and the figures that it was decided by."""

    time: float  # seconds since the epoch
    verdict: str  # began, step, held, paused, resumed, rolled_back, aborted, promoted, cooled
    percent: float  # of the calls that the candidate gets from then on
    why: str
    figures: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Rollout:
    """A plan under way, or at its end."""

    plan: Plan
    id: str
    model: str
    baseline: str  # the version that it began from
    state: State
    began: float  # seconds since the epoch, as all times here
    step: int = 0
    since: float = 0.0  # when this step began
    ended: float = 0.0
    cooled: bool = False  # the version that was replaced has had its workers taken away
    decisions: tuple[Decision, ...] = ()

    @property
    def under_way(self) -> bool:
        return self.state in ("starting", "running", "paused")

    @property
    def percent(self) -> float:
        """The candidate's share now."""
        if self.state == "promoted":
            return 100.0
        return self.plan.steps[self.step] if self.state in ("running", "paused") else 0.0

    @property
    def trial(self) -> Trial:
        """What the data plane does for it. Its figures are counted apart for each step."""
        share = round(self.percent * WHOLE / 100)
        return Trial(
            id=f"{self.id}:{self.step}",
            arms={CANDIDATE: self.plan.to, BASELINE: self.baseline},
            allocation=allocate({CANDIDATE: share, BASELINE: WHOLE - share}),
            baseline=BASELINE,
            key=self.plan.key,
            salt=self.plan.salt or self.model,
            checks=True,
        )


def read(document: Any) -> Plan:
    """The plan that an operator's document asks for. Raises BadRequest, which names the key and the cure."""
    if not isinstance(document, Mapping):
        raise BadRequest('A rollout is a JSON object, such as {"to": "2.0"}.')
    try:
        plan = documents.read(Plan, document)
    except documents.Misread as error:
        raise BadRequest(f"Rollout: {error}") from None
    if wrong := _wrong(plan):
        raise BadRequest(f"Rollout: {wrong}")
    return plan


def _wrong(plan: Plan) -> str:
    if not plan.steps:
        return "steps is empty; name at least one, in percent"
    if any(not 0 < step <= 100 for step in plan.steps) or any(a >= b for a, b in zip(plan.steps, plan.steps[1:])):
        return f"steps must grow, from above 0 to 100 percent, and are {', '.join(f'{s:g}' for s in plan.steps)}"
    if plan.steps[-1] != 100:
        return f"the last step is {plan.steps[-1]:g}; a rollout ends at 100 percent"
    for name in ("bake_s", "keep_warm_s", "min_calls"):
        if (number := getattr(plan, name)) is not None and number < 0:
            return f"{name} cannot be negative, and is {number:g}"
    return ""
