"""The request of a script whose ``run`` has the decorator ``rawhttp``."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlencode

from handlers import json_text


def rawhttp(run: Callable[..., Any]) -> Callable[..., Any]:
    """Mark ``run``, which gets the request itself instead of its text."""
    run.is_raw_http = True  # type: ignore[attr-defined]
    return run


class AMLRequest:
    """An HTTP request, with the attributes of Flask's that scripts read.

    ``files`` has the parts of a form as files, and ``form`` the same as texts.
    """

    def __init__(
        self,
        body: bytes | None,
        args: Mapping[str, str],
        parts: Mapping[str, bytes],
        headers: Mapping[str, Any],
    ) -> None:
        self.method = "GET" if body is None and not parts else "POST"
        self.headers = headers
        self.data = body or b""
        self.args = dict(args)
        self.path = "/score"
        self.full_path = f"{self.path}?{urlencode(self.args)}"
        self.files = {name: io.BytesIO(value) for name, value in parts.items()}
        self.form = {name: value.decode(errors="replace") for name, value in parts.items()}

    def get_data(self, cache: bool = True, as_text: bool = False) -> bytes | str:
        return self.data.decode(errors="replace") if as_text else self.data

    def get_json(self, force: bool = False, silent: bool = False) -> Any:
        """Return the parsed body. Raises ValueError; with ``silent`` returns None instead."""
        try:
            return json_text.loads(self.data)
        except ValueError:
            if silent:
                return None
            raise

    @property
    def json(self) -> Any:
        return self.get_json()
