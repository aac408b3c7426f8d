"""Numbers of replicas that Ray Serve's autoscaler does not choose: by a query of Prometheus, or by a program.

Ray Serve can query Prometheus in its controller, and lets a program set a number through Ray's dashboard.
Here neither the dashboard nor a change of the registry is needed, one query serves the whole cluster, and a
failed one is an event. The chosen numbers are not stored. After a restart of Management they are those that
Ray Serve has; after a restart of the server they are the minimum.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace

import httpx
import orjson

from serve_app.control.lifecycle_events import EventLog
from serve_app.control.registry import DesiredState, Registry, find_version
from serve_app.control.replica_health import HealthTracker, ObservedApp
from serve_app.domain.autoscaling import Autoscaling, ReplicaCount
from serve_app.domain.model import ModelRef, ModelSpec
from serve_app.errors import BadRequest, Conflict
from serve_app.settings import ControlSettings, read_secret
from serve_app.telemetry import audit_log
from serve_app.telemetry.metrics import Meters

log = logging.getLogger(__name__)

PERIOD_S = 5.0  # between two queries of a version
_TIMEOUT_S = 5.0
_MAX_RESPONSE = 1 << 20  # bytes; a response has one value
_ROUNDING = 1e-9

Query = Callable[[str], Awaitable[float]]


class QueryFailed(Exception):
    """A query without one finite number as its result."""


def check_policy(spec: ModelSpec, settings: ControlSettings) -> None:
    """Raise BadRequest where this server cannot scale a version by its policy."""
    scaling = spec.scaling
    if scaling is None or not scaling.is_own:
        return
    if spec.min_workers == 0:
        raise BadRequest(
            f"autoscaling: the policy '{scaling.policy}' needs a worker at least, because only Ray Serve's "
            "autoscaler wakes a version; set minWorkers (min_worker) to 1."
        )
    if scaling.policy == "prometheus" and not settings.prometheus_url:
        raise BadRequest(
            "autoscaling: the policy 'prometheus' needs the address of a Prometheus server; set "
            "control.prometheus_url, such as http://prometheus:9090."
        )


@dataclass
class _Scaled:
    """The chosen number of replicas of a version, and a change of it that has to last."""

    replicas: int
    direction: int = 0  # of the change: 1 up, -1 down
    since: float = 0.0
    has_failed: bool = False  # the last query


class ReplicaScaler:
    """The chosen numbers of replicas. ``clock`` counts seconds; ``on_change`` is called after a change."""

    def __init__(
        self,
        settings: ControlSettings,
        health: HealthTracker,
        events: EventLog,
        meters: Meters,
        query: Query | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.on_change: Callable[[], None] = lambda: None
        self.get_registry: Callable[[], Registry] = Registry
        self.count_running: Callable[[ModelRef], int] = lambda ref: 0
        self._settings = settings
        self._health = health
        self._events = events
        self._meters = meters
        self._query = query or PrometheusClient(settings).query
        self._clock = clock
        self._scaled: dict[ModelRef, _Scaled] = {}

    # Desired states

    def apply(
        self, states: Mapping[str, DesiredState], observed: Mapping[str, ObservedApp]
    ) -> dict[str, DesiredState]:
        """Return the desired states with the chosen numbers."""
        applied = {app: self._apply(state, observed.get(app)) for app, state in states.items()}
        kept = {state.spec.ref for state in applied.values() if state.replicas is not None}
        for ref in self._scaled.keys() - kept:
            del self._scaled[ref]
        return applied

    def _apply(self, state: DesiredState, observed: ObservedApp | None) -> DesiredState:
        spec = state.spec
        if spec.scaling is None or not spec.scaling.is_own:
            return state
        scaled = self._scaled.get(spec.ref)
        if scaled is None:
            scaled = _Scaled(observed.replicas if observed is not None else spec.min_workers)
            self._scaled[spec.ref] = scaled
        scaled.replicas = _clamp(scaled.replicas, spec)
        return replace(state, replicas=scaled.replicas)

    # External policy

    async def set_replicas(self, model: str, version: str | None, replicas: int) -> ReplicaCount:
        """Set the number of replicas of a version whose policy is ``external``, within its bounds.

        Raises ModelNotFound, VersionNotFound, and Conflict for another policy.
        """
        spec = find_version(self.get_registry(), model, version)
        scaling = spec.scaling
        if scaling is None or scaling.policy != "external":
            policy = "it has a fixed number of workers" if scaling is None else f"it is '{scaling.policy}'"
            raise Conflict(
                f"The autoscaling policy of {spec.name} {spec.version} is not 'external': {policy}. "
                "Set autoscaling_policy=external with min_worker below max_worker."
            )
        chosen = _clamp(replicas, spec)
        scaled = self._scaled.setdefault(spec.ref, _Scaled(spec.min_workers))
        if scaled.replicas == chosen:
            audit_log.current_operation().is_recorded = True  # a repeated number is no change
        else:
            self._set(spec, scaled, chosen, f"{replicas} were requested")
        return {
            "replicas": chosen,
            "running": self.count_running(spec.ref),
            "min": spec.min_workers,
            "max": spec.max_workers,
        }

    # Policy prometheus

    async def run(self, period: float = PERIOD_S) -> None:
        """Query and scale in each period, until cancelled."""
        while True:
            try:
                await self.measure()
            except Exception:
                log.exception("the queries for autoscaling failed; they are repeated")
            await asyncio.sleep(period)

    async def measure(self) -> None:
        """Query once for each version with the policy ``prometheus``, and scale those versions."""
        specs = [
            spec
            for spec in self.get_registry()
            if spec.scaling is not None and spec.scaling.policy == "prometheus" and spec.ref in self._scaled
        ]
        await asyncio.gather(*(self._measure(spec, spec.scaling) for spec in specs if spec.scaling))

    async def _measure(self, spec: ModelSpec, scaling: Autoscaling) -> None:
        assert scaling.query and scaling.target_value
        try:
            value = await self._query(scaling.query)
        except QueryFailed as error:
            if (scaled := self._scaled.get(spec.ref)) is not None:
                self._record_failure(spec, scaled, str(error))
            return
        scaled = self._scaled.get(spec.ref)  # it may have been removed meanwhile
        if scaled is None:
            return
        if scaled.has_failed:
            log.info("%s: its autoscaling query works again", spec.ref.app)
            scaled.has_failed = False
        share = max(0.0, min(value / scaling.target_value, spec.max_workers))
        wanted = _clamp(math.ceil(share - _ROUNDING), spec)
        direction = (wanted > scaled.replicas) - (wanted < scaled.replicas)
        if direction != scaled.direction:
            scaled.direction, scaled.since = direction, self._clock()
        delay = scaling.upscale_delay_s if direction > 0 else scaling.downscale_delay_s
        if direction and self._clock() - scaled.since >= delay:
            self._set(spec, scaled, wanted, f"its query has the value {value:g}")

    def _set(self, spec: ModelSpec, scaled: _Scaled, replicas: int, reason: str) -> None:
        log.info("%s: %d instead of %d replicas; %s", spec.ref.app, replicas, scaled.replicas, reason)
        scaled.replicas, scaled.direction = replicas, 0
        self.on_change()

    def _record_failure(self, spec: ModelSpec, scaled: _Scaled, problem: str) -> None:
        """Record a failed query, with an event for the first of several."""
        scaled.direction = 0  # a change has to last, and every query in between has to succeed
        name = "torchrelay_autoscaling_query_failures"
        self._meters.instrument(name, spec.name, spec.version).inc()
        if scaled.has_failed:
            return
        scaled.has_failed = True
        message = f"The autoscaling query of {spec.name} {spec.version} failed, and {scaled.replicas} "
        message += f"replicas are kept: {problem}"
        log.warning("%s", message)
        self._health.record_note(spec.ref, message)
        history = self._events.open(spec.name, version=spec.version, workers=scaled.replicas)
        self._events.append(history, "failed", reason="query_failed", message=message)


def _clamp(replicas: int, spec: ModelSpec) -> int:
    return max(spec.min_workers, min(replicas, spec.max_workers))


class PrometheusClient:
    """A client of Prometheus' HTTP API at ``control.prometheus_url``.

    Raises ConfigurationError where the variable with its token is not set.
    """

    def __init__(self, settings: ControlSettings, environ: Mapping[str, str] = os.environ) -> None:
        self._url = settings.prometheus_url.rstrip("/")
        self._headers = _read_token(settings.prometheus_token, environ)
        # Of all queries: httpx loads the certificates for each client, 50 ms in which no other task runs.
        self._tls = httpx.create_ssl_context() if self._url else None

    async def query(self, query: str) -> float:
        """Return the only value of a query now. Raises QueryFailed, whose text has no part of the address."""
        try:
            # A timeout of httpx is one of each step: of a header that arrives byte by byte, each byte.
            return parse_value(*await asyncio.wait_for(self._request(query), _TIMEOUT_S))
        except httpx.InvalidURL as error:
            raise QueryFailed(f"control.prometheus_url is no URL ({error})") from None
        except (asyncio.TimeoutError, httpx.HTTPError) as error:
            raise QueryFailed(f"Prometheus does not answer ({type(error).__name__})") from None

    async def _request(self, query: str) -> tuple[int, bytes]:
        """Return the status and the body of a query's response."""
        if self._tls is None:
            raise QueryFailed("control.prometheus_url is not set")
        body = b""
        async with (
            httpx.AsyncClient(timeout=_TIMEOUT_S, headers=self._headers, verify=self._tls) as client,
            client.stream("POST", f"{self._url}/api/v1/query", data={"query": query}) as response,
        ):
            async for chunk in response.aiter_bytes():
                body += chunk
                if len(body) > _MAX_RESPONSE:
                    raise QueryFailed(f"the response has more than {_MAX_RESPONSE} bytes; aggregate it")
        return response.status_code, body


def parse_value(status: int, body: bytes) -> float:
    """Return the only value in a response of Prometheus. Raises QueryFailed."""
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError:
        raise QueryFailed(f"the response is not Prometheus' JSON (status {status})") from None
    if not isinstance(document, dict) or document.get("status") != "success":
        detail = document.get("error") if isinstance(document, dict) else None
        raise QueryFailed(f"status {status}: {str(detail or 'no reason')[:500]}")
    try:
        kind, result = document["data"]["resultType"], document["data"]["result"]
        if kind == "vector":
            if not result:
                raise QueryFailed(
                    "there is no value; a query for series that may be missing ends in: or vector(0)"
                )
            if len(result) > 1:
                raise QueryFailed(f"there are {len(result)} values; aggregate them, as sum(…) does")
            result = result[0]["value"]
        elif kind != "scalar":
            raise QueryFailed(f"the result is a {kind}; a vector of one value or a scalar is expected")
        value = float(result[1])
    except (KeyError, IndexError, TypeError, ValueError):
        raise QueryFailed("the response is not that of Prometheus' API of queries") from None
    if not math.isfinite(value):
        raise QueryFailed(f"the value is {result[1]}; a division by zero has none")
    return value


def _read_token(setting: str, environ: Mapping[str, str]) -> dict[str, str]:
    if not setting:
        return {}
    token = read_secret("control.prometheus_token", setting, "there is no token", environ)
    return {"Authorization": f"Bearer {token}"}
