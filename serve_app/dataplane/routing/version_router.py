"""Version selection: pure functions of the table, the request and a number, without state and clock.

A request that names no version falls into one of 10,000 buckets, by the hash of its key or by a cursor. Each
bucket belongs to one version. The cursor visits the buckets in a fixed order, spread evenly: over each 10,000
requests of a process the shares are met exactly.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import NamedTuple

import orjson

from serve_app.domain import exact_json, sequence_ids
from serve_app.domain.json_path import find
from serve_app.domain.request import InferenceRequest
from serve_app.domain.routing_table import ModelRoute, RoutingTable, VersionRoute
from serve_app.domain.traffic_policy import BUCKET_COUNT, ActiveSplit, StickyKey, shorten_key
from serve_app.errors import ModelNotFound, VersionNotFound

# The stride has no divisor in common with 10,000, so each bucket is visited once in 10,000 requests. It is
# near the golden section of it, so a few requests in a row are spread as evenly as many.
_CURSOR_STRIDE = 6_181


class VersionSelection(NamedTuple):
    """The version that serves a request, and the reason for it."""

    route: VersionRoute
    active_split: ActiveSplit | None = None  # that counts this request
    arm: str = ""
    bucket: int = 0
    unit: str = ""  # the value of the split's sticky key, where it has one
    routed_by_policy: bool = False  # the request named no version

    @property
    def arm_label(self) -> str:
        """The arm as responses name it; empty where no experiment or rollout counts this request."""
        return f"{self.active_split.id}/{self.arm}" if self.active_split is not None else ""


def next_bucket_cursor(bucket_cursor: int) -> int:
    """Return the bucket of the next request."""
    return (bucket_cursor + _CURSOR_STRIDE) % BUCKET_COUNT


def bucket_of_key(salt: str, key: str) -> int:
    """Return the bucket of a key, from 0 to 9,999: the same in every process, and unrelated between salts."""
    digest = blake2b(f"{salt}\0{key}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") % BUCKET_COUNT


def extract_unit(key: StickyKey, request: InferenceRequest) -> str:
    """Return the value of a sticky key in a request; empty where the request has none."""
    if key.header:
        return request.headers.get(key.header, "")
    if key.cookie:
        for pair in request.headers.get("cookie", "").split(";"):
            name, _, value = pair.strip().partition("=")
            if name == key.cookie:
                return value
        return ""
    for part in request.inputs:
        try:
            found = find(exact_json.loads(part.value), key.json)
        except orjson.JSONDecodeError:
            continue
        if found is not None:
            return found if isinstance(found, str) else exact_json.dumps(found).decode()
    return ""


def select_version(
    table: RoutingTable, request: InferenceRequest, bucket_cursor: int = 0
) -> VersionSelection:
    """Return the version that serves a request: the one it names, else the choice of the model's split or
    policy.

    The requests of a sequence stay with the version that it started with; only the first one counts in a
    split.

    Raises ModelNotFound and VersionNotFound.
    """
    model = table.models.get(request.model)
    if model is None:
        raise ModelNotFound(request.model)
    named = request.version
    policy = model.policy
    if not named and policy.header:
        named = request.headers.get(policy.header)
    if named:
        route = model.versions.get(named) or model.versions.get(policy.labels.get(named, ""))
        if route is None:
            raise VersionNotFound(request.model, named)
        return VersionSelection(route)
    if model.sequence_header and (sequence_id := request.headers.get(model.sequence_header)):
        replica = sequence_ids.replica_of(sequence_id)
        if replica and (
            owner := next((route for route in model.versions.values() if replica in route.replica_ids), None)
        ):
            return VersionSelection(owner)  # its first version, whatever the policy is now
        bucket_cursor = bucket_of_key(request.model, sequence_id)
    if model.active_split is not None:
        return select_arm(model, model.active_split, request, bucket_cursor)
    version = model.default
    if policy.allocation is not None:
        if policy.key is not None and (shown := extract_unit(policy.key, request)):
            bucket_cursor = bucket_of_key(policy.salt or request.model, shown)
        version = policy.allocation.owner_of(bucket_cursor)
    route = model.versions.get(version)
    if route is None:
        raise VersionNotFound(request.model, version)
    return VersionSelection(route, routed_by_policy=True)


def select_arm(
    model: ModelRoute, split: ActiveSplit, request: InferenceRequest, bucket: int
) -> VersionSelection:
    shown = ""
    counted = True
    if split.key is not None:
        shown = extract_unit(split.key, request)
        counted = bool(shown)
        bucket = bucket_of_key(split.salt, shown)
    arm = split.allocation.owner_of(bucket) if counted else split.baseline
    route = model.versions.get(split.arms[arm])
    if route is None:
        raise VersionNotFound(request.model, split.arms[arm])
    return VersionSelection(
        route, split if counted else None, arm, bucket, shorten_key(shown), routed_by_policy=True
    )


def sole_version(model: ModelRoute) -> str | None:
    """Return the version that gets all traffic of a model, so that its route may bypass the gateway."""
    if model.active_split is not None or model.policy.shadow is not None:
        return None
    return model.policy.sole_version(model.default)
