"""Tests of a workflow's functions, and of the encoding of several values as one body."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from handlers.context import Context
from handlers.errors import HandlerLoadError, PredictionException
from handlers.loading.workflow_functions import FUNCTION_HEADER, WorkflowFunctions, encode_value
from handlers.multipart import PARTS_CONTENT_TYPE, join_parts, split_parts

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
PLAIN_FILE = """
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
    """A loaded handler of functions with its context."""

    def __init__(self, folder: Path, file: str, *names: str, plain: bool = False) -> None:
        (folder / "steps.py").write_text(file)
        config = {"functions": {"file": "steps.py", "names": list(names), "plain": plain}}
        self.context = Context("w", str(folder), {}, model_yaml_config=config)
        self.functions = WorkflowFunctions()
        self.functions.initialize(self.context)

    def call(self, function: str | None, **inputs: Any) -> tuple[Any, str | None]:
        """Return the value and its content type; inputs are values, or pairs with a content type."""
        given = {name: value if isinstance(value, tuple) else (value, None) for name, value in inputs.items()}
        parameters = {name: {"content-type": content_type or ""} for name, (_, content_type) in given.items()}
        headers = {FUNCTION_HEADER: function} if function else {}
        self.context.begin(["r1"], [headers], [parameters])
        [value] = self.functions.handle([{name: value for name, (value, _) in given.items()}], self.context)
        return value, self.context.get_response_content_type(0)


def test_inputs_and_values_are_converted_by_content_type(tmp_path: Path) -> None:
    process = Process(tmp_path, FILE, "double", "cut", "glue")
    assert process.call("double", number=21) == (b"42", "application/json")
    assert process.call("double", number="ab") == (b"abab", "text/plain")
    assert process.call("double", number=bytearray(b"\xff")) == (b"\xff\xff", None)
    assert process.call("double", number=["a"]) == (b'["a", "a"]', "application/json")
    body, content_type = process.call("cut", body=bytearray(b"x-\xff"))
    assert content_type == PARTS_CONTENT_TYPE and split_parts(body) == [(b"x", None), (b"\xff", None)]
    assert process.call(
        "glue", lines=(bytearray(body.replace(b"\xff", b"y")), PARTS_CONTENT_TYPE), note="!"
    ) == (
        b"x+y!",
        "text/plain",
    )


def test_nested_lists_keep_their_content_types(tmp_path: Path) -> None:
    process = Process(tmp_path, "def same(x):\n    return x\n", "same")
    inner = join_parts([(b"1", None)])
    outer = join_parts(
        [(b'{"n": 1}', "application/json"), (b"text", "text/plain"), (inner, PARTS_CONTENT_TYPE)]
    )
    body, content_type = process.call("same", x=(bytearray(outer), PARTS_CONTENT_TYPE))
    assert content_type == PARTS_CONTENT_TYPE
    given, text, nested = split_parts(body)
    assert (json.loads(given[0]), given[1], text) == ({"n": 1}, "application/json", (b"text", "text/plain"))
    assert nested[1] == PARTS_CONTENT_TYPE and split_parts(nested[0]) == [(b"1", None)]


def test_errors_affect_only_their_row(tmp_path: Path) -> None:
    process = Process(tmp_path, FILE, "fails", "nothing", "double")
    assert isinstance(process.call("fails", body=1)[0], ValueError)
    assert isinstance(process.call("nothing", body=1)[0], TypeError)
    assert isinstance(process.call("double", wrong=1)[0], TypeError)
    assert isinstance(process.call("glue", body=1)[0], LookupError)
    assert isinstance(process.call(None, body=1)[0], LookupError)


def test_prediction_exceptions_of_functions_are_returned(tmp_path: Path) -> None:
    file = (
        "from handlers import PredictionException\ndef f(body):\n    raise PredictionException('dark', 422)\n"
    )
    [error, _] = Process(tmp_path, file, "f").call("f", body=1)
    assert isinstance(error, PredictionException) and error.error_code == 422


def test_plain_functions_are_called_as_handlers(tmp_path: Path) -> None:
    process = Process(tmp_path, PLAIN_FILE, "first", "wrong", plain=True)
    assert process.call("first", body=bytearray(b"x")) == ({"got": "x", "id": "r1"}, None)
    assert isinstance(process.call("wrong", body=bytearray(b"x"))[0], TypeError)
    import sys

    assert sys.modules[process.functions._functions["first"].__module__].loaded == ["w"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("doubel", "steps.py: 'doubel' is no function. Did you mean 'double'?"),
        ("calls", "steps.py: 'calls' is no plain function"),
        ("later", "steps.py: 'later' is no plain function (an async def is not called)"),
    ],
)
def test_names_that_are_no_functions_are_rejected(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(HandlerLoadError) as raised:
        Process(tmp_path, FILE, name)
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize("parts", [[], [(b"", None)], [(b"\xff" * 3, "a/b"), (b"", "x"), (b"1", None)]])
def test_split_parts_reverses_join_parts(parts: list[tuple[bytes, str | None]]) -> None:
    assert split_parts(join_parts(parts)) == parts


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x02\x00\x00\x00[",
        b"\x02\x00\x00\x00[]x",
        b"\x02\x00\x00\x00{}x",
        join_parts([(b"abc", None)])[:-1],
        join_parts([(b"abc", None)]) + b"x",
        b"\x0b\x00\x00\x00[[-1, null]]",
        b"\x0b\x00\x00\x00[[1.5,null]]x",
        b"\x07\x00\x00\x00[[1,2]]x",
        b"\x04\x00\x00\x00null",
    ],
)
def test_malformed_bodies_are_rejected(body: bytes) -> None:
    with pytest.raises(ValueError, match="of parts"):
        split_parts(body)


def test_values_that_json_does_not_have_are_null() -> None:
    assert encode_value([math.nan, {"a": -math.inf}, "NaN"]) == (
        b'[null, {"a": null}, "NaN"]',
        "application/json",
    )
