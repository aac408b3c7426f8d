"""Autoscaling policies, which Ray Serve's controller runs ten times a second for each version.

Ray pickles them by value and calls them in its controller, so they import nothing of this server. Their input
is what ``record_autoscaling_stats`` of each replica returns once a second
(``telemetry/autoscaling_stats.py``): ``rows`` (waiting and running), and of the last ``look_back_period_s``
seconds ``answered`` (rows) and ``p95_ms``. Ray itself counts calls that wait for a replica, and wakes up a
version without replicas before it runs a policy. A desired number applies after ``upscale_delay_s`` or
``downscale_delay_s``, within the version's bounds: Ray applies both.
"""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

Decision = tuple[float, dict[str, Any]]

_SLACK = 0.9  # share of the target that fewer replicas must meet
_MIN_ROWS = 20  # rows from which a percentile is used
_HEADROOM = 0.7  # share of the target p95 that fewer replicas must meet
_GROWTH = 1.5  # factor of replicas in one step, at most
_MEMORY_S = 600.0  # seconds for which a number of replicas that was too slow is remembered


class OngoingRequestsPolicy:
    """A policy of ``target_ongoing_requests`` rows for each replica; it scales down where nine tenths
    suffice.
    """

    def __call__(self, ctx: AutoscalingContext) -> Decision:
        n = ctx.current_num_replicas
        if n == 0:
            return ctx.target_num_replicas, {}  # the first replica is starting
        ongoing = _ongoing(ctx)
        if ongoing == 0 and _answered(ctx) == 0:
            return 0, {}
        target = ctx.config.get_target_ongoing_requests()
        desired = max(1, ceil(ongoing / target))
        if desired < n:
            desired = min(n, max(1, ceil(ongoing / (target * _SLACK))))
        return desired, {}


class LatencyPolicy:
    """A policy that keeps the rows' 95th percentile at ``target_p95_ms``.

    Above the target it scales up in proportion, at most by half in one step. Below it, it removes one replica
    where p95 * n / (n - 1) would still leave three tenths of the target free, and where that number was not
    too slow for this rate in the last ten minutes. It waits for starting replicas, and for
    ``look_back_period_s`` after each change, so that it judges a change by later rows.

    Below 20 rows nothing changes, with two exceptions: one replica suffices for a version with less than one
    row at a time, and none for a version without requests.
    """

    def __init__(self, target_p95_ms: float) -> None:
        self._target = target_p95_ms

    def __call__(self, ctx: AutoscalingContext) -> Decision:
        n, now = ctx.current_num_replicas, ctx.current_time
        memory = {
            key: ctx.policy_state[key] for key in ("replicas", "since", "slow") if key in ctx.policy_state
        }
        if memory.get("replicas") != n:
            memory |= {"replicas": n, "since": now}
        if n == 0 or ctx.target_num_replicas != n:
            return ctx.target_num_replicas, memory
        answered, ongoing = _answered(ctx), _ongoing(ctx)
        if answered < _MIN_ROWS:
            return (n if ongoing >= 1 else min(n, 1 if answered or ongoing else 0)), memory
        if now - memory["since"] < ctx.config.look_back_period_s:
            return n, memory
        rate = answered / ctx.config.look_back_period_s
        p95 = sum(count * p95 for count, p95 in _latencies(ctx)) / answered
        slow = {m: known for m, known in memory.get("slow", {}).items() if now - known[1] < _MEMORY_S}
        desired = n
        if p95 > self._target:
            slow[n] = (rate, now)
            desired = min(ceil(n * p95 / self._target), ceil(n * _GROWTH))
        elif n > 1 and p95 * n / (n - 1) <= _HEADROOM * self._target:
            slow_rate = min((known[0] for m, known in slow.items() if m >= n - 1), default=float("inf"))
            desired = n - 1 if rate < _SLACK * slow_rate else n
        return desired, {**memory, "slow": slow}


def _ongoing(ctx: AutoscalingContext) -> float:
    """Return the mean number of rows to do: those of replicas, and calls that wait for one."""
    metrics = (ctx.raw_metrics or {}).get("rows", {}).values()
    rows = sum(sum(point.value for point in series) / len(series) for series in metrics if series)
    return max(rows + ctx.total_queued_requests, ctx.total_num_requests)


def _answered(ctx: AutoscalingContext) -> float:
    return sum(count for count, _ in _latencies(ctx))


def _latencies(ctx: AutoscalingContext) -> list[tuple[float, float]]:
    """Return for each replica how many rows it answered lately, and their 95th percentile in milliseconds."""
    metrics = ctx.raw_metrics or {}
    p95s = metrics.get("p95_ms", {})
    return [
        (series[-1].value, p95s[replica][-1].value)
        for replica, series in metrics.get("answered", {}).items()
        if series and p95s.get(replica)
    ]
