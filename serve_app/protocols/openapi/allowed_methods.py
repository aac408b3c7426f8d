"""The methods of a path, according to the port's document. Source: RFC 9110, 15.5.6 and 10.2.1."""

from __future__ import annotations

import re
from functools import cached_property

from serve_app.protocols.openapi.builders import Json

_SEGMENT_PATTERNS = {"{url_path}": ".+"}  # may contain slashes


class AllowedMethods:
    """The allowed methods of the paths in ``document``, which is read on first use because that is rare."""

    def __init__(self, document: Json) -> None:
        self._document = document

    def allow(self, path: str, but: str) -> bytes | None:
        """Return the value of the header Allow without the rejected method ``but``.

        Returns None for a path that the document does not describe.
        """
        for pattern, methods in self._paths:
            if pattern.fullmatch(path.rstrip("/") or "/"):
                return ", ".join(method for method in methods if method != but).encode()
        return None

    @cached_property
    def _paths(self) -> list[tuple[re.Pattern[str], list[str]]]:
        # More specific paths come first, as in the routers.
        paths = sorted(self._document["paths"].items(), key=lambda item: item[0].count("{"))
        return [(_compile_path(path), _list_methods(operations)) for path, operations in paths]


def _compile_path(path: str) -> re.Pattern[str]:
    segments = re.split(r"(\{\w+\})", path)
    return re.compile(
        "".join(
            _SEGMENT_PATTERNS.get(segment, "[^/]+") if segment.startswith("{") else re.escape(segment)
            for segment in segments
        )
    )


def _list_methods(operations: Json) -> list[str]:
    methods = [method.upper() for method in operations]
    head = ["HEAD"] if "GET" in methods else []
    options = ["OPTIONS"] if "OPTIONS" not in methods else []
    return [*methods, *head, *options]
