import dataclasses
import datetime
import enum
import io
import json
import math
import re
import struct
import uuid

import numpy
import orjson
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.domain.request import InferenceRequest, InputPart
from serve_app.errors import UnsupportedOutput
from serve_app.runtime import codec
from serve_app.runtime.codec import TensorRowCodec

pytestmark = pytest.mark.integration


# What json.dumps writes


FLOAT = re.compile(rb"-?\d+(\.\d+(e[-+]?\d+)?|e[-+]?\d+)")


def assert_like_json_dumps(written, value):
    """Compare the bytes, except for the spelling of floats (1e-7 and 1e-07 are the same) and NaN."""
    expected = json.dumps(value, indent=2, default=lambda held: held.tolist()).encode()
    if re.search(rb"NaN|Infinity", expected):
        nullified = json.loads(expected, parse_constant=lambda _: None)
        expected = json.dumps(nullified, indent=2).encode()
    assert normalize_floats(written) == normalize_floats(expected)


def normalize_floats(text):
    return FLOAT.sub(lambda number: repr(float(number[0])).encode(), text)


def same(value):
    assert_like_json_dumps(codec.encode(value), value)


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.floats(0, 1),
    st.floats(-1e-3, 1e-3),
    st.text(),
    st.text(st.characters(codec="ascii")),
)
keys = st.one_of(st.text(), st.integers(), st.floats(), st.booleans(), st.none())
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner), st.lists(inner).map(tuple), st.dictionaries(keys, inner)),
    max_leaves=20,
)


@given(
    st.one_of(
        st.lists(values), st.dictionaries(keys, values), scalars.filter(lambda v: not isinstance(v, str))
    )
)
@settings(max_examples=100, deadline=None, database=None)
def test_json_is_json_dumps(value):
    same(value)


@given(st.lists(st.integers(0, 2**64 - 1), min_size=50, max_size=50))
@settings(max_examples=100, deadline=None, database=None)
def test_floats_of_all_bit_patterns_are_json_dumps(bits):
    same([struct.unpack("d", struct.pack("Q", each))[0] for each in bits])


@pytest.mark.parametrize(
    "value",
    [
        [],
        {},
        [[]],
        {"a": {}, "b": []},
        [1e-4, 1e-5, 9.9e-5, 1e-7, 1e15, 1e16, 1e17, 1e22, -0.0, 5e-324, 1.7976931348623157e308],
        [math.nan],
        [math.inf, -math.inf],
        [2**63, 2**64, -(2**63), -(2**64)],
        ["\x7f", "\x00\x1f\b\f\n\r\t", '"\\/<>&', "é", "\u2028", "😀", "\ud800"],
        {"é": "e1", "e-1": 2, "null": 3, "0.0000": 4},
        {0: "a", None: "b", True: "c", 1.5: "d"},
        [True, False, None],
        [(1, 2), [3]],
        {"deep": [[[[[[{"a": [1.0]}]]]]]]},
        enum.IntEnum("Number", "one two").one,
        [numpy.float64(0.25)],
    ],
    ids=repr,
)
def test_the_known_differences_of_the_fast_way_are_mended(value):
    same(value)


def test_the_usual_answer_takes_the_fast_way(monkeypatch):
    answer = {"class": 3, "label": "eel", "logits": [1.25, -0.5, 1234.5, 0.001], "ok": True}
    expected = json.dumps(answer, indent=2).encode()
    monkeypatch.setattr(json, "dumps", None)
    assert codec.encode(answer) == expected


def test_bytes_text_and_tensors_have_their_own_form():
    assert codec.encode(b"\x00raw") == b"\x00raw"
    assert codec.encode(bytearray(b"raw")) == b"raw"
    assert type(codec.encode(bytearray(b"raw"))) is bytes
    assert codec.encode("é") == "é".encode()
    tensor = torch.arange(6.0).reshape(2, 3)
    assert torch.equal(torch.load(io.BytesIO(codec.encode(tensor))), tensor)


@dataclasses.dataclass
class Point:
    x: int = 1


CIRCULAR: list = []
CIRCULAR.append(CIRCULAR)


@pytest.mark.parametrize(
    "value",
    [
        object(),
        {1, 2},
        numpy.array(["text", b"bytes"], object),
        numpy.zeros(2, complex),
        numpy.array("2024-01-01", "datetime64[D]"),
        {"a": torch.zeros(1)},
        Point(),
        datetime.date(2024, 1, 1),
        datetime.datetime(2024, 1, 1),
        1j,
        {(1, 2): 3},
        memoryview(b"x"),
        [b"bytes"],
        CIRCULAR,
        "\ud800",
    ],
    ids=lambda v: type(v).__name__,
)
def test_what_json_dumps_refuses_is_unsupported_and_named(value):
    with pytest.raises(UnsupportedOutput, match="Unsupported model output data type") as caught:
        codec.encode(value)
    assert type(value).__name__ in caught.value.detail


@pytest.mark.parametrize("value", [uuid.UUID(int=1), enum.Enum("Colour", "red").red], ids=["uuid", "enum"])
def test_uuids_and_enums_go_through_where_torchserve_refuses(value):
    assert codec.encode([value]) == orjson.dumps([value], option=orjson.OPT_INDENT_2)


# What a handler sees


def seen(value, content_type):
    return codec.decode(InputPart("body", value, content_type))


@pytest.mark.parametrize(
    "content_type", ["application/json", "application/json; charset=utf-8", "Application/JSON"]
)
def test_json_becomes_an_object(content_type):
    assert seen(b'{"a": [1, 2.5, null]}', content_type) == {"a": [1, 2.5, None]}


def test_what_only_the_standard_library_takes_for_json_is_json():
    assert math.isnan(seen(b"NaN", "application/json"))
    assert seen(b"[-Infinity]", "application/json") == [-math.inf]
    assert seen(b'"\\ud800"', "application/json") == "\ud800"
    assert seen(b"1e400", "application/json") == math.inf


@pytest.mark.parametrize("value", [b"{not json", b"", b"\xff", b"\xef\xbb\xbf1", b"[" * 100_000])
def test_json_that_is_none_stays_raw(value):
    got = seen(value, "application/json")
    assert got == value
    assert type(got) is bytearray


def test_text_becomes_str_and_stays_raw_where_it_is_not_utf8():
    assert seen("é".encode(), "text/plain") == "é"
    assert seen(b"<p>", "text/html; charset=utf-8") == "<p>"
    assert seen(b"\xff", "text/plain") == bytearray(b"\xff")


@pytest.mark.parametrize(
    "content_type", [None, "", "image/png", "application/octet-stream", "application/x-ndjson"]
)
def test_everything_else_is_a_bytearray(content_type):
    got = seen(b"{}", content_type)
    assert got == b"{}"
    assert type(got) is bytearray


def test_a_row_has_its_inputs_by_name():
    request = InferenceRequest(
        "m", inputs=(InputPart("a", b"1", "application/json"), InputPart("b", b"x", "text/plain"))
    )
    assert codec.read_row(request) == {"a": 1, "b": "x"}
    assert codec.read_row(request, decoded=False) == {"a": bytearray(b"1"), "b": bytearray(b"x")}
    assert codec.parameters(request) == {
        "a": {"content-type": "application/json"},
        "b": {"content-type": "text/plain"},
    }


def test_the_kind_of_call_is_a_header_as_torchserve_injects_it():
    sent = {"X-Mine": "1"}
    assert codec.headers(InferenceRequest("m", headers=sent)) == {"X-Mine": "1", "explain": "False"}
    assert codec.headers(InferenceRequest("m", headers=sent, kind="explain")) == {
        "X-Mine": "1",
        "explain": "True",
    }
    assert codec.headers(InferenceRequest("m", headers=sent, kind="describe")) == {
        "X-Mine": "1",
        "describe": "True",
    }
    assert sent == {"X-Mine": "1"}


@pytest.mark.parametrize(
    "value",
    [
        [0.5, 1.25e-05, -3e-07, 10.00001, 1e16, -0.0, 1e-300],
        {"cat": 0.9, "dog": 1e-05, "e1": 2e-05, "0.0000": [1e-05]},
        [{"a": [1e-05, True, False]}, 0.00001],
        1e-05,
        {"text": "0.00001", "score": 1e-05},
        {"text": 'a": 0.00001', "score": 1e-05},
        ["0.00001", 'x": 1e-5', 1e-05],
        {'key": 0.00001': 1e-05},
        {'0.00001": ': 2, "more": 1e-05},
    ],
)
def test_small_floats_keep_their_value_whatever_stands_beside_them(value):
    assert_like_json_dumps(codec.encode(value), value)


# Arrays of numpy


@pytest.mark.parametrize(
    "value",
    [
        numpy.zeros(2),
        numpy.float32(0.1),
        [numpy.float32(1), numpy.int64(1), numpy.bool_(True)],
        {"vector": numpy.array([0.1, 1e-05], "f4"), "count": numpy.arange(3)},
        numpy.array(3.5),
        numpy.array([[math.nan, 1.0]]),
        numpy.array(["text", "é"]),
    ],
    ids=repr,
)
def test_an_array_is_its_list(value):
    assert_like_json_dumps(codec.encode(value), value)


def test_each_number_format_is_written_as_its_list():
    for kind in ("f2", "f4", "f8", ">f4", ">i4", "i1", "u8", "?", "g", "U4"):
        array = numpy.array([[0, 1, 1], [1, 0, 1]]).astype(kind)
        if kind == "g":  # numpy has no number of Python's for it
            with pytest.raises(UnsupportedOutput):
                [codec.encode(row) for row in written_rows(array)]
        else:
            same_rows(array)


def written_rows(array):
    return TensorRowCodec().rows([], array)


def same_rows(array):
    written = [codec.encode(row) for row in written_rows(array)]
    assert len(written) == len(array)
    for text, row in zip(written, array.tolist()):
        assert_like_json_dumps(text, row)


@given(st.lists(st.integers(0, 2**32 - 1), min_size=60, max_size=60), st.sampled_from(("f4", "f2", "u4")))
@settings(max_examples=150, deadline=None, database=None)
def test_rows_of_all_bit_patterns_are_json_dumps(bits, kind):
    same_rows(numpy.array(bits, "u4").view(kind)[:60].reshape(3, -1))


@given(
    st.lists(
        st.one_of(
            st.floats(-1e-4, 1e-4), st.floats(-1, 1), st.sampled_from((0.0, -0.0, 1e-5, 1.2e-5, 1e15, 1e16))
        ),
        min_size=24,
        max_size=24,
    ),
    st.sampled_from(((24,), (4, 6), (2, 3, 4), (1, 24), (24, 1), (3, 8, 1, 1))),
)
@settings(max_examples=250, deadline=None, database=None)
def test_rows_with_small_and_large_numbers_are_json_dumps(numbers, shape):
    same_rows(numpy.array(numbers).reshape(shape))


def test_a_number_that_begins_like_another_stays_itself():
    same_rows(numpy.array([[1.00005e-5, 1e-5, 1.00001, 10.00001, -1e-5, 1e-5]]))


def test_rows_of_any_layout_in_memory_are_written_in_order():
    array = numpy.arange(24, dtype="f4").reshape(2, 3, 4)
    for view in array.transpose(2, 0, 1), array[:, ::-1], array[:0], array[:, :, :0]:
        same_rows(view)
