"""What it costs to choose a version for one call, in microseconds by kind of policy, as a line of JSON."""

from __future__ import annotations

import json
import timeit

from serve_app.policy import Key, Policy, Trial, allocate
from serve_app.traffic import after, choose
from serve_app.types import Call, Input, ModelRow, Table, VersionRow

_CALLS = 50_000
_WEIGHTS = {"1.0": 9000, "2.0": 1000}
_BODY = json.dumps({"user": {"id": "somebody"}, "text": "x" * 60}).encode()


def main() -> None:
    split = allocate(_WEIGHTS)

    def sticky(key: Key) -> ModelRow:
        return row(Policy("sticky", _WEIGHTS, key, allocation=split))

    arms = {"1.0": "1.0", "2.0": "2.0"}
    models = {
        "default": row(Policy()),
        "weighted": row(Policy("weighted", _WEIGHTS, allocation=split)),
        "sticky by header": sticky(Key(header="x-user")),
        "sticky by cookie": sticky(Key(cookie="user")),
        "sticky by a path in 100 bytes of JSON": sticky(Key(json="$.user.id")),
        "experiment by header": row(Policy(), Trial("e", arms, split, "1.0", Key(header="x-user"), "salt")),
    }
    headers = {"x-user": "somebody", "cookie": "session=1; user=somebody"}
    call = Call("m", None, (Input("body", _BODY, "application/json"),), headers)
    print(json.dumps({kind: cost(Table(1, {"m": model}), call) for kind, model in models.items()}))


def cost(table: Table, call: Call) -> float:
    """Microseconds to draw a lot and choose."""
    lot = 0

    def once() -> None:
        nonlocal lot
        lot = after(lot)
        choose(table, call, lot)

    return min(timeit.repeat(once, number=_CALLS, repeat=3)) / _CALLS * 1e6


def row(policy: Policy, trial: Trial | None = None) -> ModelRow:
    versions = {version: VersionRow(version, "ready", 1) for version in _WEIGHTS}
    return ModelRow("1.0", versions, policy, trial)


if __name__ == "__main__":
    main()
