"""The state machine of a rollout: pure functions of its metrics and the time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from serve_app.control.rollouts.guardrails import Figures, arm_of, evaluate_guardrails
from serve_app.dataplane.experiment_collector import ArmStats, quantile
from serve_app.domain import validation
from serve_app.domain.rollout import (
    BASELINE,
    CANDIDATE,
    Rollout,
    RolloutDecision,
    RolloutDocument,
    RolloutPlan,
    State,
    Verdict,
)

_REMEMBERED = 500  # decisions


# The way of a rollout


def create(plan: RolloutPlan, id: str, model: str, baseline: str, given: bool, now: float) -> Rollout:
    """Return a new rollout that waits for the candidate's workers; ``given``: it adds them itself."""
    rollout = Rollout(plan, id, model, baseline, "starting", now, step_started_at=now, workers_added=given)
    workers = f"gets as many workers as {baseline} has" if given else "has its workers"
    return _decided(rollout, "started", now, f"{plan.to} replaces {baseline} step by step, and {workers}")


def enter_first_step(rollout: Rollout, now: float) -> Rollout:
    """Enter the first step, because the candidate runs."""
    return _stepped(replace(rollout, state="running"), 0, now, f"{rollout.plan.to} runs")


def roll_back(rollout: Rollout, now: float, why: str, figures: Mapping[str, Any] | None = None) -> Rollout:
    """Roll back: send all calls to the baseline."""
    workers = (
        "loses the workers that it was given"
        if rollout.state == "starting" and rollout.workers_added
        else "keeps its workers"
    )
    why = f"{why}; {rollout.baseline} has all requests, {rollout.plan.to} {workers}"
    return _ended(rollout, "rolled_back", now, why, figures)


def apply_action(rollout: Rollout, verb: str, now: float, figures: Figures) -> Rollout:
    """Apply an operator's action: pause, resume or abort.

    Return the same rollout where the action changes nothing. Raises ValueError with the reason of a refusal.
    """
    plan = rollout.plan
    if not rollout.active:
        raise ValueError(f"it is over ({rollout.state}); begin another: POST /models/{rollout.model}/rollout")
    if verb == "abort":
        stats = arm_documents(rollout, figures)
        return _ended(
            rollout, "aborted", now, f"ended by an operator; {rollout.baseline} has all requests", stats
        )
    if rollout.state == "starting":
        raise ValueError(f"the workers of {plan.to} are starting; wait for its first step, or abort it")
    if verb == "pause" and rollout.state == "running":
        why = f"held by an operator at {rollout.percent:g} %; the guardrails stay active"
        return _decided(replace(rollout, state="paused"), "paused", now, why)
    if verb == "resume" and rollout.state == "paused":
        return _decided(replace(rollout, state="running"), "resumed", now, "continued by an operator")
    return rollout


def evaluate(rollout: Rollout, figures: Figures, now: float, failure: str = "") -> Rollout:
    """Evaluate a rollout; return the same one where nothing changes.

    ``failure`` is why no worker of the candidate runs, where all starts have failed.
    """
    if failure:
        return roll_back(
            rollout, now, f"no worker of {rollout.plan.to} runs: {failure}", arm_documents(rollout, figures)
        )
    if broken := [reading for reading in evaluate_guardrails(rollout, figures) if reading.broken]:
        stats = {**arm_documents(rollout, figures), "guardrails": [asdict(reading) for reading in broken]}
        return roll_back(rollout, now, "; ".join(reading.words for reading in broken), stats)
    if rollout.state != "running":
        return rollout
    plan = rollout.plan
    if _bake_left(rollout, now) > 0:
        return rollout
    if lacking := _calls_left(rollout, figures):
        if rollout.decisions[-1].verdict == "held":
            return rollout
        why = f"{plan.bake_s:g} s are over, and {_calls(lacking)} of the candidate are missing"
        return _decided(rollout, "held", now, why, arm_documents(rollout, figures))
    stats = arm_documents(rollout, figures)
    why = f"{plan.bake_s:g} s and {_calls(stats[CANDIDATE]['calls'])} of the candidate within all guardrails"
    if rollout.step + 1 < len(plan.steps):
        return _stepped(rollout, rollout.step + 1, now, why, stats)
    if plan.keep_warm_s is None:
        kept = f"{rollout.baseline} keeps its workers"
    else:
        kept = f"{rollout.baseline} keeps its workers for {plan.keep_warm_s:g} s"
    return _ended(rollout, "promoted", now, f"{why}; {plan.to} is the default version, {kept}", stats)


def mark_scaled_down(rollout: Rollout, now: float, why: str) -> Rollout:
    """Record that the replaced version is no longer kept warm."""
    return _decided(replace(rollout, previous_workers=None), "scaled_down", now, why)


def _stepped(
    rollout: Rollout, step: int, now: float, why: str, figures: Mapping[str, Any] | None = None
) -> Rollout:
    return _decided(replace(rollout, step=step, step_started_at=now), "step", now, why, figures)


def _ended(
    rollout: Rollout, state: State, now: float, why: str, figures: Mapping[str, Any] | None = None
) -> Rollout:
    verdict: Any = state  # these states are called as what led to them
    return _decided(replace(rollout, state=state, ended_at=now), verdict, now, why, figures)


def _decided(
    rollout: Rollout, verdict: Verdict, now: float, why: str, figures: Mapping[str, Any] | None = None
) -> Rollout:
    decision = RolloutDecision(now, verdict, rollout.percent, why, figures or {})
    return replace(rollout, decisions=(*rollout.decisions, decision)[-_REMEMBERED:])


# What it waits for


def describe_wait(rollout: Rollout, figures: Figures, now: float) -> str:
    """Return what the rollout waits for, in words; empty at its end."""
    if not rollout.active:
        return ""
    if rollout.state == "starting":
        return f"the workers of {rollout.plan.to}"
    if rollout.state == "paused":
        return "somebody to resume it"
    bake, calls = _bake_left(rollout, now), _calls_left(rollout, figures)
    parts = [f"{math.ceil(bake)} s of bake time"] if bake > 0 else []
    parts += [f"{calls:,} more request{'s' if calls > 1 else ''} of the candidate"] if calls else []
    return " and ".join(parts) or "the next look"


def _bake_left(rollout: Rollout, now: float) -> float:
    return rollout.step_started_at + rollout.plan.bake_s - now


def _calls_left(rollout: Rollout, figures: Figures) -> int:
    return max(0, rollout.plan.min_calls - arm_of(figures, rollout.step, CANDIDATE).calls)


# Words and documents


def format_decision(before: Rollout, after: Rollout) -> str:
    """Return the last decision in one line, for the log."""
    decision, to = after.decisions[-1], after.plan.to
    words = {
        "started": "rollout begins",
        "step": f"gets {after.percent:g} %",
        "held": f"stays at {after.percent:g} %",
        "paused": f"paused at {after.percent:g} %",
        "resumed": f"resumed at {after.percent:g} %",
        "rolled_back": f"rolled back at {before.percent:g} %",
        "aborted": f"aborted at {before.percent:g} %",
        "promoted": "promoted",
        "scaled_down": f"{after.baseline} is no longer kept warm",
    }[decision.verdict]
    return f"{after.model}: {'' if decision.verdict == 'scaled_down' else f'{to} '}{words}: {decision.reason}"


def to_document(rollout: Rollout, figures: Figures, now: float) -> RolloutDocument:
    """Return a rollout as JSON.

    Durations are in seconds, and moments in seconds since the epoch.
    """
    stored = validation.write(rollout)
    return {
        "model": rollout.model,
        "id": rollout.id,
        "baseline": rollout.baseline,
        "to": rollout.plan.to,
        "state": rollout.state,
        "percent": rollout.percent,
        "step": rollout.step,
        "started_at": rollout.started_at,
        "since": rollout.step_started_at,
        "ended": rollout.ended_at or None,
        "next": describe_wait(rollout, figures, now) or None,
        "plan": stored["plan"],
        "figures": arm_documents(rollout, figures),
        "guardrails": []
        if rollout.state == "starting"
        else [asdict(reading) for reading in evaluate_guardrails(rollout, figures)],
        "keeps_warm": rollout.previous_workers is not None,
        "decisions": stored["decisions"],
    }


def arm_documents(rollout: Rollout, figures: Figures) -> dict[str, Any]:
    """Return the statistics of this step's calls by arm."""
    return {arm: _plain(arm_of(figures, rollout.step, arm)) for arm in (CANDIDATE, BASELINE)}


def _plain(figures: ArmStats) -> dict[str, Any]:
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
    return f"{count:,} request{'' if count == 1 else 's'}"
