"""What operators say of autoscaling: read, completed, written, and refused with a cure."""

from __future__ import annotations

from typing import Any

import pytest

from serve_app.domain.autoscaling import Autoscaling, read, with_defaults, write
from serve_app.domain.model import ModelSpec
from serve_app.errors import BadRequest


def test_a_document_says_some_of_it_and_the_rest_stays() -> None:
    assert read({}) == Autoscaling()
    first = read({"target_ongoing_requests": 4, "upscale_delay_s": "0.5"})  # a query's parameters are text
    assert (first.target_ongoing_requests, first.upscale_delay_s) == (4.0, 0.5)
    then = read({"policy": "latency", "target_p95_ms": "80"}, first)
    assert then == Autoscaling("latency", 4.0, 80.0, upscale_delay_s=0.5)
    assert read({"downscale_delay_s": 1}, then).target_p95_ms == 80.0
    assert read({"policy": "requests"}, then) == first, "a target that nobody keeps to is dropped"
    for scaling in (first, then):
        assert read(write(scaling)) == scaling


def test_two_batches_are_what_a_replica_should_have_to_do() -> None:
    assert with_defaults(None, 8) == Autoscaling(target_ongoing_requests=16.0)
    assert with_defaults(Autoscaling(target_ongoing_requests=3.0), 8).target_ongoing_requests == 3.0
    spec = ModelSpec("m", "1", "u", "d", "a", min_workers=2, max_workers=2, autoscaling=Autoscaling())
    assert spec.scaling is None, "one number leaves nothing to follow"
    assert spec.with_(min_workers=0, batch_size=2).scaling == Autoscaling(target_ongoing_requests=4.0)


@pytest.mark.parametrize(
    ("document", "why"),
    [
        (["latency"], "autoscaling is a mapping"),
        ({"target_ongoing_request": 4}, "did you mean 'target_ongoing_requests'"),
        ({"policy": "p95"}, "policy"),
        ({"target_ongoing_requests": 0}, "target_ongoing_requests is a number above 0, and is 0"),
        ({"upscale_delay_s": -1}, "upscale_delay_s is a number from 0, and is -1"),
        ({"downscale_delay_s": "nan"}, "downscale_delay_s is a number from 0, and is nan"),
        ({"look_back_period_s": 1}, "look_back_period_s is a number from 2, and is 1"),
        ({"upscale_delay_s": "soon"}, r"upscale_delay_s: .*'soon'"),
        ({"policy": "latency"}, "needs target_p95_ms"),
        ({"target_p95_ms": 80}, "target_p95_ms is for the policy 'latency'"),
    ],
)
def test_what_is_wrong_is_named(document: Any, why: str) -> None:
    with pytest.raises(BadRequest, match=why):
        read(document)
