"""What agrees and what does not, by kind; and how far apart."""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
import pytest

from serve_app.dataplane.shadow.comparison import MAX_BYTES, MAX_DISTANCE, ResponseComparison, compare
from serve_app.domain import tensors
from serve_app.domain.request import InferenceResponse
from serve_app.domain.traffic_policy import ComparisonRule

NAN, INF = float("nan"), float("inf")


def compared(live: Any, other: Any, **how: Any) -> ResponseComparison:
    bodies = (value if isinstance(value, bytes) else json.dumps(value).encode() for value in (live, other))
    first, second = (InferenceResponse(body) for body in bodies)
    return compare(ComparisonRule(**how), first, second)


def test_status_and_media_type_come_first() -> None:
    reply = InferenceResponse(b"1", "application/json")
    assert compare(ComparisonRule(), reply, InferenceResponse(b"1", "application/json; charset=utf-8")).agreed
    assert compare(
        ComparisonRule(), reply, InferenceResponse(b"1", "application/json", 201)
    ) == ResponseComparison(False, MAX_DISTANCE, "status")
    assert compare(ComparisonRule(), reply, InferenceResponse(b"1", "text/plain")) == ResponseComparison(
        False, MAX_DISTANCE, "content_type"
    )


def test_tensors_are_compared_as_numbers() -> None:
    def result(*numbers: float) -> InferenceResponse:
        y = tensors.from_array("y", np.array([numbers], np.float32))
        return InferenceResponse(
            tensors.pack([y, tensors.from_text("é".encode(), "t")]), tensors.PACKED_MEDIA_TYPE
        )

    how = ComparisonRule(at="$.y", rtol=0.01)
    assert compare(how, result(1.0, 2.0), result(1.001, 2.0)).agreed
    assert not compare(how, result(1.0, 2.0), result(1.5, 2.0)).agreed
    assert compare(ComparisonRule(at="$.t"), result(1.0), result(2.0)).agreed


@pytest.mark.parametrize("kind", ["auto", "allclose", "label", "text"])
@pytest.mark.parametrize(
    ("live", "other", "agree"),
    [
        (b'{"a": [1, 2.0]}', b'{\n"a":[1.0,2]}', True),
        (b'{"a":1,"b":2}', b'{"b":2,"a":1}', True),
        (b"[NaN, Infinity]", b"[NaN,Infinity]", True),
        (b"[NaN]", b"[null]", False),
        (b"[Infinity]", b"[-Infinity]", False),
        (b"[1e308]", b"[Infinity]", False),
        (b"true", b"1", False),
        (b"null", b"0", False),
        (b"[]", b"[1]", False),
        (b'"cat"', b'"dog"', False),
        (b"1" * 400, b"2" * 400, False),  # integers that no float holds
        (b"1" * 400, b"1" * 400, True),
        (b"no json", b"no json", True),
        (b"no json", b"no JSON", False),
        (b"no json", b"1", False),
        (b"\xff\xd8", b"\xff\xd8", True),
        (b"\xff\xd8", b"\xff\xd9", False),
        (b"[" * 5000, b"[" * 5000, True),
        (b"[" * 900 + b"]" * 900, b"[" * 900 + b"]" * 900, True),
    ],
)
def test_json_that_is_equal_as_json_agrees_and_what_is_none_byte_by_byte(
    kind: Any, live: bytes, other: bytes, agree: bool
) -> None:
    found = compared(live, other, kind=kind)
    assert found.agreed is agree
    assert (found.distance > 0) is not agree
    assert bool(found.why) is not agree


class TestAllclose:
    def test_numbers_within_the_tolerance_of_the_live_ones(self) -> None:
        assert compared(100, 100.05, kind="allclose", rtol=1e-3, atol=0).measures == {
            "max_abs_difference": pytest.approx(0.05)
        }
        far = compared({"a": [1.0, 2.0]}, {"a": [1.0, 2.5]}, kind="allclose", rtol=0.1, atol=0.05)
        assert (far.agreed, far.why) == (False, "numbers")
        assert far.distance == pytest.approx(0.5 / 0.25), "how many times the tolerance"
        assert far.measures == {"max_abs_difference": 0.5}

    def test_many_numbers_are_compared_as_few_are(self) -> None:
        for n in (3, 300):
            live = [float(i) for i in range(n)]
            other = [*live[:-1], live[-1] + 0.5]
            found = compared([live], [other], kind="allclose", rtol=0, atol=0.125)
            assert (found.agreed, found.distance) == (False, 4.0)
            assert compared([live], [other], kind="allclose", rtol=0, atol=0.5).agreed
            assert compared([*live, NAN, INF], [*live, NAN, INF], kind="allclose").agreed
            assert compared([*live, NAN], [*live, 1.0], kind="allclose") == ResponseComparison(
                False, MAX_DISTANCE, "shape"
            )
            assert compared([*live, 1.0], [*live, INF], kind="allclose") == ResponseComparison(
                False, MAX_DISTANCE, "shape"
            )
            assert compared([*live, 1.0], [*live, True], kind="allclose") == ResponseComparison(
                False, MAX_DISTANCE, "shape"
            )

    def test_what_is_no_number_is_alike_and_so_are_shapes(self) -> None:
        live = {"label": "cat", "score": 0.9, "box": [[1, 2], [3, 4]]}
        assert compared(live, {**live, "score": 0.9001}, kind="allclose").agreed
        for other in (
            {**live, "label": "dog"},
            {**live, "extra": 1},
            {"label": "cat", "score": 0.9},
            {**live, "box": [[1, 2]]},
            {**live, "score": "0.9"},
        ):
            assert compared(live, other, kind="allclose") == ResponseComparison(
                False, MAX_DISTANCE, "shape"
            ), other


class TestTopK:
    def test_a_share_of_common_labels_and_the_first(self) -> None:
        live = {"cat": 0.7, "dog": 0.2, "cow": 0.06, "hen": 0.04}
        swapped = {"dog": 0.5, "cat": 0.4, "cow": 0.06, "hen": 0.04}
        found = compared(live, swapped, kind="top_k", k=2)
        assert found == ResponseComparison(
            False, 1.0, "label", {"label_flipped": 1.0, "top_k_agreement": 1.0}
        )
        tail = compared(live, {**live, "dog": 0.01, "hen": 0.3}, kind="top_k", k=2)
        assert tail == ResponseComparison(
            False, 0.5, "labels", {"label_flipped": 0.0, "top_k_agreement": 0.5}
        )
        assert compared(live, {**live, "dog": 0.01, "hen": 0.3}, kind="top_k", k=2, least=0.5).agreed
        assert compared(live, {**live, "dog": 0.01, "hen": 0.3}, kind="top_k", k=1).agreed

    @pytest.mark.parametrize(
        "ranking",
        [
            {"cat": 0.7, "dog": 0.3},
            {"dog": 0.3, "cat": 0.7},
            ["cat", "dog"],
            [["cat", 0.7], ["dog", 0.3]],
            [{"label": "dog", "score": 0.3}, {"label": "cat", "score": 0.7}],
            [[{"label": "cat", "score": 0.7}, {"label": "dog", "score": 0.3}]],
            [{"cat": 0.7, "dog": 0.3}],
        ],
    )
    def test_labels_are_found_however_they_are_written(self, ranking: Any) -> None:
        found = compared(ranking, ["dog", "hen"], kind="top_k")
        assert found.measures == {"label_flipped": 1.0, "top_k_agreement": 0.5}
        assert found.distance == 1.5

    def test_scores_without_labels_are_labelled_by_their_place(self) -> None:
        assert compared([0.1, 0.9, 0.3], [0.2, 0.7, 0.6], kind="top_k", k=2).agreed
        assert compared([3, 1, 2], [3, 2, 1], kind="top_k").agreed, "integers are labels"
        assert compared([0.1, NAN], [0.1, 0.0], kind="top_k", k=1).agreed, "NaN is nobody's best"
        assert compared("a", "b", kind="top_k") == ResponseComparison(False, MAX_DISTANCE, "shape")


class TestAuto:
    def test_classifiers_answers_are_rankings(self) -> None:
        found = compared({"cat": 0.7, "dog": 0.3}, {"cat": 0.6, "dog": 0.4})
        assert found == ResponseComparison(True, 0.0, "", {"label_flipped": 0.0, "top_k_agreement": 1.0})
        assert compared(["cat", "dog"], ["dog", "cat"]).why == "label"
        one = {"label": "cat", "score": 0.9}
        assert compared(one, {**one, "score": 0.5}).measures == {"label_flipped": 0.0, "top_k_agreement": 1.0}
        assert compared(one, {**one, "label": "dog"}).why == "label"

    @pytest.mark.parametrize(
        ("live", "other"),
        [
            ({"digit": 3}, {"digit": 4}),
            ({"x": 10.0, "y": 2.0}, {"x": 11.0, "y": 2.0}),  # larger than a probability
            ({"x": 0.9, "y": 0.8}, {"x": 0.9, "y": 0.7}),  # and these sum to more than one
            ([[1, 2], [3, 4]], [[1, 2], [3, 5]]),
            ([0.2, 0.8], [0.1, 0.9]),
        ],
    )
    def test_other_numbers_are_compared_by_tolerance(self, live: Any, other: Any) -> None:
        assert compared(live, other).why == "numbers"

    def test_a_list_in_which_labels_come_again_is_no_ranking(self) -> None:
        tags = ["O", "O", "PER", "O", "O", "O", "LOC"]
        assert compared(tags, tags).agreed
        assert compared(tags, [*tags[:-1], "O"]) == ResponseComparison(False, MAX_DISTANCE, "shape")

    def test_text(self) -> None:
        assert compared("a b", "a c") == ResponseComparison(False, 1.0, "text")
        assert compared(b"a b", b"a b").agreed
        assert compared(b"a b", b"a c") == ResponseComparison(False, 1.0, "text")


def test_a_label_at_a_place() -> None:
    live, other = {"digit": 3, "ms": 12}, {"digit": 3, "ms": 99}
    assert compared(live, other, kind="label", at="digit").measures == {"label_flipped": 0.0}
    flipped = compared(live, {"digit": 8}, kind="label", at="digit")
    assert flipped == ResponseComparison(False, 1.0, "label", {"label_flipped": 1.0})
    assert compared(live, {"ms": 1}, kind="label", at="digit") == ResponseComparison(
        False, MAX_DISTANCE, "missing"
    )
    nowhere = compared(live, live, kind="label", at="digits")
    assert nowhere.why == "missing", "a path that leads nowhere is no agreement"
    assert compared(b"cat", b"dog", kind="label").measures == {"label_flipped": 1.0}


def test_the_likeness_of_texts() -> None:
    assert compared("to be or not", "to be or now", kind="text").measures == {}, "not asked for"
    near = compared("to be or not", "to be or now", kind="text", least=0.9)
    assert near.agreed
    assert near.measures["text_similarity"] == pytest.approx(22 / 24)
    far = compared({"text": "to be"}, {"text": "or not"}, kind="text", at="text", least=0.9)
    assert far.distance == pytest.approx(1 - far.measures["text_similarity"])
    assert compared({"a": 1}, {"a": 2}, kind="text").why == "text"


def test_long_answers_cost_little() -> None:
    spaced = [b"[1" + space * (MAX_BYTES + 10) + b"]" for space in (b" ", b"\n")]
    assert compared(*spaced) == ResponseComparison(False, 1.0, "text"), "what is too long is not read"
    long = [b'"' + letter * (MAX_BYTES + 10) + b'"' for letter in (b"a", b"b")]
    matrix = [[float(i) for i in range(500)]] * 20
    started = time.process_time()
    assert not compared(*long, kind="text", least=0.5).agreed
    assert not compared([1, *"abcdefgh" * 5000], [2, *"abcdefgh" * 5000]).agreed
    assert compared(matrix, matrix).agreed
    assert time.process_time() - started < 2
