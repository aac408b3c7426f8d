"""Traffic policies: the version for requests that name none, as frozen values and as operators' JSON.

Shares are in basis points of a model's requests: 10,000 are all of them.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from hashlib import blake2b
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic.json_schema import SkipJsonSchema
from typing_extensions import NotRequired, Required, TypedDict

from serve_app.domain import json_path, validation
from serve_app.domain.limits import MAX_LABELS, MAX_REDACTED_PATHS
from serve_app.domain.validation import documented
from serve_app.errors import BadRequest

BUCKET_COUNT = 10_000  # basis points, and the buckets into which keys are hashed

_MAX_KEY_LENGTH = 128  # characters of a sticky key that are remembered as they are
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]*")


def _check_token(name: str) -> None:
    if not _TOKEN.fullmatch(name):
        raise ValueError(f"{name!r} is no name that a header or a cookie can have")


@dataclass(frozen=True)
class StickyKey:
    """The source of the key that identifies a client in a request; exactly one of the three is set."""

    __pydantic_config__ = validation.STRICT
    header: str = ""
    cookie: str = ""
    json: Annotated[str, documented("A path into the first input that is JSON: $.user.id")] = ""

    def __post_init__(self) -> None:
        if sum(map(bool, (self.header, self.cookie, self.json))) != 1:
            raise ValueError('a key is one of {"header": NAME}, {"cookie": NAME} and {"json": PATH}')
        _check_token(self.header or self.cookie)
        object.__setattr__(self, "header", self.header.lower())
        json_path.parse(self.json)


def shorten_key(key: str) -> str:
    """Return a sticky key as it is remembered: a long one by its digest, so that it takes little memory."""
    if len(key) <= _MAX_KEY_LENGTH:
        return key
    return blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


@dataclass(frozen=True)
class ComparisonRule:
    """The rule by which two responses agree.

    ``auto``: one of the others, by the content. ``allclose``: numbers by ``rtol`` and ``atol``, all else
    equal. ``top_k``: the same first label, and enough common ones among the first ``k``. ``label`` and
    ``text``: equal, texts by the similarity ``least``.
    """

    __pydantic_config__ = validation.STRICT
    kind: Literal["auto", "allclose", "top_k", "label", "text"] = "auto"
    at: Annotated[str, documented("The JSON path of the compared value.")] = "$"
    rtol: Annotated[float, documented("The relative tolerance of allclose.", minimum=0)] = 1e-3
    atol: Annotated[float, documented("The absolute tolerance of allclose.", minimum=0)] = 1e-6
    k: Annotated[int, documented("The k of top_k.", minimum=1, maximum=1000)] = 5
    least: Annotated[
        float,
        documented("The minimum share of common labels, or similarity.", exclusiveMinimum=0, maximum=1),
    ] = 1.0

    def __post_init__(self) -> None:
        for name in ("rtol", "atol"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} is a number from 0, and is {getattr(self, name):g}")
        if not 1 <= self.k <= 1000:
            raise ValueError(f"k is from 1 to 1000 labels, and is {self.k}")
        if not 0 < self.least <= 1:
            raise ValueError(f"least is a share above 0 and at most 1, and is {self.least:g}")
        json_path.parse(self.at)


@dataclass(frozen=True)
class ShadowPolicy:
    """A version that gets copies of some requests; its responses are compared and discarded."""

    __pydantic_config__ = validation.STRICT
    version: Annotated[str, documented("The version that receives copies.")]
    percent: Annotated[
        float, documented("The percentage of requests without a version.", minimum=0.01, maximum=100)
    ] = 100.0
    compare: ComparisonRule = ComparisonRule()
    keep: Annotated[int, documented("The number of worst mismatches to store.", minimum=0, maximum=1000)] = 20
    redact: Annotated[tuple[str, ...], documented("JSON paths of values that are not stored.")] = ()
    timeout_s: Annotated[float, documented("The timeout of a copy in seconds.", exclusiveMinimum=0)] = 30.0

    def __post_init__(self) -> None:
        if not 0.01 <= self.percent <= 100:
            raise ValueError(f"percent is from 0.01 to 100, and is {self.percent:g}")
        if not 0 <= self.keep <= 1000:
            raise ValueError(f"keep is from 0 to 1000 disagreements, and is {self.keep}")
        if not 0 < self.timeout_s < math.inf:
            raise ValueError(f"timeout_s is a number of seconds above 0, and is {self.timeout_s:g}")
        if len(self.redact) > MAX_REDACTED_PATHS:
            raise ValueError(f"redact has at most {MAX_REDACTED_PATHS} paths, and has {len(self.redact)}")
        for path in self.redact:
            json_path.parse(path)

    @property
    def stats_key(self) -> tuple[str, ComparisonRule, int, tuple[str, ...]]:
        """The settings that statistics depend on: those of other settings do not add up."""
        return self.version, self.compare, self.keep, self.redact


class ShadowComparison(TypedDict):
    """How the shadow's responses compare with those of one live version; rates are shares."""

    version: str
    shadow: Annotated[str, documented("The version that receives copies.")]
    since: Annotated[float, documented("Seconds since the epoch.")]
    calls: Annotated[Mapping[Any, int], documented("By outcome.")]
    reasons: Mapping[str, Mapping[str, int]]
    agreement_rate: float | None
    error_rate: float | None
    label_flip_rate: float | None
    measures: Mapping[str, float | None]
    latency: Annotated[Mapping[str, Mapping[str, float]], documented("Of live and shadow.")]
    disagreements: Annotated[list[dict[str, Any]], documented("The worst mismatches.")]


class ShadowDocument(TypedDict):
    """How the responses of a model's shadow match the live ones."""

    model: str
    shadow: ShadowPolicy | None
    against: list[ShadowComparison]


class ShadowPoint(TypedDict):
    """The compared requests up to one time, in seconds since the epoch."""

    time: float
    agreed: int
    disagreed: int
    error: Annotated[int, documented("Requests that the shadow failed.")]


class ShadowTrend(TypedDict):
    version: Annotated[str, documented("The live version.")]
    points: list[ShadowPoint]


class ShadowHistory(TypedDict):
    """The agreement of a model's shadow over time, the oldest point first."""

    model: str
    against: list[ShadowTrend]


@dataclass(frozen=True, slots=True)
class BucketAllocation:
    """The owners of buckets: ``names[i]`` has those from ``bucket_bounds[i - 1]`` up to
    ``bucket_bounds[i]``, exclusive.
    """

    bucket_bounds: tuple[int, ...]
    names: tuple[str, ...]

    def owner_of(self, bucket: int) -> str:
        return self.names[bisect_right(self.bucket_bounds, bucket)]

    @property
    def shares(self) -> dict[str, int]:
        """The number of buckets of each name."""
        shares: dict[str, int] = {}
        for start, end, name in zip((0, *self.bucket_bounds), self.bucket_bounds, self.names):
            shares[name] = shares.get(name, 0) + end - start
        return shares


def allocate(weights: Mapping[str, int], before: BucketAllocation | None = None) -> BucketAllocation:
    """Assign buckets by weight; as few as possible of the buckets in ``before`` change their owner.

    They change at the borders between a shrinking and a growing name, so a share that grows back gets the
    same buckets. ``weights`` are in basis points and sum to 10,000.
    """
    if before is None:
        return _merge_ranges((name, weight) for name, weight in weights.items())
    shares = before.shares
    missing = {name: weights.get(name, 0) - shares.get(name, 0) for name in {**shares, **weights}}
    ranges = [
        (name, end - start)
        for start, end, name in zip((0, *before.bucket_bounds), before.bucket_bounds, before.names)
    ]
    moved_at_border = True
    while moved_at_border:
        moved_at_border = False
        for left, right in pairwise(range(len(ranges))):
            for giver, taker in ((left, right), (right, left)):
                (giver_name, length), (taker_name, held) = ranges[giver], ranges[taker]
                moved = min(length, -missing[giver_name], missing[taker_name])
                if moved > 0:
                    ranges[giver], ranges[taker] = (giver_name, length - moved), (taker_name, held + moved)
                    missing[giver_name] += moved
                    missing[taker_name] -= moved
                    moved_at_border = True
        ranges = [(name, length) for name, length in ranges if length]
    after: list[tuple[str, int]] = []  # from the last range to the first: a surplus is taken from its end
    for name, length in reversed(ranges):
        surplus = max(0, min(length, -missing[name]))
        missing[name] += surplus
        rest = length - surplus
        for new_owner in reversed([*weights]):
            if surplus and missing[new_owner] > 0:
                moved = min(surplus, missing[new_owner])
                missing[new_owner] -= moved
                surplus -= moved
                after.append((new_owner, moved))
        after.append((name, rest))
    return _merge_ranges(reversed(after))


def _merge_ranges(ranges: Iterable[tuple[str, int]]) -> BucketAllocation:
    """Return an allocation of consecutive ranges."""
    bounds: list[int] = []
    names: list[str] = []
    end = 0
    for name, length in ranges:
        end += length
        if names and names[-1] == name:
            bounds[-1] = end
        elif length:
            bounds.append(end)
            names.append(name)
    return BucketAllocation(tuple(bounds), tuple(names))


BasisPoints = Annotated[int, documented("Basis points.", minimum=0, maximum=BUCKET_COUNT)]
Shares = Annotated[Mapping[str, BasisPoints], documented("Basis points by version; their sum is 10,000.")]


@dataclass(frozen=True)
class TrafficPolicy:
    """A model's policy.

    ``default``: every request gets the default version. ``weighted``: each request by itself, by the
    versions' shares. ``sticky``: the same, and requests with the same key get the same version. Beside any of
    them: testers name a version or a label in a header, labels stand for versions in a path, and a shadow
    gets copies.
    """

    __pydantic_config__ = validation.STRICT
    policy: Literal["default", "weighted", "sticky"] = "default"
    versions: Shares = field(default_factory=dict)
    key: StickyKey | None = None
    salt: Annotated[str, documented("The salt of the key's hash; empty: the model's name.")] = ""
    header: Annotated[str, documented("The request header in which testers name a version or a label.")] = ""
    labels: Annotated[Mapping[str, str], documented("Versions by label.")] = field(default_factory=dict)
    shadow: ShadowPolicy | None = None
    # Of sticky and weighted; an operator cannot set it.
    allocation: SkipJsonSchema[BucketAllocation | None] = None

    def __post_init__(self) -> None:
        _check_token(self.header)
        object.__setattr__(self, "header", self.header.lower())

    def sole_version(self, default: str) -> str | None:
        """Return the version that gets all requests; None where several share them."""
        if self.allocation is None:
            return default
        return self.allocation.names[0] if len(self.allocation.names) == 1 else None

    @property
    def referenced_versions(self) -> set[str]:
        """Every version that the policy names."""
        shadow = {self.shadow.version} if self.shadow is not None else set()
        return {*self.versions, *self.labels.values(), *shadow}


class ActiveShares(TypedDict):
    """The active split, by the policy or by the experiment or rollout that replaces it."""

    by: Literal["policy", "experiment", "rollout"]
    id: NotRequired[Annotated[str, documented("The id of the experiment or the rollout.")]]
    default: Annotated[str, documented("The model's default version.")]
    versions: Shares


class TrafficDocument(TypedDict, total=False):
    """A model's policy without its defaults, and the active split, which is ignored in requests."""

    policy: Required[Literal["default", "weighted", "sticky"]]
    versions: Shares
    key: StickyKey
    salt: str
    header: str
    labels: Mapping[str, str]
    shadow: ShadowPolicy
    active: Required[ActiveShares]


ACTIVE = "active"  # ignored in requests, so that a document can be written as it was read
_OPERATOR_KEYS = tuple(f.name for f in fields(TrafficPolicy) if f.name != "allocation")


def read(document: Any) -> TrafficPolicy:
    """Parse the policy in an operator's document. Raises BadRequest, which names the key and the remedy."""
    if not isinstance(document, Mapping):
        raise BadRequest('A traffic policy is a JSON object, such as {"policy": "default"}.')
    if "allocation" in document:
        raise BadRequest(f"Traffic policy: unknown key 'allocation'; known here: {', '.join(_OPERATOR_KEYS)}")
    kind = "default" if not document.get("versions") else "sticky" if document.get("key") else "weighted"
    keys = {key: value for key, value in document.items() if key != ACTIVE}
    return validation.read_request(TrafficPolicy, {"policy": kind, **keys}, "Traffic policy", _find_error)


def write(policy: TrafficPolicy) -> dict[str, Any]:
    """Return the document that ``read`` parses, without defaults."""
    document = validation.write(policy)
    written = {name: document[name] for name in _OPERATOR_KEYS if document[name] or name == "policy"}
    if policy.key is not None:
        written["key"] = {source: name for source, name in document["key"].items() if name}
    return written


def _find_error(policy: TrafficPolicy) -> str:
    """Return the error of a policy in itself, independent of the existing versions; empty where it is
    valid.
    """
    if len(policy.labels) > MAX_LABELS:
        return f"labels are {len(policy.labels)}, and at most {MAX_LABELS} are allowed"
    if policy.policy == "default":
        if policy.versions:
            return 'the policy "default" has no versions; weighted and sticky have'
    elif problem := find_weights_error(policy.versions, "versions"):
        return problem
    if policy.policy == "sticky" and policy.key is None:
        return 'the policy "sticky" wants a key: {"header": NAME}, {"cookie": NAME} or {"json": PATH}'
    if policy.policy != "sticky" and policy.key is not None:
        return f'a key is for the policy "sticky"; this one is {policy.policy!r}'
    if policy.policy != "sticky" and policy.salt:
        return f'a salt is for the policy "sticky"; this one is {policy.policy!r}'
    return ""


def find_weights_error(weights: Mapping[str, int], place: str) -> str:
    """Return the error of shares that must sum to 10,000 basis points; empty where there is none."""
    negative = [name for name, weight in weights.items() if weight < 0]
    if negative:
        return (
            f"{place}.{negative[0]} is a share of {weights[negative[0]]} basis points; it cannot be negative"
        )
    total = sum(weights.values())
    if total != BUCKET_COUNT:
        listed = ", ".join(f"{name}: {weight}" for name, weight in weights.items()) or "none"
        return (
            f"{place} ({listed}) sum to {total} basis points; they must "
            f"sum to {BUCKET_COUNT}, which are 100 %"
        )
    return ""


@dataclass(frozen=True, slots=True)
class ActiveSplit:
    """The split of traffic by an experiment or a rollout, and the data that is collected for it.

    While one is active, its arms replace the policy's versions.
    """

    id: str
    arms: Mapping[str, str]  # name -> version
    allocation: BucketAllocation  # of the arms' names
    baseline: str  # the arm that calls without a key get, uncounted
    key: StickyKey | None = None  # None: call by call
    salt: str = ""
    outputs: tuple[tuple[str, str], ...] = ()  # (metric, JSON path into the answer): numbers that are summed
    exposures: bool = False  # who was given what is remembered
    rewards: bool = False  # they come later: where there is a key, single calls are remembered beside keys
    checks: bool = False  # answers are looked at for emptiness, NaN and infinity
