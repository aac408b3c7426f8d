"""Example values of JSON schemas are valid for the types that the schemas were made of."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field, TypeAdapter

from serve_app.domain.schema_example import example_value


class Part(BaseModel):
    size: int = Field(ge=3)
    color: Literal["red", "blue"]


class Whole(BaseModel):
    name: str
    parts: list[Part]
    scale: float = 2.0
    choice: int | str
    parent: Whole | None = None


class Endless(BaseModel):
    inner: Endless


@pytest.mark.parametrize("kind", [Whole, list[Part], list[float], str, bool, int, dict, dict[str, Part]])
def test_an_example_is_valid(kind: Any) -> None:
    adapter = TypeAdapter(kind)
    adapter.validate_python(example_value(adapter.json_schema()))


def test_an_example_of_the_schema_is_used() -> None:
    assert example_value({"type": "string", "examples": ["an example"]}) == "an example"


def test_a_recursive_schema_ends() -> None:
    assert "inner" in example_value(TypeAdapter(Endless).json_schema())
