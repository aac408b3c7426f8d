"""JSON with integers beyond 64 bits, as Python's json reads it."""

from __future__ import annotations

import json

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.domain import exact_json

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


@pytest.mark.parametrize("before", ["", "[", "[1,", '{"a":', "-"])
@pytest.mark.parametrize("length", [0, 2000, 2050, 5000])
def test_long_numbers_are_found_anywhere(before: str, length: int) -> None:
    filler = "[" + "1.2345678901234567, " * (length // 20)
    closing = "}" * before.count("{") + "]" * before.count("[")
    number = f"{before}18446744073709551616{closing}"
    assert exact_json.loads(f"{filler}{number}]".encode())[-1] == json.loads(number)
    assert exact_json.loads(number.encode()) == json.loads(number)


@given(VALUES)
def test_values_are_those_of_json(value: object) -> None:
    try:
        text = json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # a lone surrogate
        return
    found = exact_json.loads(text)
    assert found == json.loads(text)
    assert exact_json.loads(exact_json.dumps(found)) == found


@pytest.mark.parametrize("number", ["18446744073709551616", "-9223372036854775809", "1" * 4000])
def test_integers_beyond_64_bits_are_exact(number: str) -> None:
    assert exact_json.loads(b'{"a": [%b, 1]}' % number.encode()) == {"a": [int(number), 1]}
    assert exact_json.dumps({"ä": int(number)}) == f'{{"ä":{number}}}'.encode()


@pytest.mark.parametrize(
    "text",
    [
        b"{",
        b"[NaN]",
        b"[NaN, %d]" % 10**20,
        b"1" * 5000,
        b"[" * 900 + b"9" * 20 + b"]" * 900 + b"x",
        b"",
        b'["\\ud800"]',
        b'["\\uDFFF", 123456789012345678901234567890]',
        b'{"\\ud800": 123456789012345678901234567890}',
    ],
)
def test_what_is_no_json_raises_the_error_of_orjson(text: bytes) -> None:
    with pytest.raises(orjson.JSONDecodeError):
        exact_json.loads(text)


@pytest.mark.parametrize("number", [b"1", b"18446744073709551616"])
def test_levels_are_limited_beside_long_integers(number: bytes) -> None:
    with pytest.raises(orjson.JSONDecodeError, match="depth"):
        exact_json.loads(b"[" * 5000 + number + b"]" * 5000)


def test_pairs_of_surrogates_are_read_beside_long_integers() -> None:
    assert exact_json.loads(b'["\\ud83d\\ude00", 123456789012345678901234567890]')[0] == "\U0001f600"


def test_every_text_is_written() -> None:
    assert json.loads(exact_json.dumps({"\ud800": "a\udfff"})) == {"\ud800": "a\udfff"}


@pytest.mark.parametrize("number", [b"1", b"18446744073709551616"])
def test_levels_that_are_read_are_written(number: bytes) -> None:
    document = exact_json.loads(b"[" * 250 + number + b"]" * 250)
    assert exact_json.loads(exact_json.dumps(document)) == document
    with pytest.raises(orjson.JSONDecodeError, match="depth is more than 250 levels"):
        exact_json.loads(b"[" * 251 + number + b"]" * 251)


def test_brackets_in_texts_are_no_levels() -> None:
    assert exact_json.loads(b'["%s"]' % (b"[" * 1000)) == ["[" * 1000]
    assert exact_json.loads(b"[%s0]" % (b"[0]," * 1_000_000))[-1] == 0


@pytest.mark.parametrize("number", ["1", "1" * 30])
def test_closing_brackets_of_texts_hide_no_levels(number: str) -> None:
    deep = '{"a":"' + "]" * 1000 + '","b":' + "[" * 300 + number + "]" * 300 + "}"
    with pytest.raises(orjson.JSONDecodeError, match="more than 250 levels"):
        exact_json.loads(deep.encode())


def test_other_encodings_are_refused_as_orjson_does() -> None:
    with pytest.raises(orjson.JSONDecodeError):
        exact_json.loads(('["' + "\u3131" * 40 + '"]').encode("utf-16"))
