"""The gauges of rollouts: state, share and guardrails of each as Prometheus reads them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from serve_app.control.rollouts.guardrails import Figures, evaluate_guardrails
from serve_app.domain.rollout import BASELINE, CANDIDATE, Rollout

RETENTION_S = 3600.0  # for which an ended rollout keeps its gauges
MAX_ROLLOUTS = 200  # with gauges, the newest

STATE = "torchrelay_rollout_state"
PERCENT = "torchrelay_rollout_percent"
ENDED = "torchrelay_rollout_ended_timestamp_seconds"
GUARDRAIL = "torchrelay_rollout_guardrail"
LIMIT = "torchrelay_rollout_guardrail_limit"
LOWER_BOUND = "torchrelay_rollout_guardrail_lower_bound"


def select_exported(rollouts: Iterable[Rollout], now: float) -> list[Rollout]:
    """Return the rollouts that have gauges: those that are active or ended lately, the newest first."""
    recent = [r for r in rollouts if r.active or r.ended_at > now - RETENTION_S]
    return sorted(recent, key=lambda r: r.started_at, reverse=True)[:MAX_ROLLOUTS]


def read_gauges(
    rollouts: Iterable[tuple[Rollout, Figures]],
) -> Mapping[str, Mapping[tuple[str, ...], float]]:
    """Return the values of all gauges by their labels. An arm without requests has no value."""
    values: dict[str, dict[tuple[str, ...], float]] = {
        gauge: {} for gauge in (STATE, PERCENT, ENDED, GUARDRAIL, LIMIT, LOWER_BOUND)
    }
    for rollout, figures in rollouts:
        version = rollout.model, rollout.plan.to
        values[STATE][(*version, rollout.state)] = 1.0
        values[PERCENT][version] = rollout.percent
        if not rollout.active:
            values[ENDED][(*version, rollout.state)] = rollout.ended_at
        for reading in () if rollout.state == "starting" else evaluate_guardrails(rollout, figures):
            values[LIMIT][(*version, reading.name)] = reading.limit
            values[LOWER_BOUND][(*version, reading.name)] = reading.surely
            for arm, value in ((CANDIDATE, reading.value), (BASELINE, reading.baseline)):
                if value is not None:
                    values[GUARDRAIL][(*version, reading.name, arm)] = value
    return values
