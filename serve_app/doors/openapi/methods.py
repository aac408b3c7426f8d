"""Which methods a path has, by the document of its port. Source: RFC 9110, 15.5.6 and 10.2.1."""

from __future__ import annotations

import re
from functools import cached_property

from serve_app.doors.openapi.words import Json

_INNER = {"{url_path}": ".+"}  # may have slashes in it


class Methods:
    """``document`` is read when somebody asks first: hardly anybody does."""

    def __init__(self, document: Json) -> None:
        self._document = document

    def allow(self, path: str, but: str) -> bytes | None:
        """The header Allow's value, without a method that was just refused; None for a path that nobody described."""
        for pattern, methods in self._paths:
            if pattern.fullmatch(path.rstrip("/") or "/"):
                return ", ".join(method for method in methods if method != but).encode()
        return None

    @cached_property
    def _paths(self) -> list[tuple[re.Pattern[str], list[str]]]:
        # What is more exact comes first, as the doors have it.
        paths = sorted(self._document["paths"].items(), key=lambda item: item[0].count("{"))
        return [(_pattern(path), _methods(operations)) for path, operations in paths]


def _pattern(path: str) -> re.Pattern[str]:
    parts = re.split(r"(\{\w+\})", path)
    return re.compile("".join(_INNER.get(p, "[^/]+") if p.startswith("{") else re.escape(p) for p in parts))


def _methods(operations: Json) -> list[str]:
    said = [method.upper() for method in operations]
    return [*said, *(["HEAD"] if "GET" in said else []), *(["OPTIONS"] if "OPTIONS" not in said else [])]
