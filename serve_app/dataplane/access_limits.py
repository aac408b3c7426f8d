"""The limits of keys in one process: rates, concurrency, tokens and requests of a day.

A process admits its share of each limit. The share is its part of the demand for the key over all processes,
as Management last computed it (see ``control/key_shares.py``). Before a process has a share, and while
Management does not answer, every process that may receive the key's requests has the same share. Rates are
token buckets whose level may become negative: a request of many rows is admitted, and later ones wait.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from itertools import islice
from math import ceil

from serve_app.domain import tensors
from serve_app.domain.access import JWT_PREFIX, KeyDemand, KeyGrant, KeyLimits, KeyShare
from serve_app.domain.request import InferenceRequest, InferenceResponse, ResponseStream
from serve_app.domain.routing_table import RoutingTable
from serve_app.errors import RateLimited
from serve_app.telemetry.metrics import Meters

SHARE_PERIOD_S = 0.5  # between two exchanges with Management
SHARE_LIFETIME_S = 3 * SHARE_PERIOD_S
_MAX_JWT_LABELS = 200  # subjects with metrics of their own, in one process
_MAX_STATES = 10_000  # idle ones are dropped beyond it
_CHECKED_STATES = 8  # of the least recently used, for each new one
_IDLE_S = 600.0  # after which the state of a key is dropped
_DAY_S = 86_400
_SMOOTHING = 0.3  # the part of a new period in the demand
_MIN_PERIOD_S = 0.1  # a shorter one overstates the demand of a first request
_BYTES_PER_TOKEN = 4  # of a prompt whose length a stream does not report
_TOTAL_TOKENS = re.compile(rb'"total_tokens"\s*:\s*(\d{1,12})')
_EVENT = b"data:"


class TokenBucket:
    """A bucket that fills with ``rate`` tokens a second up to ``capacity``."""

    __slots__ = ("_capacity", "_level", "_rate", "_time")

    def __init__(self, now: float) -> None:
        self._rate = 0.0
        self._capacity = self._level = float("inf")  # full, whatever its first capacity is
        self._time = now

    def configure(self, rate: float, capacity: float, now: float) -> None:
        self._fill(now)
        self._rate, self._capacity = rate, capacity
        self._level = min(self._level, capacity)

    def find_wait(self, amount: float, now: float) -> float:
        """Return the seconds until ``amount`` may be taken, 0 where it may be now.

        More than the capacity may be taken from a full bucket; its level is negative afterwards.
        """
        self._fill(now)
        missing = min(amount, self._capacity) - self._level
        return missing / self._rate if missing > 1e-9 and self._rate else 0.0

    def take(self, amount: float) -> None:
        self._level -= amount

    def is_full(self, now: float) -> bool:
        self._fill(now)
        return self._level >= self._capacity

    def _fill(self, now: float) -> None:
        self._level = min(self._capacity, self._level + (now - self._time) * self._rate)
        self._time = now


class _KeyState:
    """The use of one key in this process, and its buckets."""

    __slots__ = (
        "attempts", "day", "day_left", "day_requests", "last_attempts", "last_used", "limits", "name",
        "ongoing", "rate", "refused", "reported", "request_bucket", "requests", "row_bucket", "rows", "share",
        "share_until", "token_bucket", "tokens",
    )  # fmt: skip

    def __init__(self, name: str, now: float) -> None:
        self.name = name  # of the key
        self.limits: KeyLimits | None = None
        self.requests = self.rows = self.tokens = 0  # since the last report
        self.refused = Counter[str]()
        self.ongoing = self.attempts = 0
        self.rate = 0.0  # attempts per second, as reported last
        self.reported = now
        self.last_attempts = 0  # of the period before
        self.share = self.share_until = 0.0
        self.last_used = now
        self.day, self.day_requests, self.day_left = -1, 0, 0
        self.request_bucket, self.row_bucket, self.token_bucket = (TokenBucket(now) for _ in range(3))

    def configure(self, limits: KeyLimits, share: float, now: float) -> None:
        """Apply ``share`` of the limits; a bucket holds one request at least."""
        self.limits, self.share = limits, share
        for bucket, rate in (
            (self.request_bucket, limits.requests_per_second),
            (self.row_bucket, limits.rows_per_second),
        ):
            if rate:
                bucket.configure(rate * share, max(1.0, (limits.burst or rate) * share), now)
        if tokens := limits.tokens_per_minute:
            self.token_bucket.configure(tokens / 60 * share, max(1.0, tokens * share), now)

    def find_refusal(self, rows: int, now: float, wall_time: float) -> tuple[str, float] | None:
        """Return the limit that refuses a request, and the seconds until it may be admitted."""
        limits = self.limits
        assert limits is not None
        if limits.concurrency and self.ongoing >= max(1, int(limits.concurrency * self.share)):
            return "concurrency", 1.0
        if limits.requests_per_day and self.day_left <= 0:
            return "requests_per_day", _DAY_S - wall_time % _DAY_S
        if limits.requests_per_second and (wait := self.request_bucket.find_wait(1, now)):
            return "requests_per_second", wait
        if limits.rows_per_second and (wait := self.row_bucket.find_wait(rows, now)):
            return "rows_per_second", wait
        if limits.tokens_per_minute and (wait := self.token_bucket.find_wait(1, now)):
            return "tokens_per_minute", wait
        return None

    def is_idle(self, now: float) -> bool:
        """Return whether a new state would be the same, but for the requests of the day."""
        return (
            not (self.ongoing or self.requests or self.tokens or self.refused)
            and self.request_bucket.is_full(now)
            and self.row_bucket.is_full(now)
            and self.token_bucket.is_full(now)
        )

    def start_day(self, day: int) -> None:
        limits = self.limits
        self.day, self.day_requests = day, 0
        self.day_left = max(1, int(((limits and limits.requests_per_day) or 0) * self.share))


class Admission:
    """An admitted request of a key; ``release`` ends it."""

    __slots__ = ("_state",)

    def __init__(self, state: _KeyState) -> None:
        self._state = state
        state.ongoing += 1

    def add_tokens(self, count: int) -> None:
        """Charge tokens of a prompt and its completion."""
        state = self._state
        state.tokens += count
        if state.limits is not None and state.limits.tokens_per_minute:
            state.token_bucket.take(count)

    def release(self) -> None:
        self._state.ongoing -= 1


class KeyLimiter:
    """The limits and the use of all keys in one process. It runs on one event loop.

    ``find_table`` returns the routing table; ``gateways`` is the number of gateways. ``demand`` is set when a
    key without a share is used.
    """

    def __init__(
        self,
        find_table: Callable[[], RoutingTable] = RoutingTable,
        gateways: int = 1,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.demand = asyncio.Event()
        self._find_table = find_table
        self._gateways = gateways
        self._clock = clock
        self._wall_clock = wall_clock
        self._states: OrderedDict[str, _KeyState] = OrderedDict()  # the least recently used first
        # The day, its requests and those left of keys whose states were dropped.
        self._days: dict[str, tuple[int, int, int]] = {}
        self._labels: set[str] = set()  # of JWT subjects

    def admit(self, grant: KeyGrant, rows: int = 1, counts_tokens: bool = False) -> Admission | None:
        """Count a request, or raise RateLimited with the seconds after which a retry may succeed.

        Returns None where nothing has to be recorded at the request's end: for a key without limits, unless
        ``counts_tokens``.
        """
        id = grant.id or grant.name
        state = self._states.get(id)
        if state is None:
            state = self._create_state(id, grant)
        self._states.move_to_end(id)
        if grant.limits is None:
            state.requests += 1
            state.rows += rows
            return Admission(state) if counts_tokens else None
        now, wall_time = self._clock(), self._wall_clock()
        state.attempts += 1
        state.last_used = now
        if state.limits is not grant.limits or now >= state.share_until:
            self._apply_limits(state, grant, now)
        if grant.limits.requests_per_day and state.day != int(wall_time // _DAY_S):
            state.start_day(int(wall_time // _DAY_S))
        refusal = state.find_refusal(rows, now, wall_time)
        if refusal is not None:
            limit, wait = refusal
            state.refused[limit] += 1
            error = RateLimited(grant.name, limit, getattr(grant.limits, limit))
            error.retry_after = max(1, ceil(wait))
            raise error
        if grant.limits.requests_per_second:
            state.request_bucket.take(1)
        if grant.limits.rows_per_second:
            state.row_bucket.take(rows)
        if grant.limits.requests_per_day:
            state.day_requests += 1
            state.day_left -= 1
        state.requests += 1
        state.rows += rows
        return Admission(state)

    def _create_state(self, id: str, grant: KeyGrant) -> _KeyState:
        now = self._clock()
        if len(self._states) >= _MAX_STATES:  # subjects of tokens
            for oldest in list(islice(self._states, _CHECKED_STATES)):
                if self._states[oldest].is_idle(now):
                    self._drop(oldest)
                else:
                    self._states.move_to_end(oldest)  # so that the next new key checks others
        state = self._states[id] = _KeyState(grant.name, now)
        state.day, state.day_requests, state.day_left = self._days.pop(id, (-1, 0, 0))
        return state

    def _drop(self, id: str) -> None:
        """Drop a key's state, except its requests of the day."""
        state = self._states.pop(id)
        if state.day_requests:
            self._days[id] = state.day, state.day_requests, state.day_left

    def _apply_limits(self, state: _KeyState, grant: KeyGrant, now: float) -> None:
        """Apply changed limits, or the equal share where the present one has expired."""
        assert grant.limits is not None
        share = state.share
        if now >= state.share_until:
            share, state.share_until = self._equal_share(grant), now + SHARE_LIFETIME_S
            self.demand.set()
        state.configure(grant.limits, share, now)

    def _equal_share(self, grant: KeyGrant) -> float:
        """Return one part of the processes that may receive the key's requests."""
        replicas = sum(
            version.replicas
            for name, model in self._find_table().models.items()
            if grant.covers(name)
            for version in model.versions.values()
        )
        return 1 / max(1, self._gateways + replicas)

    # The exchange with Management

    @property
    def has_demand(self) -> bool:
        """Return whether Management has to hear of a key: it was used, or its share can be returned."""
        return any(state.attempts or state.rate for state in self._states.values())

    def collect_demand(self) -> dict[str, KeyDemand]:
        """Return the demand for each key with limits since the last call."""
        now = self._clock()
        demands = {}
        for name, state in self._states.items():
            if state.limits is None or not (state.attempts or state.rate):
                continue
            rate = state.attempts / max(now - state.reported, _MIN_PERIOD_S)
            if not (state.attempts or state.last_attempts):
                state.rate = 0.0  # after two idle periods the share is returned
            elif state.rate:  # smoothed, because the counts of a period vary
                state.rate += _SMOOTHING * (rate - state.rate)
            else:
                state.rate = rate
            state.last_attempts, state.attempts, state.reported = state.attempts, 0, now
            demands[name] = KeyDemand(state.rate, state.day, state.day_requests)
        return demands

    def apply_shares(self, shares: Mapping[str, KeyShare]) -> None:
        """Apply the shares that Management returned; a share of 0 leaves the equal one in force."""
        now = self._clock()
        for name, granted in shares.items():
            state = self._states.get(name)
            if state is None or state.limits is None:
                continue
            if granted.share > 0:
                state.share_until = now + SHARE_LIFETIME_S
                state.configure(state.limits, granted.share, now)
            if state.limits.requests_per_day and granted.day == state.day:
                left = state.limits.requests_per_day - granted.day_requests
                state.day_left = max(1, int(left * state.share)) if left > 0 else 0

    # Metrics

    def report(self, meters: Meters) -> None:
        """Add the use since the last call to the metrics, and drop the states of idle keys."""
        now, today = self._clock(), int(self._wall_clock() // _DAY_S)
        oldest = next(iter(self._days.values()), None)
        if oldest is not None and oldest[0] != today:
            self._days = {id: entry for id, entry in self._days.items() if entry[0] == today}
        for id, state in list(self._states.items()):
            if state.requests or state.tokens or state.refused:
                state.last_used = now
                meters.key(self._label(state.name), state.requests, state.rows, state.tokens, state.refused)
                state.requests = state.rows = state.tokens = 0
                state.refused.clear()
            elif now - state.last_used > _IDLE_S and state.is_idle(now):
                self._drop(id)

    def _label(self, name: str) -> str:
        """Return the label of a key; subjects of tokens beyond the first ones share one."""
        if not name.startswith(JWT_PREFIX) or name in self._labels:
            return name
        if len(self._labels) >= _MAX_JWT_LABELS:
            return f"{JWT_PREFIX}other"
        self._labels.add(name)
        return name


def count_rows(request: InferenceRequest, table: RoutingTable) -> int:
    """Return the rows of a request, which are more than 1 only for tensors with a batch axis."""
    if request.kind != "tensors":
        return 1
    model = table.models.get(request.model)
    version = model.versions.get(request.version or model.default) if model is not None else None
    return tensors.count_rows(request.inputs, version.signature if version is not None else None)


def counts_tokens(request: InferenceRequest, grant: KeyGrant) -> bool:
    """Return whether the tokens of a response are counted: on paths of OpenAI's API, and for a limit."""
    if grant.limits is not None and grant.limits.tokens_per_minute:
        return True
    return request.headers.get("url_path", "").startswith("v1/")


def charge_tokens(
    admission: Admission, request: InferenceRequest, response: InferenceResponse | ResponseStream
) -> None:
    """Charge the tokens that a response reports in ``usage.total_tokens``.

    A stream without this figure is charged one token for each event, and a quarter of the prompt's bytes.
    """
    if isinstance(response, InferenceResponse):
        admission.add_tokens(count_tokens(response.body))
        return
    counter = _StreamTokens(sum(len(part.value) for part in request.inputs))
    response.add_chunk_callback(counter.feed)
    response.add_status_callback(lambda status: admission.add_tokens(counter.total))


def count_tokens(body: bytes) -> int:
    """Return the last ``total_tokens`` in a body, 0 where there is none."""
    if b'"total_tokens"' not in body:
        return 0
    found = _TOTAL_TOKENS.findall(body)
    return int(found[-1]) if found else 0


class _StreamTokens:
    """The tokens of a stream of server-sent events."""

    __slots__ = ("_estimate", "_reported")

    def __init__(self, prompt_bytes: int) -> None:
        self._estimate = prompt_bytes // _BYTES_PER_TOKEN
        self._reported = 0

    def feed(self, chunk: bytes) -> None:
        self._estimate += max(1, chunk.count(_EVENT))
        self._reported = count_tokens(chunk) or self._reported

    @property
    def total(self) -> int:
        return self._reported or self._estimate
