"""What is kept of answers that differ: the worst, each input once, cut and redacted."""

from __future__ import annotations

import json
from typing import Any

import orjson

from serve_app.dataplane.shadow.comparison import ResponseComparison
from serve_app.dataplane.shadow.mismatches import MAX_STORED_BYTES, Mismatch, WorstMismatches, build_mismatch
from serve_app.domain.request import InferenceRequest, InferenceResponse, InputPart

JSON = "application/json"
FOUND = ResponseComparison(False, 2.0, "label", {"label_flipped": 1.0})


def kept(
    value: Any, live: Any = 1, other: Any = 2, redact: tuple[str, ...] = (), name: str = "body"
) -> dict[str, Any]:
    """Return the stored form of an input and its two responses."""
    body, first, second = (v if isinstance(v, bytes) else orjson.dumps(v) for v in (value, live, other))
    call = InferenceRequest(
        "m", None, (InputPart(name, body, JSON),), {"authorization": "Bearer secret"}, request_id="r1"
    )
    return build_mismatch(
        call, InferenceResponse(first, JSON), InferenceResponse(second, JSON), FOUND, redact
    ).document


def test_inputs_and_both_answers_are_kept_and_headers_are_not() -> None:
    result = kept({"pixels": [1, 2]}, {"cat": 0.9}, {"dog": 0.9})
    assert result.pop("time") > 0
    assert result == {
        "request_id": "r1",
        "reason": "label",
        "distance": 2.0,
        "label_flipped": 1.0,
        "inputs": [{"name": "body", "content_type": JSON, "json": {"pixels": [1, 2]}}],
        "live": {"status": 200, "content_type": JSON, "json": {"cat": 0.9}},
        "shadow": {"status": 200, "content_type": JSON, "json": {"dog": 0.9}},
    }
    assert "secret" not in json.dumps(kept(1))


def test_what_is_no_json_is_kept_as_text_or_in_base64() -> None:
    [text] = kept("naïve".encode())["inputs"]
    assert text == {"name": "body", "content_type": JSON, "text": "naïve"}
    [image] = kept(b"\xff\xd8\xff")["inputs"]
    assert image == {"name": "body", "content_type": JSON, "base64": "/9j/", "bytes": 3}
    assert kept(b"[NaN]")["inputs"][0]["text"] == "[NaN]"


def test_what_is_long_is_cut_and_says_so() -> None:
    [text] = kept("é".encode() * MAX_STORED_BYTES)["inputs"]
    assert (text["bytes"], text["cut"], text["text"]) == (
        2 * MAX_STORED_BYTES,
        True,
        "é" * (MAX_STORED_BYTES // 2),
    )
    [odd] = kept(b"a" + "é".encode() * MAX_STORED_BYTES)["inputs"]
    assert odd["text"] == "a" + "é" * (MAX_STORED_BYTES // 2 - 1), (
        "half a character is no reason to take a text for binary"
    )
    [image] = kept(b"\xff" * MAX_STORED_BYTES * 2)["inputs"]
    assert (image["bytes"], image["cut"], len(image["base64"])) == (2 * MAX_STORED_BYTES, True, 5464)
    [document] = kept(list(range(MAX_STORED_BYTES)))["inputs"]
    assert document["text"].startswith("[0,1,2")
    assert "json" not in document


class TestRedaction:
    def test_a_place_is_covered_in_inputs_and_in_both_answers(self) -> None:
        requested = {"user": {"name": "Ann", "age": 7}, "x": 1}
        result = kept(requested, {"user": {"name": "Ann"}}, {"user": {"name": "Bob"}}, ("user.name",))
        assert result["inputs"][0]["json"] == {"user": {"name": "[redacted]", "age": 7}, "x": 1}
        assert result["live"]["json"] == result["shadow"]["json"] == {"user": {"name": "[redacted]"}}

    def test_a_key_reaches_into_lists_and_an_index_into_one_of_them(self) -> None:
        document = {"users": [{"name": "Ann"}, {"name": "Bob"}], "row": [1, 2, 3]}
        result = kept(document, redact=("$.users.name", "row[-1]", "row[9]", "nothing.here"))["inputs"][0][
            "json"
        ]
        assert result == {"users": [{"name": "[redacted]"}] * 2, "row": [1, 2, "[redacted]"]}
        assert kept([{"name": "Ann"}], redact=("name",))["inputs"][0]["json"] == [{"name": "[redacted]"}]
        assert kept(document, redact=("$",))["inputs"][0]["json"] == "[redacted]"

    def test_a_field_of_a_form_is_a_place_too(self) -> None:
        assert kept(b"Ann", redact=("user",), name="user")["inputs"] == [
            {"name": "user", "bytes": 3, "redacted": True}
        ]
        [part] = kept({"user": {"name": "Ann"}}, redact=("data.user[0]", "data.user.name"), name="data")[
            "inputs"
        ]
        assert part["json"] == {"user": {"name": "[redacted]"}}

    def test_what_cannot_be_read_is_not_kept(self) -> None:
        result = kept(b'{"name": "Ann"', b"Ann is a name", b"\xff", redact=("name",))
        assert result["inputs"] == [{"name": "body", "content_type": JSON, "bytes": 14, "redacted": True}]
        assert result["live"] == {"status": 200, "content_type": JSON, "bytes": 13, "redacted": True}
        assert result["shadow"] == {"status": 200, "content_type": JSON, "bytes": 1, "redacted": True}

    def test_it_comes_before_the_cut(self) -> None:
        [part] = kept(
            {"long": "x" * MAX_STORED_BYTES, "name": "Ann", "more": "y" * MAX_STORED_BYTES}, redact=("name",)
        )["inputs"]
        assert part["cut"]
        [part] = kept(
            {"long": "x" * (MAX_STORED_BYTES - 40), "name": "Ann", "more": "y" * MAX_STORED_BYTES},
            redact=("name",),
        )["inputs"]
        assert "Ann" not in part["text"]
        assert "redacted" in part["text"]
        [small] = kept({"name": "x" * MAX_STORED_BYTES * 3}, redact=("name",))["inputs"]
        assert small["json"] == {"name": "[redacted]"}, "what is left is short"
        [huge] = kept({"name": "x" * (2 << 20)}, redact=("name",))["inputs"]
        assert huge["redacted"] is True


def make(key: str, distance: float) -> Mismatch:
    return Mismatch(key, distance, {})


class TestWorst:
    def test_the_worst_are_kept_from_the_worst_on(self) -> None:
        worst = WorstMismatches(3)
        for key, distance in (("a", 1.0), ("b", 5.0), ("c", 3.0), ("d", 2.0), ("e", 0.5)):
            worst.add(make(key, distance))
        assert [kept.key for kept in worst] == ["b", "c", "d"]
        assert worst.accepts(2.5)
        assert not worst.accepts(2.0)

    def test_of_equal_ones_the_first_stay(self) -> None:
        worst = WorstMismatches(2)
        for key in "abc":
            worst.add(make(key, 1.0))
        assert [kept.key for kept in worst] == ["a", "b"]
        worst.add(make("d", 2.0))
        assert [kept.key for kept in worst] == ["d", "a"]

    def test_an_input_stands_there_once(self) -> None:
        worst = WorstMismatches(2)
        for distance in (1.0, 3.0, 2.0):
            worst.add(make("a", distance))
        assert [(kept.key, kept.distance) for kept in worst] == [("a", 3.0)]

        def of(value: Any, request: str, redact: tuple[str, ...] = ()) -> str:
            call = InferenceRequest("m", None, (InputPart("body", orjson.dumps(value)),), request_id=request)
            return build_mismatch(call, InferenceResponse(b"1"), InferenceResponse(b"2"), FOUND, redact).key

        assert of([1], "r1") == of([1], "r2") != of([2], "r2")
        assert of("no object", "r1", ("name",)) == of("no object", "r2", ("name",))
        call = InferenceRequest("m", None, (InputPart("body", b"Ann"),))
        hidden = [
            build_mismatch(
                InferenceRequest("m", None, call.inputs, request_id=r),
                InferenceResponse(b"1"),
                InferenceResponse(b"2"),
                FOUND,
                ("name",),
            ).key
            for r in ("r1", "r2")
        ]
        assert hidden[0] != hidden[1], "what is not kept cannot be known again"

    def test_none_are_kept_where_none_are_wanted(self) -> None:
        worst = WorstMismatches(0)
        worst.add(make("a", 1.0))
        assert not worst.accepts(9.0)
        assert len(worst) == 0
