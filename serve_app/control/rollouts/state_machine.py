"""Whether a rollout's share grows, waits or goes back to none, and why: pure functions of figures and the time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from serve_app import documents
from serve_app.control.guardrails import Figures, arm_of, readings
from serve_app.rollout import BASELINE, CANDIDATE, Decision, Plan, Rollout, State, Verdict
from serve_app.telemetry.observations import ArmFigures, quantile

_REMEMBERED = 500  # decisions


# The way of a rollout


def begun(plan: Plan, id: str, model: str, baseline: str, given: bool, now: float) -> Rollout:
    """A rollout whose candidate's workers are looked for; ``given``: it had none, and gets some for this."""
    rollout = Rollout(plan, id, model, baseline, "starting", now, since=now, given=given)
    workers = f"gets as many workers as {baseline} has" if given else "has its workers"
    return _decided(rollout, "began", now, f"{plan.to} is to take over from {baseline}, and {workers}")


def started(rollout: Rollout, now: float) -> Rollout:
    """The candidate runs: the first step."""
    return _stepped(replace(rollout, state="running"), 0, now, f"{rollout.plan.to} runs")


def gone_back(rollout: Rollout, now: float, why: str, figures: Mapping[str, Any] | None = None) -> Rollout:
    """The baseline has all calls again."""
    workers = "loses the workers that it was given" if _starting(rollout) and rollout.given else "keeps its workers"
    why = f"{why}; {rollout.baseline} has all calls, {rollout.plan.to} {workers}"
    return _ended(rollout, "rolled_back", now, why, figures)


def steered(rollout: Rollout, verb: str, now: float, figures: Figures) -> Rollout:
    """What an operator says: pause, resume or abort. The same rollout where that is so already.

    Raises ValueError, with what is in the way.
    """
    plan = rollout.plan
    if not rollout.under_way:
        raise ValueError(f"it is over ({rollout.state}); begin another: POST /models/{rollout.model}/rollout")
    if verb == "abort":
        said = sides(rollout, figures)
        return _ended(rollout, "aborted", now, f"an operator ended it; {rollout.baseline} has all calls", said)
    if _starting(rollout):
        raise ValueError(f"the workers of {plan.to} are starting; wait for its first step, or abort it")
    if verb == "pause" and rollout.state == "running":
        why = f"an operator holds it at {rollout.percent:g} %; its guardrails still watch"
        return _decided(replace(rollout, state="paused"), "paused", now, why)
    if verb == "resume" and rollout.state == "paused":
        return _decided(replace(rollout, state="running"), "resumed", now, "an operator lets it go on")
    return rollout


def looked_at(rollout: Rollout, figures: Figures, now: float, failure: str = "") -> Rollout:
    """What a look at a rollout decides; the same one where there is nothing to decide.

    ``failure`` is why no worker of the candidate runs, where all that were tried have failed.
    """
    if failure:
        return gone_back(rollout, now, f"no worker of {rollout.plan.to} runs: {failure}", sides(rollout, figures))
    if broken := [reading for reading in readings(rollout, figures) if reading.broken]:
        said = {**sides(rollout, figures), "guardrails": [asdict(reading) for reading in broken]}
        return gone_back(rollout, now, "; ".join(reading.words for reading in broken), said)
    if rollout.state != "running":
        return rollout
    plan = rollout.plan
    if _bake_left(rollout, now) > 0:
        return rollout
    if lacking := _calls_left(rollout, figures):
        if rollout.decisions[-1].verdict == "held":
            return rollout
        why = f"{plan.bake_s:g} s are over, and {_calls(lacking)} of the candidate are lacking"
        return _decided(rollout, "held", now, why, sides(rollout, figures))
    said = sides(rollout, figures)
    why = f"{plan.bake_s:g} s and {_calls(said[CANDIDATE]['calls'])} of the candidate within all guardrails"
    if rollout.step + 1 < len(plan.steps):
        return _stepped(rollout, rollout.step + 1, now, why, said)
    if plan.keep_warm_s is None:
        kept = f"{rollout.baseline} keeps its workers"
    else:
        kept = f"{rollout.baseline} keeps its workers for {plan.keep_warm_s:g} s"
    return _ended(rollout, "promoted", now, f"{why}; {plan.to} is the default version, {kept}", said)


def cooled(rollout: Rollout, now: float, why: str) -> Rollout:
    """The version that was replaced is no longer kept warm."""
    return _decided(replace(rollout, warm=None), "cooled", now, why)


def _stepped(
    rollout: Rollout, step: int, now: float, why: str, figures: Mapping[str, Any] | None = None
) -> Rollout:
    return _decided(replace(rollout, step=step, since=now), "step", now, why, figures)


def _ended(
    rollout: Rollout, state: State, now: float, why: str, figures: Mapping[str, Any] | None = None
) -> Rollout:
    verdict: Any = state  # these states are called as what led to them
    return _decided(replace(rollout, state=state, ended=now), verdict, now, why, figures)


def _decided(
    rollout: Rollout, verdict: Verdict, now: float, why: str, figures: Mapping[str, Any] | None = None
) -> Rollout:
    decision = Decision(now, verdict, rollout.percent, why, figures or {})
    return replace(rollout, decisions=(*rollout.decisions, decision)[-_REMEMBERED:])


def _starting(rollout: Rollout) -> bool:
    return rollout.state == "starting"


# What it waits for


def waiting(rollout: Rollout, figures: Figures, now: float) -> str:
    """What is next, in words; empty at the end."""
    if not rollout.under_way:
        return ""
    if _starting(rollout):
        return f"the workers of {rollout.plan.to}"
    if rollout.state == "paused":
        return "somebody to resume it"
    bake, calls = _bake_left(rollout, now), _calls_left(rollout, figures)
    parts = [f"{math.ceil(bake)} s of bake time"] if bake > 0 else []
    parts += [f"{calls:,} more call{'s' if calls > 1 else ''} of the candidate"] if calls else []
    return " and ".join(parts) or "the next look"


def _bake_left(rollout: Rollout, now: float) -> float:
    return rollout.since + rollout.plan.bake_s - now


def _calls_left(rollout: Rollout, figures: Figures) -> int:
    return max(0, rollout.plan.min_calls - arm_of(figures, rollout.step, CANDIDATE).calls)


# Words and documents


def line(before: Rollout, after: Rollout) -> str:
    """The last decision in one line, for the log."""
    decision, to = after.decisions[-1], after.plan.to
    words = {
        "began": "rollout begins",
        "step": f"gets {after.percent:g} %",
        "held": f"stays at {after.percent:g} %",
        "paused": f"paused at {after.percent:g} %",
        "resumed": f"resumed at {after.percent:g} %",
        "rolled_back": f"rolled back at {before.percent:g} %",
        "aborted": f"aborted at {before.percent:g} %",
        "promoted": "promoted",
        "cooled": f"{after.baseline} is no longer kept warm",
    }[decision.verdict]
    return f"{after.model}: {'' if decision.verdict == 'cooled' else f'{to} '}{words}: {decision.why}"


def document(rollout: Rollout, figures: Figures, now: float) -> dict[str, Any]:
    """All that there is to say of a rollout, as JSON. Times are in seconds, of the epoch where they are moments."""
    stored = documents.write(rollout)
    return {
        "model": rollout.model,
        "id": rollout.id,
        "baseline": rollout.baseline,
        "to": rollout.plan.to,
        "state": rollout.state,
        "percent": rollout.percent,
        "step": rollout.step,
        "began": rollout.began,
        "since": rollout.since,
        "ended": rollout.ended or None,
        "next": waiting(rollout, figures, now) or None,
        "plan": stored["plan"],
        "figures": sides(rollout, figures),
        "guardrails": [] if _starting(rollout) else [asdict(reading) for reading in readings(rollout, figures)],
        "keeps_warm": rollout.warm is not None,
        "decisions": stored["decisions"],
    }


def sides(rollout: Rollout, figures: Figures) -> dict[str, Any]:
    """What the calls of this step came to, arm by arm."""
    return {arm: _plain(arm_of(figures, rollout.step, arm)) for arm in (CANDIDATE, BASELINE)}


def _plain(figures: ArmFigures) -> dict[str, Any]:
    answered = bool(figures.latency)
    return {
        "calls": figures.calls,
        "failed": dict(figures.failed),
        "error_rate": figures.failures / figures.calls if figures.calls else None,
        "p50": quantile(figures.latency, 0.5) if answered else None,
        "p99": quantile(figures.latency, 0.99) if answered else None,
        "non_finite": figures.non_finite,
        "empty": figures.empty,
    }


def _calls(count: int) -> str:
    return f"{count:,} call{'' if count == 1 else 's'}"
