"""Which version a call gets. Pure functions of the table, the call and a number: no state, no clock.

A call that names no version falls into one of 10,000 buckets, by the hash of its key or by its lot, and buckets
are dealt out to versions. Lots are a process's calls in order, spread evenly: over each 10,000 calls of a
process the shares are met exactly.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import NamedTuple

import orjson

from serve_app import sequence
from serve_app.errors import ModelNotFound, VersionNotFound
from serve_app.json_path import find
from serve_app.policy import WHOLE, Key, Trial
from serve_app.types import Call, ModelRow, Table, VersionRow

# From a lot to the next. It has no divisor in common with 10,000, so that each lot comes once in so many calls,
# and is near the golden section of it, so that a few calls in a row are spread as evenly as many.
_STRIDE = 6_181


class Choice(NamedTuple):
    """The version that answers a call, and how that came about."""

    row: VersionRow
    trial: Trial | None = None  # that counts this call
    arm: str = ""
    bucket: int = 0
    unit: str = ""  # who was assigned, where the trial has a key
    by_policy: bool = False  # the caller named no version

    @property
    def told(self) -> str:
        """The arm, as answers name it; empty where no trial counts this call."""
        return f"{self.trial.id}/{self.arm}" if self.trial is not None else ""


def after(lot: int) -> int:
    """The lot of the next call."""
    return (lot + _STRIDE) % WHOLE


def bucket(salt: str, key: str) -> int:
    """The bucket, from 0 to 9,999, of whoever shows ``key``: the same in every process, and unrelated between salts."""
    digest = blake2b(f"{salt}\0{key}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") % WHOLE


def unit(key: Key, call: Call) -> str:
    """What ``call`` shows where ``key`` says to look; empty where it shows nothing."""
    if key.header:
        return call.headers.get(key.header, "")
    if key.cookie:
        for pair in call.headers.get("cookie", "").split(";"):
            name, _, value = pair.strip().partition("=")
            if name == key.cookie:
                return value
        return ""
    for part in call.inputs:
        try:
            found = find(orjson.loads(part.value), key.json)
        except orjson.JSONDecodeError:
            continue
        if found is not None:
            return found if isinstance(found, str) else orjson.dumps(found).decode()
    return ""


def choose(table: Table, call: Call, lot: int = 0) -> Choice:
    """The version that answers ``call``: the one it names, else what its model's trial or policy picks.

    The calls of a sequence stay with the version that it began with; its first one alone counts in a trial.

    Raises ModelNotFound and VersionNotFound.
    """
    model = table.models.get(call.model)
    if model is None:
        raise ModelNotFound(call.model)
    named = call.version
    policy = model.policy
    if not named and policy.header:
        named = call.headers.get(policy.header)
    if named:
        row = model.versions.get(named) or model.versions.get(policy.labels.get(named, ""))
        if row is None:
            raise VersionNotFound(call.model, named)
        return Choice(row)
    if model.sequences and (name := call.headers.get(model.sequences)):
        replica = sequence.replica_of(name)
        if replica and (home := next((row for row in model.versions.values() if replica in row.ids), None)):
            return Choice(home)  # where it began, whatever is dealt out now
        lot = bucket(call.model, name)
    if model.trial is not None:
        return _of_trial(model, model.trial, call, lot)
    version = model.default
    if policy.allocation is not None:
        if policy.key is not None and (shown := unit(policy.key, call)):
            lot = bucket(policy.salt or call.model, shown)
        version = policy.allocation.of(lot)
    row = model.versions.get(version)
    if row is None:
        raise VersionNotFound(call.model, version)
    return Choice(row, by_policy=True)


def _of_trial(model: ModelRow, trial: Trial, call: Call, lot: int) -> Choice:
    shown = ""
    counted = True
    if trial.key is not None:
        shown = unit(trial.key, call)
        counted = bool(shown)
        lot = bucket(trial.salt, shown)
    arm = trial.allocation.of(lot) if counted else trial.baseline
    row = model.versions.get(trial.arms[arm])
    if row is None:
        raise VersionNotFound(call.model, trial.arms[arm])
    return Choice(row, trial if counted else None, arm, lot, shown, by_policy=True)


def whole(model: ModelRow) -> str | None:
    """The version that takes all of a model's traffic, so that its route may skip the gateway; None where none does."""
    if model.trial is not None or model.policy.shadow is not None:
        return None
    allocation = model.policy.allocation
    if allocation is None:
        return model.default
    return allocation.names[0] if len(allocation.names) == 1 else None
