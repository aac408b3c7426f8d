"""A workflow's functions, called as rows ask for them; lists of bytes as one body."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from handlers.context import Context
from handlers.errors import HandlerLoadError, PredictionException
from handlers.functions import HEADER, Functions
from handlers.parts import PARTS, join, split

FILE = """
calls = []

def double(number):
    calls.append(number)
    return number * 2

def cut(body, marker="-"):
    return body.split(marker.encode())

def glue(lines, note):
    return "+".join(line.decode() for line in lines) + note

def fails(body):
    raise ValueError("no")

def nothing(body):
    return object()

async def later(body):
    return body
"""
PLAIN = """
loaded = []

def first(data, context):
    if data is None:
        loaded.append(context.model_name)
        return None
    return [{"got": bytes(data[0]["body"]).decode(), "id": context.get_request_id(0)}]

def wrong(data, context):
    return data and ["a", "b"]
"""


class Process:
    def __init__(self, folder: Path, file: str, *names: str, plain: bool = False) -> None:
        (folder / "steps.py").write_text(file)
        config = {"functions": {"file": "steps.py", "names": list(names), "plain": plain}}
        self.context = Context("w", str(folder), {}, model_yaml_config=config)
        self.functions = Functions()
        self.functions.initialize(self.context)

    def call(self, function: str | None, **inputs: Any) -> tuple[Any, str | None]:
        """The value and its content type; inputs are values, or pairs with a content type."""
        given = {name: value if isinstance(value, tuple) else (value, None) for name, value in inputs.items()}
        parameters = {name: {"content-type": content_type or ""} for name, (_, content_type) in given.items()}
        headers = {HEADER: function} if function else {}
        self.context.begin(["r1"], [headers], [parameters])
        [value] = self.functions.handle([{name: value for name, (value, _) in given.items()}], self.context)
        return value, self.context.get_response_content_type(0)


def test_inputs_come_by_name_and_values_go_as_what_they_are(tmp_path: Path) -> None:
    process = Process(tmp_path, FILE, "double", "cut", "glue")
    assert process.call("double", number=21) == (b"42", "application/json")
    assert process.call("double", number="ab") == (b"abab", "text/plain")
    assert process.call("double", number=bytearray(b"\xff")) == (b"\xff\xff", None)
    assert process.call("double", number=["a"]) == (b'["a", "a"]', "application/json")
    body, content_type = process.call("cut", body=bytearray(b"x-\xff"))
    assert content_type == PARTS and split(body) == [(b"x", None), (b"\xff", None)]
    assert process.call("glue", lines=(bytearray(body.replace(b"\xff", b"y")), PARTS), note="!") == (
        b"x+y!",
        "text/plain",
    )


def test_lists_in_lists_and_their_content_types(tmp_path: Path) -> None:
    process = Process(tmp_path, "def same(x):\n    return x\n", "same")
    inner = join([(b"1", None)])
    outer = join([(b'{"n": 1}', "application/json"), (b"text", "text/plain"), (inner, PARTS)])
    body, content_type = process.call("same", x=(bytearray(outer), PARTS))
    assert content_type == PARTS
    given, words, nested = split(body)
    assert (json.loads(given[0]), given[1], words) == ({"n": 1}, "application/json", (b"text", "text/plain"))
    assert nested[1] == PARTS and split(nested[0]) == [(b"1", None)]


def test_one_rows_error_is_its_own(tmp_path: Path) -> None:
    process = Process(tmp_path, FILE, "fails", "nothing", "double")
    assert isinstance(process.call("fails", body=1)[0], ValueError)
    assert isinstance(process.call("nothing", body=1)[0], TypeError)
    assert isinstance(process.call("double", wrong=1)[0], TypeError)
    assert isinstance(process.call("glue", body=1)[0], LookupError)
    assert isinstance(process.call(None, body=1)[0], LookupError)


def test_an_authors_own_refusal_goes_through(tmp_path: Path) -> None:
    file = "from handlers import PredictionException\ndef f(body):\n    raise PredictionException('dark', 422)\n"
    [error, _] = Process(tmp_path, file, "f").call("f", body=1)
    assert isinstance(error, PredictionException) and error.error_code == 422


def test_torchserves_functions_are_handlers(tmp_path: Path) -> None:
    process = Process(tmp_path, PLAIN, "first", "wrong", plain=True)
    assert process.call("first", body=bytearray(b"x")) == ({"got": "x", "id": "r1"}, None)
    assert isinstance(process.call("wrong", body=bytearray(b"x"))[0], TypeError)
    import sys

    assert sys.modules[process.functions._functions["first"].__module__].loaded == ["w"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("doubel", "steps.py: 'doubel' is no function. Did you mean 'double'?"),
        ("calls", "steps.py: 'calls' is no plain function"),
        ("later", "steps.py: 'later' is no plain function (an async def is not called)"),
    ],
)
def test_a_name_that_is_no_function(tmp_path: Path, name: str, words: str) -> None:
    with pytest.raises(HandlerLoadError) as raised:
        Process(tmp_path, FILE, name)
    assert str(raised.value).startswith(words)


@pytest.mark.parametrize("parts", [[], [(b"", None)], [(b"\xff" * 3, "a/b"), (b"", "x"), (b"1", None)]])
def test_parts_are_joined_and_split(parts: list[tuple[bytes, str | None]]) -> None:
    assert split(join(parts)) == parts


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x02\x00\x00\x00[",
        b"\x02\x00\x00\x00[]x",
        b"\x02\x00\x00\x00{}x",
        join([(b"abc", None)])[:-1],
        join([(b"abc", None)]) + b"x",
        b"\x0b\x00\x00\x00[[-1, null]]",
        b"\x0b\x00\x00\x00[[1.5,null]]x",
        b"\x07\x00\x00\x00[[1,2]]x",
        b"\x04\x00\x00\x00null",
    ],
)
def test_a_body_that_is_no_parts(body: bytes) -> None:
    with pytest.raises(ValueError, match="of parts"):
        split(body)
