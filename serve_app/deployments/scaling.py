"""How many replicas a version should have: the policies that Ray Serve's controller runs, ten times a second.

Ray pickles them by value and calls them in its controller, so they know nothing of this server. They hear of each
replica what its ``record_autoscaling_stats`` says once a second (telemetry/load.py): ``rows``, those that wait and
run; of its last ``look_back_period_s`` seconds the number of rows it answered, ``answered``, and their 95th percentile,
``p95_ms``. Of calls that wait for a replica Ray itself knows: that is how a version without any wakes up, before it
asks a policy. What a policy wants holds once it was wanted for ``upscale_delay_s`` or ``downscale_delay_s``,
between the version's bounds: Ray sees to both.
"""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

Wanted = tuple[float, dict[str, Any]]

_SLACK = 0.9  # of the target, at which fewer replicas must do
_ENOUGH = 20  # rows whose percentile is worth looking at
_HEADROOM = 0.7  # of the target p95, which fewer replicas must promise to keep
_GROWTH = 1.5  # at most so many times as many replicas in one step
_MEMORY = 600.0  # seconds for which a number of replicas that was too slow is remembered


class Requests:
    """So many replicas that each has ``target_ongoing_requests`` rows to do; fewer where they do with nine tenths."""

    def __call__(self, ctx: AutoscalingContext) -> Wanted:
        n = ctx.current_num_replicas
        if n == 0:
            return ctx.target_num_replicas, {}  # it is starting
        ongoing = _ongoing(ctx)
        if ongoing == 0 and _answered(ctx) == 0:
            return 0, {}
        target = ctx.config.get_target_ongoing_requests()
        wanted = max(1, ceil(ongoing / target))
        if wanted < n:
            wanted = min(n, max(1, ceil(ongoing / (target * _SLACK))))
        return wanted, {}


class Latency:
    """So many replicas that the rows' 95th percentile keeps to ``target_p95_ms``.

    Above the target: as many more as it is exceeded by, at most half as many again in one step. Below it: one
    fewer, where p95 * n / (n - 1) would still leave three tenths of the target free, and where that number was not
    found too slow for such a rate in the last ten minutes. It waits for a replica that is on its way, and for
    ``look_back_period_s`` after their number has changed, so that it judges what it did by rows that came after.

    A handful of rows is no evidence: below 20 of them nothing changes, but that one replica is enough for a version
    with less than one row to do at a time, and none for one without any call.
    """

    def __init__(self, target_p95_ms: float) -> None:
        self._target = target_p95_ms

    def __call__(self, ctx: AutoscalingContext) -> Wanted:
        n, now = ctx.current_num_replicas, ctx.current_time
        memory = {key: ctx.policy_state[key] for key in ("replicas", "since", "slow") if key in ctx.policy_state}
        if memory.get("replicas") != n:
            memory |= {"replicas": n, "since": now}
        if n == 0 or ctx.target_num_replicas != n:
            return ctx.target_num_replicas, memory
        answered, ongoing = _answered(ctx), _ongoing(ctx)
        if answered < _ENOUGH:
            return (n if ongoing >= 1 else min(n, 1 if answered or ongoing else 0)), memory
        if now - memory["since"] < ctx.config.look_back_period_s:
            return n, memory
        rate = answered / ctx.config.look_back_period_s
        p95 = sum(count * p95 for count, p95 in _latencies(ctx)) / answered
        slow = {m: known for m, known in memory.get("slow", {}).items() if now - known[1] < _MEMORY}
        wanted = n
        if p95 > self._target:
            slow[n] = (rate, now)
            wanted = min(ceil(n * p95 / self._target), ceil(n * _GROWTH))
        elif n > 1 and p95 * n / (n - 1) <= _HEADROOM * self._target:
            too_much = min((known[0] for m, known in slow.items() if m >= n - 1), default=float("inf"))
            wanted = n - 1 if rate < _SLACK * too_much else n
        return wanted, {**memory, "slow": slow}


def _ongoing(ctx: AutoscalingContext) -> float:
    """Rows to do, in the mean of the time that is looked at: those replicas have, and calls that wait for one."""
    said = (ctx.raw_metrics or {}).get("rows", {}).values()
    rows = sum(sum(point.value for point in series) / len(series) for series in said if series)
    return max(rows + ctx.total_queued_requests, ctx.total_num_requests)


def _answered(ctx: AutoscalingContext) -> float:
    return sum(count for count, _ in _latencies(ctx))


def _latencies(ctx: AutoscalingContext) -> list[tuple[float, float]]:
    """Of each replica how many rows it has answered of late, and their 95th percentile in milliseconds."""
    said = ctx.raw_metrics or {}
    p95s = said.get("p95_ms", {})
    return [
        (series[-1].value, p95s[replica][-1].value)
        for replica, series in said.get("answered", {}).items()
        if series and p95s.get(replica)
    ]
