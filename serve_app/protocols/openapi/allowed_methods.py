"""The methods of a path, according to the port's document. Source: RFC 9110, 15.5.6 and 10.2.1."""

from __future__ import annotations

import re
from functools import cached_property

from starlette.routing import compile_path

from serve_app.protocols.openapi.document import Document


class AllowedMethods:
    """The allowed methods of the paths in ``document``, which is read on first use because that is rare."""

    def __init__(self, document: Document) -> None:
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
        # More specific paths come first, as in the routers. The parameter url_path may contain slashes.
        paths = sorted(self._document.methods.items(), key=lambda item: item[0].count("{"))
        return [
            (compile_path(path.replace("{url_path}", "{url_path:path}"))[0], _add_implied_methods(methods))
            for path, methods in paths
        ]


def _add_implied_methods(methods: list[str]) -> list[str]:
    head = ["HEAD"] if "GET" in methods else []
    options = ["OPTIONS"] if "OPTIONS" not in methods else []
    return [*methods, *head, *options]
