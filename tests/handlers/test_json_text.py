"""JSON texts of requests: their errors and limits."""

from __future__ import annotations

import json

import pytest

from handlers import json_text
from handlers.errors import PredictionException


@pytest.mark.parametrize("kind", ["utf-8", "utf-16", "utf-32"])
def test_values_are_those_of_json(kind: str) -> None:
    text = '{"a": ["\u00e9", NaN, 1' + "0" * 30 + "]}"
    assert repr(json_text.loads(text.encode(kind))) == repr(json.loads(text)) == repr(json_text.loads(text))


@pytest.mark.parametrize("levels", [250, 251, 5_000, 100_000])
@pytest.mark.parametrize(("start", "end"), [("[", "]"), ('{"a":', "}")])
def test_levels_are_limited(levels: int, start: str, end: str) -> None:
    text = start * levels + "1" + end * levels
    if levels == 250:
        json_text.loads(text)
    else:
        with pytest.raises(ValueError, match="more than 250 levels"):
            json_text.loads(text)


def test_brackets_of_texts_are_no_levels() -> None:
    assert json_text.loads(json.dumps(["[" * 300, "{" * 300])) == ["[" * 300, "{" * 300]
    assert len(json_text.loads("[" + "[0]," * 300 + "0]")) == 301


@pytest.mark.parametrize("kind", ["utf-8", "utf-16", "utf-32"])
@pytest.mark.parametrize("text", ["]" * 1000, "}]", '"]', "\\", '\\"]', "\u5d5d\u2222", "a"])
def test_brackets_and_quotes_of_texts_hide_no_levels(kind: str, text: str) -> None:
    quoted = json.dumps(text, ensure_ascii=False)
    deep = f'{{"a":{quoted},"b":' + f"[{quoted}," * 250 + "1" + "]" * 250 + "}"
    with pytest.raises(ValueError, match="more than 250 levels"):
        json_text.loads(deep.encode(kind))
    flat = deep.removeprefix('{"a":' + quoted + ',"b":').removesuffix("}")
    assert json_text.loads(flat.encode(kind)) == json.loads(flat)


def test_texts_are_unicode() -> None:
    assert json_text.check_text("\U0001f600") == "\U0001f600"
    with pytest.raises(PredictionException, match="no Unicode"):
        json_text.check_text("a\ud800")
