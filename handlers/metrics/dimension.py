"""A dimension of a metric, which distinguishes its updates."""

from __future__ import annotations

from typing import Any


class Dimension:
    """A name and its value; as text ``name:value``."""

    __slots__ = ("name", "value")

    def __init__(self, name: str, value: Any) -> None:
        self.name = name
        self.value = value

    def __str__(self) -> str:
        return f"{self.name}:{self.value}"

    def __repr__(self) -> str:
        return f"Dimension({self.name!r}, {self.value!r})"

    def to_dict(self) -> dict[str, Any]:
        return {"Name": self.name, "Value": self.value}
