"""What an operator may ask of a shadow, and what is said of the rest."""

from __future__ import annotations

from typing import Any

import pytest

from serve_app import policy
from serve_app.errors import BadRequest
from serve_app.policy import Compare, Shadow


def shadow(**document: Any) -> Shadow | None:
    return policy.read({"shadow": {"version": "2.0", **document}}).shadow


def test_a_shadow_says_little_and_comes_back_whole() -> None:
    assert shadow() == Shadow("2.0", percent=100.0, compare=Compare(), keep=20, redact=(), timeout_s=30.0)
    asked = shadow(percent=10, compare={"kind": "top_k", "k": 3, "least": 0.5}, redact=["user.name"])
    assert asked is not None
    assert asked.compare == Compare("top_k", k=3, least=0.5)
    said = policy.write(policy.read({"shadow": {"version": "2.0", "compare": {"kind": "text"}}}))
    assert policy.read(said).shadow == shadow(compare={"kind": "text"})


def test_figures_belong_to_what_is_compared_and_not_to_how_much() -> None:
    first, more = shadow(percent=10, timeout_s=1), shadow(percent=20)
    other = shadow(compare={"kind": "text"})
    assert first is not None
    assert more is not None
    assert other is not None
    assert first.terms == more.terms != other.terms


@pytest.mark.parametrize(
    ("document", "said"),
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
def test_what_is_wrong_is_named(document: dict[str, Any], said: str) -> None:
    with pytest.raises(BadRequest) as caught:
        shadow(**document)
    assert said in str(caught.value)
