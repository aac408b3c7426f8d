"""Which version of a model gets a call that names none, as frozen values and as the JSON that operators write.

Shares are in basis points of a model's calls: 10,000 are all of them.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Any, Literal

from serve_app import documents, json_path
from serve_app.errors import BadRequest

WHOLE = 10_000  # basis points, and the buckets into which keys are hashed

_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]*")


def _token(name: str) -> None:
    if not _TOKEN.fullmatch(name):
        raise ValueError(f"{name!r} is no name that a header or a cookie can have")


@dataclass(frozen=True)
class Key:
    """Where a call says whose it is; exactly one of the three is set."""

    __pydantic_config__ = documents.STRICT
    header: str = ""
    cookie: str = ""
    json: str = ""  # a path into the first input that is JSON

    def __post_init__(self) -> None:
        if sum(map(bool, (self.header, self.cookie, self.json))) != 1:
            raise ValueError('a key is one of {"header": NAME}, {"cookie": NAME} and {"json": PATH}')
        _token(self.header or self.cookie)
        object.__setattr__(self, "header", self.header.lower())
        json_path.steps(self.json)


@dataclass(frozen=True)
class Compare:
    """What it means that two answers agree; see shadow/comparison.py.

    ``auto``: what stands in them says which of the others. ``allclose``: numbers by ``rtol`` and ``atol``, all else
    alike. ``top_k``: the same first label, and enough common ones among the first ``k``. ``label`` and ``text``:
    equal, texts as far as ``least`` asks.
    """

    __pydantic_config__ = documents.STRICT
    kind: Literal["auto", "allclose", "top_k", "label", "text"] = "auto"
    at: str = "$"  # where in an answer that is JSON, as a path
    rtol: float = 1e-3  # of the live answer's number
    atol: float = 1e-6
    k: int = 5
    least: float = 1.0  # share of common labels, or similarity of texts, from which on answers agree

    def __post_init__(self) -> None:
        for name in ("rtol", "atol"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} is a number from 0, and is {getattr(self, name):g}")
        if not 1 <= self.k <= 1000:
            raise ValueError(f"k is from 1 to 1000 labels, and is {self.k}")
        if not 0 < self.least <= 1:
            raise ValueError(f"least is a share above 0 and at most 1, and is {self.least:g}")
        json_path.steps(self.at)


@dataclass(frozen=True)
class Shadow:
    """A version that gets a copy of some calls, and whose answers nobody waits for."""

    __pydantic_config__ = documents.STRICT
    version: str
    percent: float = 100.0  # of the calls that name no version, to a hundredth
    compare: Compare = Compare()
    keep: int = 20  # of the worst disagreements, with their inputs
    redact: tuple[str, ...] = ()  # JSON paths of inputs and outputs that are not kept
    timeout_s: float = 30.0  # after which a copy is given up

    def __post_init__(self) -> None:
        if not 0.01 <= self.percent <= 100:
            raise ValueError(f"percent is from 0.01 to 100, and is {self.percent:g}")
        if not 0 <= self.keep <= 1000:
            raise ValueError(f"keep is from 0 to 1000 disagreements, and is {self.keep}")
        if not 0 < self.timeout_s < math.inf:
            raise ValueError(f"timeout_s is a number of seconds above 0, and is {self.timeout_s:g}")
        for path in self.redact:
            json_path.steps(path)

    @property
    def terms(self) -> tuple[str, Compare, int, tuple[str, ...]]:
        """What figures are about: those of other terms do not add up."""
        return self.version, self.compare, self.keep, self.redact


@dataclass(frozen=True, slots=True)
class Allocation:
    """Who has which buckets: ``names[i]`` those from ``ends[i - 1]`` up to, and without, ``ends[i]``."""

    ends: tuple[int, ...]
    names: tuple[str, ...]

    def of(self, bucket: int) -> str:
        return self.names[bisect_right(self.ends, bucket)]

    @property
    def shares(self) -> dict[str, int]:
        """How many buckets each name has."""
        found: dict[str, int] = {}
        for start, end, name in zip((0, *self.ends), self.ends, self.names):
            found[name] = found.get(name, 0) + end - start
        return found


def allocate(weights: Mapping[str, int], before: Allocation | None = None) -> Allocation:
    """Buckets by weight. Of those that ``before`` gave away as few as possible change hands.

    They do so at the borders between who gives and who takes: of two, who gave gets the same ones back.
    ``weights`` are in basis points and sum to 10,000.
    """
    if before is None:
        return _joined((name, weight) for name, weight in weights.items())
    has = before.shares
    lacks = {name: weights.get(name, 0) - has.get(name, 0) for name in {**has, **weights}}
    ranges = [(name, end - start) for start, end, name in zip((0, *before.ends), before.ends, before.names)]
    borders = True
    while borders:
        borders = False
        for left, right in pairwise(range(len(ranges))):
            for giver, taker in ((left, right), (right, left)):
                (given, length), (taken, held) = ranges[giver], ranges[taker]
                moved = min(length, -lacks[given], lacks[taken])
                if moved > 0:
                    ranges[giver], ranges[taker] = (given, length - moved), (taken, held + moved)
                    lacks[given] += moved
                    lacks[taken] -= moved
                    borders = True
        ranges = [(name, length) for name, length in ranges if length]
    after: list[tuple[str, int]] = []  # from the last to the first: who still has too much gives of its end
    for name, length in reversed(ranges):
        given = max(0, min(length, -lacks[name]))
        lacks[name] += given
        rest = length - given
        for taker in reversed([*weights]):
            if given and lacks[taker] > 0:
                moved = min(given, lacks[taker])
                lacks[taker] -= moved
                given -= moved
                after.append((taker, moved))
        after.append((name, rest))
    return _joined(reversed(after))


def _joined(ranges: Iterable[tuple[str, int]]) -> Allocation:
    """An allocation of these ranges, one after the other."""
    ends: list[int] = []
    names: list[str] = []
    end = 0
    for name, length in ranges:
        end += length
        if names and names[-1] == name:
            ends[-1] = end
        elif length:
            ends.append(end)
            names.append(name)
    return Allocation(tuple(ends), tuple(names))


@dataclass(frozen=True)
class Policy:
    """A model's policy.

    ``default``: every call gets the default version. ``weighted``: call by call, by the versions' shares.
    ``sticky``: the same, and whoever shows the same key gets the same version. Beside any of them: testers name a
    version or a label in a header, labels stand for versions in a path, and a shadow gets copies.
    """

    __pydantic_config__ = documents.STRICT
    policy: Literal["default", "weighted", "sticky"] = "default"
    versions: Mapping[str, int] = field(default_factory=dict)
    key: Key | None = None
    salt: str = ""  # of sticky's hash; empty: the model's name
    header: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    shadow: Shadow | None = None
    allocation: Allocation | None = None  # of sticky and weighted; not the operator's to say

    def __post_init__(self) -> None:
        _token(self.header)
        object.__setattr__(self, "header", self.header.lower())

    @property
    def named(self) -> set[str]:
        """Every version that it speaks of."""
        shadow = {self.shadow.version} if self.shadow is not None else set()
        return {*self.versions, *self.labels.values(), *shadow}


# What the management API says beside a policy's document; passed over, so that what was read can be written again.
IN_FORCE = "in_force"
_OWN = tuple(f.name for f in fields(Policy) if f.name != "allocation")


def read(document: Any) -> Policy:
    """The policy that an operator's document says. Raises BadRequest, which names the key and the cure."""
    if not isinstance(document, Mapping):
        raise BadRequest('A traffic policy is a JSON object, such as {"policy": "default"}.')
    if "allocation" in document:
        raise BadRequest(f"Traffic policy: unknown key 'allocation'; known here: {', '.join(_OWN)}")
    kind = "default" if not document.get("versions") else "sticky" if document.get("key") else "weighted"
    said = {key: value for key, value in document.items() if key != IN_FORCE}
    try:
        policy = documents.read(Policy, {"policy": kind, **said})
    except documents.Misread as error:
        raise BadRequest(f"Traffic policy: {error}") from None
    if wrong := _wrong(policy):
        raise BadRequest(f"Traffic policy: {wrong}")
    return policy


def write(policy: Policy) -> dict[str, Any]:
    """The document that ``read`` takes for this policy: what it says and nothing else."""
    whole = documents.write(policy)
    said = {name: whole[name] for name in _OWN if whole[name] or name == "policy"}
    if policy.key is not None:
        said["key"] = {source: name for source, name in whole["key"].items() if name}
    return said


def _wrong(policy: Policy) -> str:
    """What is wrong with a policy by itself, whatever versions there are."""
    if policy.policy == "default":
        if policy.versions:
            return 'the policy "default" has no versions; weighted and sticky have'
    elif wrong := wrong_weights(policy.versions, "versions"):
        return wrong
    if policy.policy == "sticky" and policy.key is None:
        return 'the policy "sticky" wants a key: {"header": NAME}, {"cookie": NAME} or {"json": PATH}'
    if policy.policy != "sticky" and policy.key is not None:
        return f'a key is for the policy "sticky"; this one is {policy.policy!r}'
    if policy.policy != "sticky" and policy.salt:
        return f'a salt is for the policy "sticky"; this one is {policy.policy!r}'
    return ""


def wrong_weights(weights: Mapping[str, int], where: str) -> str:
    """What is wrong with shares that should sum to 10,000 basis points; empty where nothing is."""
    negative = [name for name, weight in weights.items() if weight < 0]
    if negative:
        return f"{where}.{negative[0]} is a share of {weights[negative[0]]} basis points; it cannot be negative"
    total = sum(weights.values())
    if total != WHOLE:
        said = ", ".join(f"{name}: {weight}" for name, weight in weights.items()) or "none"
        return f"{where} ({said}) sum to {total} basis points; they must sum to {WHOLE}, which are all calls"
    return ""


@dataclass(frozen=True, slots=True)
class Trial:
    """What an experiment or a rollout asks of the data plane: who gets what, and what is looked at.

    While one is on, its arms take the place of the policy's versions.
    """

    id: str
    arms: Mapping[str, str]  # name -> version
    allocation: Allocation  # of the arms' names
    baseline: str  # the arm that calls without a key get, uncounted
    key: Key | None = None  # None: call by call
    salt: str = ""
    outputs: tuple[tuple[str, str], ...] = ()  # (metric, JSON path into the answer): numbers that are summed
    exposures: bool = False  # who was given what is remembered
    rewards: bool = False  # they come later: where there is a key, single calls are remembered beside keys
    checks: bool = False  # answers are looked at for emptiness, NaN and infinity
