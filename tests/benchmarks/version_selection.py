"""What it costs to choose a version for one call, in microseconds by kind of policy, as a line of JSON."""

from __future__ import annotations

import json
import timeit

from serve_app.dataplane.routing.version_router import next_bucket_cursor, select_version
from serve_app.domain.request import InferenceRequest, InputPart
from serve_app.domain.routing_table import ModelRoute, RoutingTable, VersionRoute
from serve_app.domain.traffic_policy import ActiveSplit, StickyKey, TrafficPolicy, allocate

_CALLS = 50_000
_WEIGHTS = {"1.0": 9000, "2.0": 1000}
_BODY = json.dumps({"user": {"id": "somebody"}, "text": "x" * 60}).encode()


def main() -> None:
    split = allocate(_WEIGHTS)

    def sticky(key: StickyKey) -> ModelRoute:
        return row(TrafficPolicy("sticky", _WEIGHTS, key, allocation=split))

    arms = {"1.0": "1.0", "2.0": "2.0"}
    models = {
        "default": row(TrafficPolicy()),
        "weighted": row(TrafficPolicy("weighted", _WEIGHTS, allocation=split)),
        "sticky by header": sticky(StickyKey(header="x-user")),
        "sticky by cookie": sticky(StickyKey(cookie="user")),
        "sticky by a path in 100 bytes of JSON": sticky(StickyKey(json="$.user.id")),
        "experiment by header": row(
            TrafficPolicy(), ActiveSplit("e", arms, split, "1.0", StickyKey(header="x-user"), "salt")
        ),
    }
    headers = {"x-user": "somebody", "cookie": "session=1; user=somebody"}
    call = InferenceRequest("m", None, (InputPart("body", _BODY, "application/json"),), headers)
    print(json.dumps({kind: cost(RoutingTable(1, {"m": model}), call) for kind, model in models.items()}))


def cost(table: RoutingTable, call: InferenceRequest) -> float:
    """Microseconds to draw a lot and choose."""
    lot = 0

    def once() -> None:
        nonlocal lot
        lot = next_bucket_cursor(lot)
        select_version(table, call, lot)

    return min(timeit.repeat(once, number=_CALLS, repeat=3)) / _CALLS * 1e6


def row(policy: TrafficPolicy, trial: ActiveSplit | None = None) -> ModelRoute:
    versions = {version: VersionRoute(version, "ready", 1) for version in _WEIGHTS}
    return ModelRoute("1.0", versions, policy, trial)


if __name__ == "__main__":
    main()
