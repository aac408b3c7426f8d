from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

from serve_app.domain import validation


@dataclass(frozen=True)
class Part:
    __pydantic_config__ = validation.STRICT
    size: int = 1

    def __post_init__(self) -> None:
        if self.size > 9:
            raise ValueError("size is at most 9")


@dataclass(frozen=True)
class Whole:
    __pydantic_config__ = validation.STRICT
    name: str
    part: Part | None = None
    parts: tuple[Part, ...] = ()
    shares: Mapping[str, int] = field(default_factory=dict)
    key: str = ""


def test_a_document_and_back() -> None:
    whole = Whole("w", Part(2), (Part(), Part(3)), {"a": 1})
    document = {
        "name": "w",
        "part": {"size": 2},
        "parts": [{"size": 1}, {"size": 3}],
        "shares": {"a": 1},
        "key": "",
    }
    assert validation.write(whole) == document
    assert validation.read(Whole, document) == whole


@pytest.mark.parametrize(
    ("document", "result"),
    [
        ({}, "name: Field required"),
        ({"name": "w", "prt": {}}, "unknown key 'prt'; did you mean 'part'?"),
        ({"name": "w", "zzz": 1}, "unknown key 'zzz'; known here: name, part, parts, shares, key"),
        ({"name": "w", "part": {"sise": 1}}, "unknown key 'part.sise'; did you mean 'size'?"),
        ({"name": "w", "parts": [{"sise": 1}]}, "unknown key 'parts.0.sise'; did you mean 'size'?"),
        ({"name": "w", "part": {"size": 10}}, "part: size is at most 9 (got {'size': 10})"),
        ({"name": 1.0}, "name: Input should be a valid string; put it in quotes (got 1.0)"),
        (
            {"name": "w", "shares": {1.0: 1}},
            "shares.1.0: Input should be a valid string; put it in quotes (got 1.0)",
        ),
    ],
)
def test_errors_name_the_place_and_the_fix(document: object, result: str) -> None:
    with pytest.raises(validation.DocumentError) as caught:
        validation.read(Whole, document)
    assert str(caught.value) == result


def test_all_errors_are_reported_at_once_without_secrets() -> None:
    with pytest.raises(validation.DocumentError) as caught:
        validation.read(Whole, {"name": [], "key": ["secret"]}, secret_paths=(("key",),))
    assert (
        str(caught.value)
        == "name: Input should be a valid string (got []); key: Input should be a valid string"
    )


def test_a_near_miss_minds_neither_case_nor_dashes() -> None:
    assert validation.did_you_mean("Max-Workers", ["min_size", "max_workers"]) == "max_workers"
    assert validation.did_you_mean("colour", ["min_size"]) is None
