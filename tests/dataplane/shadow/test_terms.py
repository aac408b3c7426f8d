"""Valid shadow policies, and the errors of invalid ones."""

from __future__ import annotations

from typing import Any

import pytest

from serve_app.domain import traffic_policy
from serve_app.domain.traffic_policy import ComparisonRule, ShadowPolicy
from serve_app.errors import BadRequest


def shadow(**document: Any) -> ShadowPolicy | None:
    return traffic_policy.read({"shadow": {"version": "2.0", **document}}).shadow


def test_a_shadow_says_little_and_comes_back_whole() -> None:
    assert shadow() == ShadowPolicy(
        "2.0", percent=100.0, compare=ComparisonRule(), keep=20, redact=(), timeout_s=30.0
    )
    requested = shadow(percent=10, compare={"kind": "top_k", "k": 3, "least": 0.5}, redact=["user.name"])
    assert requested is not None
    assert requested.compare == ComparisonRule("top_k", k=3, least=0.5)
    result = traffic_policy.write(
        traffic_policy.read({"shadow": {"version": "2.0", "compare": {"kind": "text"}}})
    )
    assert traffic_policy.read(result).shadow == shadow(compare={"kind": "text"})


def test_figures_belong_to_what_is_compared_and_not_to_how_much() -> None:
    first, more = shadow(percent=10, timeout_s=1), shadow(percent=20)
    other = shadow(compare={"kind": "text"})
    assert first is not None
    assert more is not None
    assert other is not None
    assert first.stats_key == more.stats_key != other.stats_key


@pytest.mark.parametrize(
    ("document", "result"),
    [
        ({"percent": 0}, "percent is from 0.01 to 100, and is 0"),
        ({"percent": 101}, "percent is from 0.01 to 100, and is 101"),
        ({"keep": 1001}, "keep is from 0 to 1000 disagreements, and is 1001"),
        ({"timeout_s": 0}, "timeout_s is a number of seconds above 0, and is 0"),
        ({"redact": ["a[b"]}, "'a[b' is no place in a JSON document; write it like $.user.id or scores[0]"),
        ({"compare": {"kind": "topk"}}, "shadow.compare.kind: Input should be 'auto', 'allclose', 'top_k'"),
        ({"compare": {"tolerance": 1}}, "unknown key 'shadow.compare.tolerance'; known here: kind, at, rtol"),
        ({"compare": {"rtol": -1}}, "rtol is a number from 0, and is -1"),
        ({"compare": {"k": 0}}, "k is from 1 to 1000 labels, and is 0"),
        ({"compare": {"least": 0}}, "least is a share above 0 and at most 1, and is 0"),
        ({"compare": {"at": "a[b"}}, "'a[b' is no place in a JSON document"),
    ],
)
def test_what_is_wrong_is_named(document: dict[str, Any], result: str) -> None:
    with pytest.raises(BadRequest) as caught:
        shadow(**document)
    assert result in str(caught.value)
