"""Request bodies as a handler's inputs, byte for byte."""

from __future__ import annotations

import asyncio
import os

import httpx
import pytest

from serve_app.domain.request import InputPart
from serve_app.errors import InvalidBody
from serve_app.protocols.http.form_data import parse_body, parse_query, read_body

FORM = "multipart/form-data; boundary=XX"


def encode(**form: object) -> tuple[str, bytes]:
    request = httpx.Request("POST", "http://m", **form)
    return request.headers["content-type"], request.read()


@pytest.mark.parametrize(
    ("content_type", "expected"),
    [
        (None, None),
        ("", None),
        ("application/json", "application/json"),
        ("application/json; charset=utf-8", "application/json"),
        ("image/png", "image/png"),
        ("multipart/mixed; boundary=x", "multipart/mixed"),
    ],
)
def test_a_raw_body_is_one_input(content_type: str | None, expected: str | None) -> None:
    assert parse_body(content_type, b"\x00\xff") == (InputPart("body", b"\x00\xff", expected),)


def test_multipart_keeps_the_type_of_files_only() -> None:
    content_type, body = encode(
        data={"target": "1"}, files={"data": ("a.json", b"{}", "application/json; x=y")}
    )
    assert parse_body(content_type, body) == (
        InputPart("target", b"1"),
        InputPart("data", b"{}", "application/json"),
    )


def test_a_plain_field_loses_its_content_type() -> None:
    body = (
        b'--XX\r\nContent-Disposition: form-data; name="data"\r\n'
        b"Content-Type: application/json\r\n\r\n{}\r\n--XX--\r\n"
    )
    assert parse_body(FORM, body) == (InputPart("data", b"{}"),)


def test_a_file_without_a_type_is_an_octet_stream() -> None:
    body = b'--XX\r\nContent-Disposition: form-data; name="data"; filename=""\r\n\r\nx\r\n--XX--\r\n'
    assert parse_body(FORM, body) == (InputPart("data", b"x", "application/octet-stream"),)


def test_multipart_is_binary_safe() -> None:
    for data in (os.urandom(100_000), b"\r\n--", b"\r\n\r\n--X\r\n", bytes(range(256)), b""):
        content_type, body = encode(files={"data": ("x.bin", data, "image/png")})
        assert parse_body(content_type, body) == (InputPart("data", data, "image/png"),)


def test_repeated_fields_all_arrive_in_order() -> None:
    content_type, body = encode(files=[("data", ("a", b"1")), ("data", ("b", b"2"))])
    assert [(i.name, i.value) for i in parse_body(content_type, body)] == [("data", b"1"), ("data", b"2")]


def test_field_names_may_be_outside_ascii() -> None:
    body = '--XX\r\nContent-Disposition: form-data; name="größe"\r\n\r\n1\r\n--XX--\r\n'.encode()
    assert parse_body(FORM, body) == (InputPart("größe", b"1"),)


@pytest.mark.parametrize(
    ("content_type", "body", "message"),
    [
        ("multipart/form-data", b"x", "no boundary"),
        (FORM, b"", "before its closing boundary"),
        (FORM, b"hello", "malformed"),
        (FORM, b'--XX\r\nContent-Disposition: form-data; name="a"\r\n\r\n1', "before its closing boundary"),
        (FORM, b"--XX\r\nContent-Disposition: form-data\r\n\r\n1\r\n--XX--\r\n", "no name"),
        (FORM, b"--XX\r\n\r\n1\r\n--XX--\r\n", "no name"),
        (FORM, b"--XX\r\nbad header\r\n\r\n1\r\n--XX--\r\n", "malformed"),
        ("multipart/form-data; boundary=" + "x" * 1000, b"x", "malformed"),
    ],
)
def test_malformed_multipart_is_refused(content_type: str, body: bytes, message: str) -> None:
    with pytest.raises(InvalidBody, match=message):
        parse_body(content_type, body)


def test_urlencoded_fields_are_decoded_to_bytes() -> None:
    body = b"data=a+b%26%FF&flag&data=2&gr%C3%B6%C3%9Fe=1&&x=a=b\r\n"
    assert parse_body("application/x-www-form-urlencoded; charset=utf-8", body) == (
        InputPart("data", b"a b&\xff"),
        InputPart("flag", b""),
        InputPart("data", b"2"),
        InputPart("größe", b"1"),
        InputPart("x", b"a=b"),
    )


def multipart(fields: int) -> bytes:
    return b'--XX\r\nContent-Disposition: form-data; name="a"\r\n\r\nb\r\n' * fields + b"--XX--\r\n"


def test_a_form_has_at_most_a_thousand_fields() -> None:
    many = "more than 1000 fields .inference.max_form_fields."
    assert len(parse_body(FORM, multipart(1000))) == 1000
    assert len(parse_body("application/x-www-form-urlencoded", b"&".join([b"a=b"] * 1000))) == 1000
    with pytest.raises(InvalidBody, match=many):
        parse_body(FORM, multipart(1001))
    with pytest.raises(InvalidBody, match=many):
        parse_body("application/x-www-form-urlencoded", b"&".join([b"a=b"] * 1001))
    with pytest.raises(InvalidBody, match=many):
        parse_query(b"&" * 1001)
    with pytest.raises(InvalidBody, match="more than 2 fields"):
        parse_body(FORM, multipart(3), 2)


@pytest.mark.parametrize("shift", range(4))
def test_escapes_of_a_large_value_are_decoded(shift: int) -> None:
    body = b"a=" + b"x" * shift + b"%41%zz%4" * 40_000
    expected = b"x" * shift + b"A%zz%4" * 40_000
    assert parse_body("application/x-www-form-urlencoded", body) == (InputPart("a", expected),)


def test_the_event_loop_runs_while_a_large_form_is_parsed() -> None:
    async def run() -> tuple[int, int]:
        form = asyncio.create_task(read_body("application/x-www-form-urlencoded", b"a=" + b"%41" * (1 << 20)))
        turns = 0
        while not form.done():
            await asyncio.sleep(0)
            turns += 1
        return len((await form)[0].value), turns

    size, turns = asyncio.run(run())
    assert size == 1 << 20 and turns > 10
